"""A client that is deleted leaves nothing in its site's store, takes no further part, and changes no other client."""

import json

import pytest
import torch

from kit.refusals import CheckpointError, DataError, assert_refused
from kit.sites import SITES, SUMS_ALONE, Killed, Sites, Talk, make_experiment, make_services, models_of, server_of
from kit.sites import training as train_request
from ppfl.federation.forgetting import forget_client, forget_run
from ppfl.federation.site_service import SiteService
from ppfl.federation.state_store import StateStore
from ppfl.sites import Train

CLIENT = "g0-c1"
DATA = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}
TABLE = {"name": "csv", "file": "t.csv", "client": "who", "target": "y", "task": "classification"}
X = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))


def site_with(sites, client):
    return next(service for service in sites.services.values() if client in service.federation.ids)


def delete(service, client):
    """As the command does it: by a connection of its own."""
    store = StateStore(service.base / service.settings.state)
    try:
        return forget_client(store, client, service.settings.name)
    finally:
        store.close()


def delete_after(round, sites, client=CLIENT):
    def on_round_end(seed, end):
        if end.state.round == round:
            delete(site_with(sites, client), client)

    return on_round_end


# ---------------------------------------------------------------------- the store


def test_nothing_of_the_client_stays_in_the_files_and_others_stay_as_they_are(tmp_path):
    experiment = make_experiment("ditto", rounds=2)
    sites = Sites(experiment, tmp_path)
    sites.run()
    service = site_with(sites, CLIENT)
    before, run = models_of(service), next(iter(service.store.runs()))
    at = before.ids.index(CLIENT)
    rows = [leaf[at].contiguous().numpy().tobytes() for leaf in before.states.values() if leaf[at].numel() > 64]

    def files():
        return b"".join(file.read_bytes() for file in service.base.glob("state.sqlite*"))

    assert rows and all(row in files() for row in rows)
    assert delete(service, CLIENT) == (CLIENT, [run])
    assert not any(row in files() for row in rows)
    assert service.store.last_reply(run).reply == b""
    after = models_of(service)
    assert after.ids == tuple(client for client in before.ids if client != CLIENT)
    for client in after.ids:
        assert torch.equal(after.predict(client, X), before.predict(client, X))
    assert_refused(lambda: after.predict(CLIENT, X), DataError, CLIENT)


def test_a_client_may_be_named_as_the_sites_own_data_name_it_and_must_be_known(tmp_path):
    talk = Talk(make_services(tmp_path, ["a"], DATA, part=None)["a"])
    start = talk.open_run()
    talk.ask(train_request(start, 1, 0))
    assert_refused(lambda: delete(talk.service, "x9"), DataError, "'x9'", "g0-c0")
    assert talk.service.store.forgotten() == ()
    assert delete(talk.service, "g0-c0")[0] == "a/g0-c0"
    # the last reply has sums of the client, and is not given again
    assert "deleted with a client's state" in talk.ask(train_request(start, 1, 0), number=talk.number)
    for client in talk.service.federation.ids[1:]:
        delete(talk.service, client)
    again = talk.service.settings, talk.service.base
    assert_refused(lambda: SiteService(*again), DataError, "all 4 clients")


def test_a_run_is_deleted_whole_and_other_runs_stay(tmp_path):
    service = make_services(tmp_path, ["a"], DATA)["a"]
    for run in ("old", "new"):
        Talk(service, run).open_run()
    forget_run(service.store, "old")
    assert list(service.store.runs()) == ["new"]
    tables = [name for (name,) in service.store.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in set(tables) - {"forgotten"}:
        assert not service.store.database.execute(f"SELECT * FROM {table} WHERE run = 'old'").fetchall()
    assert_refused(lambda: forget_run(service.store, "old"), CheckpointError, "'old'", "new")


def test_changed_data_are_noticed_before_states_are_given_to_the_wrong_client(tmp_path):
    talk = Talk(make_services(tmp_path, ["a"], DATA)["a"])
    start = talk.open_run()
    first, *others = talk.service.store.description("run").present
    talk.service.store.database.execute("UPDATE descriptions SET present = ?", (json.dumps([*others, first]),))
    talk.service.close()
    restarted = Talk(make_services(tmp_path, ["a"], DATA)["a"])
    restarted.number = talk.number
    assert "are not those of the run any more" in restarted.ask(train_request(start, 1, 0))


# ---------------------------------------------------------------------- the run


def test_a_deleted_client_takes_part_in_no_new_run_and_is_in_no_description(tmp_path):
    sites = Sites(make_experiment("fedavg", rounds=1), tmp_path)
    first = sites.run()
    delete(site_with(sites, CLIENT), CLIENT)
    sites.folder = tmp_path / "second"
    assert {*first.ids} - {*sites.run().ids} == {CLIENT}
    for name in SITES:
        sites.restart(name)
        assert CLIENT not in sites.services[name].federation.ids

    (tmp_path / "a").mkdir()
    rows = [f"p{at % 3},{'odd' if at % 3 == 1 else 'even'},{at},{at % 2}" for at in range(12)]
    (tmp_path / "a" / "t.csv").write_text("\n".join(["who,kind,age,y", *rows]))
    service = make_services(tmp_path, ["a"], TABLE, part=None)["a"]
    _, _, before = service.data.describe({"missing": "refuse"})
    service.data.leave_out(["a/p1"])
    federation, _, after = service.data.describe({"missing": "refuse"})
    assert before["levels"] == {"kind": ["even", "odd"]} and after["levels"] == {"kind": ["even"]}
    assert federation.ids == ("a/p0", "a/p2")


@pytest.mark.parametrize("method", ["ppfl-outputs", "ppfl-weights", "ditto", "fedavg", "secure sums"])
def test_a_run_goes_on_without_a_client_that_is_deleted_in_the_middle(method, tmp_path):
    secure, last = method == "secure sums", {}
    experiment = make_experiment("ppfl-weights" if secure else method, rounds=4, **(SUMS_ALONE if secure else {}))
    sites = Sites(experiment, tmp_path, secure=secure)
    after_round_1 = delete_after(1, sites)  # its work for the second round has been sent with the scores of the first

    def on_round_end(seed, end):
        after_round_1(seed, end)
        last[end.state.round] = end.state.server

    record = sites.run(on_round_end=on_round_end)
    n, at = len(record.ids), record.ids.index(CLIENT)
    assert [one["participants"] for one in record.metrics] == [n, n, n - 1, n - 1]
    assert not any(one.get("sites_refused") or one.get("sites_lost") for one in record.metrics)
    if not secure:
        scores = [one["per_client"] for one in record.metrics]
        assert [one[at] is None for one in scores] == [False, True, True, True]
        assert all(value is not None for one in scores for where, value in enumerate(one) if where != at)
    if method == "ppfl-outputs":  # the server's last known membership is gone
        c = server_of(record)["server.memberships"]
        even = torch.full_like(c[at], 1 / c.shape[1])
        assert torch.equal(c[at], even) and not torch.allclose(last[2].memberships[at], even)
        assert torch.equal(record.memberships[at], even)


def test_the_others_are_trained_as_if_the_client_had_been_lost(tmp_path):
    """An oracle: the same client is not deleted, and is not asked after round 2."""
    experiment, rounds = make_experiment("fedavg", rounds=4), []
    sites = Sites(experiment, tmp_path / "deleted")
    found = sites.run(on_round_end=delete_after(1, sites))
    others = Sites(experiment, tmp_path / "lost")
    service = site_with(others, CLIENT)
    rest = tuple(client for client in service.federation.ids if client != CLIENT)
    work = service._work[Train]

    def without(run, request):
        rounds.append(request.round)
        return work(run, request._replace(who=rest) if request.round >= 2 else request)

    service._work[Train] = without
    expected = server_of(others.run())
    assert rounds == [0, 1, 2, 3]
    for name, leaf in server_of(found).items():
        torch.testing.assert_close(leaf, expected[name], rtol=0, atol=1e-7)


def test_a_server_resumes_where_the_rows_of_the_client_are_gone_from_the_data(tmp_path):
    experiment = make_experiment("ppfl-outputs", rounds=4, data=TABLE, algorithm={"name": "ppfl", "lr": 0.1})
    rows = [f"p{at % 4},{at % 7},{at % 3},{at % 2}" for at in range(60)]

    def write(name, rows):
        (tmp_path / "sites" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sites" / name / "t.csv").write_text("\n".join(["who,a,b,y", *rows]))

    for name in SITES:
        write(name, rows)
    sites = Sites(experiment, tmp_path, make_services(tmp_path / "sites", SITES, TABLE, part=None))

    def die(seed, end):
        if end.state.round == 2:
            raise Killed

    with pytest.raises(Killed):
        sites.run(on_round_end=die)
    delete(sites.services["b"], "p2")
    write("b", [row for row in rows if not row.startswith("p2,")])
    sites.restart("b")
    record = sites.run(resume=True)
    assert [one["participants"] for one in record.metrics] == [12, 12, 11, 11]
    assert models_of(sites.services["b"]).ids == ("b/p0", "b/p1", "b/p3")
