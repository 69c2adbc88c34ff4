"""A client that is forgotten leaves nothing in its site's store, takes no further part, and changes no other client."""

import json

import pytest
import torch

from federation.test_faults import Killed
from federation.test_federated_run import SITES, make_experiment, run_over_sites, server_of
from federation.test_secure_federation import SECURE, SUMS_ALONE, secure_services
from federation.test_site_models import X, models_of
from federation.test_site_service import DATA, Talk, open_run, train
from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl.core.errors import CheckpointError, DataError
from ppfl.data.preparation_settings import PreparationSettings
from ppfl.federation.envelope import ERROR
from ppfl.federation.forgetting import forget_client, forget_run
from ppfl.federation.run_clients import RunClients
from ppfl.federation.state_store import StateStore

CLIENT = "g0-c1"


def site_with(services, client):
    return next(service for service in services.values() if client in service.federation.ids)


def over_sites(experiment, folder, services=None, **options):
    clock = FakeClock()
    services = services or make_services(folder / "sites", SITES, experiment.model_dump(mode="json")["data"])
    carrier = FakeCarrier(services, clock)
    (record,) = run_over_sites(experiment, folder, carrier=carrier, clock=clock, **options)
    return record, services


def forget(service, client):
    """As the command does it: by a connection of its own."""
    store = StateStore(service.base / service.settings.state)
    try:
        return forget_client(store, client, service.settings.name)
    finally:
        store.close()


# ---------------------------------------------------------------------- the store


def test_nothing_of_the_client_stays_in_the_files_and_others_stay_as_they_are(tmp_path):
    _, services = over_sites(make_experiment("ditto", rounds=2), tmp_path)
    service = site_with(services, CLIENT)
    before, run = models_of(service), next(iter(service.store.runs()))
    at = before.ids.index(CLIENT)
    rows = [bytes(leaf[at].contiguous().numpy().tobytes()) for leaf in before.states.values() if leaf[at].numel() > 64]
    files = lambda: b"".join(file.read_bytes() for file in service.base.glob("state.sqlite*"))  # noqa: E731
    assert rows and all(row in files() for row in rows)
    name, runs = forget(service, CLIENT)
    assert (name, runs) == (CLIENT, [run])
    assert not any(row in files() for row in rows)
    assert service.store.last_reply(run).reply == b""
    after = models_of(service)
    assert after.ids == tuple(client for client in before.ids if client != CLIENT)
    for client in after.ids:
        assert torch.equal(after.predict(client, X), before.predict(client, X))
    with pytest.raises(DataError, match=f"no client '{CLIENT}'"):
        after.predict(CLIENT, X)


def test_an_unknown_client_is_an_error_that_names_known_ones_and_forgets_nobody(tmp_path):
    service = make_services(tmp_path, ["a"], DATA)["a"]
    open_run(Talk(service))
    with pytest.raises(DataError, match=r"site 'a' has no client 'x9'; it has 'g0-c0'"):
        forget(service, "x9")
    assert service.store.forgotten() == ()


def test_a_client_may_be_named_as_the_sites_own_data_name_it(tmp_path):
    service = make_services(tmp_path, ["a"], DATA, part=None)["a"]
    open_run(Talk(service))
    assert forget(service, "g0-c0")[0] == "a/g0-c0"


def test_a_cached_reply_is_not_given_again(tmp_path):
    talk = Talk(make_services(tmp_path, ["a"], DATA)["a"])
    _, start = open_run(talk)
    talk.ask(train(start, 1, 0))
    forget(talk.service, "g0-c0")
    found, said = talk.ask(train(start, 1, 0), number=talk.number)
    assert found.kind == ERROR and "deleted with a client's state" in said


def test_a_run_is_deleted_whole_and_other_runs_stay(tmp_path):
    service = make_services(tmp_path, ["a"], DATA)["a"]
    for run in ("old", "new"):
        open_run(Talk(service, run))
    forget_run(service.store, "old")
    assert list(service.store.runs()) == ["new"]
    tables = [name for (name,) in service.store.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in set(tables) - {"forgotten"}:
        assert not service.store.database.execute(f"SELECT * FROM {table} WHERE run = 'old'").fetchall()
    with pytest.raises(CheckpointError, match="no run 'old' in the store; its runs are: new"):
        forget_run(service.store, "old")


def test_a_run_that_is_deleted_while_it_goes_on_is_set_up_again_at_the_site(tmp_path):
    experiment = make_experiment("fedavg", rounds=3)
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])

    def delete(seed, end):
        if end.state.round == 1:
            store = services["a"].store
            forget_run(store, next(iter(store.runs())))

    record, _ = over_sites(experiment, tmp_path, services, on_round_end=delete)
    assert record.finished and {one["participants"] for one in record.metrics} == {len(record.ids)}
    assert models_of(services["a"]).ids == services["a"].federation.ids


# ---------------------------------------------------------------------- the run


def test_a_client_that_is_forgotten_takes_part_in_no_new_run(tmp_path):
    experiment = make_experiment("fedavg", rounds=1)
    first, services = over_sites(experiment, tmp_path / "first")
    forget(site_with(services, CLIENT), CLIENT)
    second, _ = over_sites(experiment, tmp_path / "second", services)
    assert set(first.ids) - set(second.ids) == {CLIENT}
    for service in services.values():  # also where the site is started anew
        again = type(service)(service.settings, service.base)
        assert CLIENT not in again.federation.ids


@pytest.mark.parametrize("method", ["ppfl-outputs", "ppfl-weights", "ditto", "fedavg"])
def test_a_run_goes_on_without_a_client_that_is_forgotten_in_the_middle(method, tmp_path):
    experiment = make_experiment(method, rounds=4)
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])
    service, last = site_with(services, CLIENT), {}

    def on_round_end(seed, end):
        if end.state.round == 1:  # its work for the second round has been sent with the scores of the first
            forget(service, CLIENT)
        if end.state.round == 2:
            last["server"] = end.state.server

    record, _ = over_sites(experiment, tmp_path, services, on_round_end=on_round_end)
    n = len(record.ids)
    assert [one["participants"] for one in record.metrics] == [n, n, n - 1, n - 1]
    assert not any(one.get("sites_refused") or one.get("sites_lost") for one in record.metrics)
    at = record.ids.index(CLIENT)
    scores = [one["per_client"] for one in record.metrics]
    assert [one[at] is None for one in scores] == [False, True, True, True]
    assert all(value is not None for one in scores for where, value in enumerate(one) if where != at)
    if method == "ppfl-outputs":  # the server's last known membership is gone
        c = server_of(record.folder)["server.memberships"]
        even = torch.full_like(c[at], 1 / c.shape[1])
        assert torch.equal(c[at], even) and not torch.allclose(last["server"].memberships[at], even)
        assert torch.equal(record.memberships[at], even)


def test_the_others_are_trained_as_if_the_client_had_been_lost(tmp_path):
    """An oracle: the same client is not forgotten, and the server does not ask it after round 2."""
    experiment = make_experiment("fedavg", rounds=4)
    services = make_services(tmp_path / "one", SITES, experiment.model_dump(mode="json")["data"])

    def on_round_end(seed, end):
        if end.state.round == 1:  # its work for the second round has been sent
            forget(site_with(services, CLIENT), CLIENT)

    found, _ = over_sites(experiment, tmp_path / "one", services, on_round_end=on_round_end)
    others = make_services(tmp_path / "two", SITES, experiment.model_dump(mode="json")["data"])
    service = site_with(others, CLIENT)
    rest = tuple(client for client in service.federation.ids if client != CLIENT)
    work, rounds = service._work[type(train({}, 1, 0))], []

    def without(run, request):
        rounds.append(request.round)
        return work(run, request._replace(who=rest) if request.round >= 2 else request)

    service._work[type(train({}, 1, 0))] = without
    expected, _ = over_sites(experiment, tmp_path / "two", others)
    assert rounds == [0, 1, 2, 3]
    one, other = server_of(found.folder), server_of(expected.folder)
    for name, leaf in one.items():
        torch.testing.assert_close(leaf, other[name], rtol=0, atol=1e-7)


def test_a_server_resumes_with_a_client_that_was_forgotten_meanwhile(tmp_path):
    experiment = make_experiment("ppfl-outputs", rounds=4)
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])

    def die(seed, end):
        if end.state.round == 2:
            raise Killed

    with pytest.raises(Killed):
        over_sites(experiment, tmp_path, services, on_round_end=die)
    service = site_with(services, CLIENT)
    forget(service, CLIENT)
    record, _ = over_sites(experiment, tmp_path, services, resume=True)
    assert record.finished and record.metrics[-1]["participants"] == len(record.ids) - 1


def test_the_rows_of_the_client_may_be_deleted_from_the_data_in_the_middle_of_a_run(tmp_path):
    data = {"name": "csv", "file": "t.csv", "client": "who", "target": "y", "task": "classification"}
    experiment = make_experiment("ppfl-outputs", rounds=4, data=data, algorithm={"name": "ppfl", "lr": 0.1})
    rows = [f"p{at % 4},{at % 7},{at % 3},{at % 2}" for at in range(60)]

    def write(name, rows):
        (tmp_path / "sites" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sites" / name / "t.csv").write_text("\n".join(["who,a,b,y", *rows]))

    for name in SITES:
        write(name, rows)
    services = make_services(tmp_path / "sites", SITES, data, part=None)

    def die(seed, end):
        if end.state.round == 2:
            raise Killed

    with pytest.raises(Killed):
        over_sites(experiment, tmp_path, services, on_round_end=die)
    forget(services["b"], "p2")
    write("b", [row for row in rows if not row.startswith("p2,")])
    services["b"].close()
    services |= make_services(tmp_path / "sites", ["b"], data, part=None)
    record, _ = over_sites(experiment, tmp_path, services, resume=True)
    assert [one["participants"] for one in record.metrics] == [12, 12, 11, 11]
    assert models_of(services["b"]).ids == ("b/p0", "b/p1", "b/p3")


def test_secure_sums_go_on_without_the_client(tmp_path):
    experiment = make_experiment("ppfl-weights", rounds=4, **SUMS_ALONE)
    services = secure_services(tmp_path / "sites", experiment)

    def on_round_end(seed, end):
        if end.state.round == 1:  # its work for the second round has been sent
            forget(site_with(services, CLIENT), CLIENT)

    record, _ = over_sites(experiment, tmp_path, services, secure=SECURE, on_round_end=on_round_end)
    n = len(record.ids)
    assert [one["participants"] for one in record.metrics] == [n, n, n - 1, n - 1]


def test_a_site_none_of_whose_clients_is_left_says_so(tmp_path):
    service = make_services(tmp_path, ["a"], DATA)["a"]
    open_run(Talk(service))
    for client in service.federation.ids:
        forget(service, client)
    with pytest.raises(DataError, match="all 4 clients of the site are forgotten"):
        type(service)(service.settings, service.base)


def test_a_forgotten_client_is_in_no_description_and_no_sum_of_columns(tmp_path):
    (tmp_path / "a").mkdir()
    rows = [f"p{at % 3},{'odd' if at % 3 == 1 else 'even'},{at},{at % 2}" for at in range(12)]
    (tmp_path / "a" / "t.csv").write_text("\n".join(["who,kind,age,y", *rows]))
    data = {"name": "csv", "file": "t.csv", "client": "who", "target": "y", "task": "classification"}
    service = make_services(tmp_path, ["a"], data, part=None)["a"]
    asked = PreparationSettings().model_dump(mode="json")
    _, _, before = service.data.describe(asked)
    service.data.leave_out(["a/p1"])
    federation, _, after = service.data.describe(asked)
    assert before["levels"] == {"kind": ["even", "odd"]} and after["levels"] == {"kind": ["even"]}
    assert federation.ids == ("a/p0", "a/p2")


def test_without_forgotten_clients_nothing_is_changed():
    clients = RunClients(("a", "b"), ("a", "b"))
    request = train({}, 1, 0)
    assert clients.for_present(request) is request
    assert clients.left == []


def test_changed_data_are_noticed_before_states_are_given_to_the_wrong_client(tmp_path):
    talk = Talk(make_services(tmp_path, ["a"], DATA)["a"])
    _, start = open_run(talk)
    store = talk.service.store
    present = store.description("run").present
    row = json.dumps([*present[1:], present[0]])
    store.database.execute("UPDATE descriptions SET present = ?", (row,))
    talk.service._opened = None
    found, said = talk.ask(train(start, 1, 0))
    assert found.kind == ERROR and "are not those of the run any more" in said
