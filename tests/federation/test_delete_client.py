"""A client that is deleted leaves nothing in its site's store, takes no further part, and changes no other client."""

import pytest
import torch

from kit.experiments import stop_after
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


def write_table(folder, heading, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.csv").write_text("\n".join([heading, *rows]))


def test_nothing_of_the_client_stays_in_the_files_and_others_stay_as_they_are(tmp_path):
    sites = Sites(make_experiment("ditto", rounds=2), tmp_path)
    sites.run()
    service = site_with(sites, CLIENT)
    before, run = models_of(service).personal, next(iter(service.store.runs()))
    at = before.ids.index(CLIENT)
    rows = [leaf[at].contiguous().numpy().tobytes() for leaf in before.states.values.values() if leaf[at].numel() > 64]
    # in pieces: the pages of the database may cut a row anywhere
    pieces = [row[start : start + 64] for row in rows for start in range(0, len(row) - 63, 64)]

    def stored():
        files = b"".join(file.read_bytes() for file in service.base.glob("state.sqlite*"))
        return [piece for piece in pieces if piece in files]

    assert len(stored()) > 0.9 * len(pieces) > 0
    assert delete(service, CLIENT) == (CLIENT, [run]) and stored() == []
    after = models_of(service).personal
    assert after.ids == tuple(client for client in before.ids if client != CLIENT)
    for client in after.ids:
        assert torch.equal(after.predict(client, X), before.predict(client, X))
    assert_refused(lambda: after.predict(CLIENT, X), DataError, CLIENT)
    assert_refused(lambda: delete(service, "x9"), DataError, "'x9'", after.ids[0])
    sites.folder = tmp_path / "second"
    assert {*before.ids} - {*sites.run().ids} == {CLIENT}  # it takes part in no new run
    sites.restart(service.settings.name)
    assert CLIENT not in site_with(sites, after.ids[0]).federation.ids


def test_the_last_reply_is_not_given_again_and_a_site_without_clients_does_not_start(tmp_path):
    talk = Talk(make_services(tmp_path, ["a"], DATA, part=None)["a"])
    start = talk.open_run()
    talk.ask(train_request(start, 1, 0))
    assert delete(talk.service, "g0-c0")[0] == "a/g0-c0"  # named as the site's own data name it
    assert "deleted with a client's state" in talk.ask(train_request(start, 1, 0), number=talk.number)
    for client in talk.service.federation.ids[1:]:
        delete(talk.service, client)
    assert_refused(lambda: SiteService(talk.service.settings, talk.service.base), DataError, "all 4 clients")


def test_a_run_is_deleted_whole_and_changed_data_are_noticed_before_another_goes_on(tmp_path):
    service = make_services(tmp_path, ["a"], DATA)["a"]
    for run in ("old", "new"):
        start = Talk(service, run).open_run()
    forget_run(service.store, "old")
    assert list(service.store.runs()) == ["new"]
    tables = [name for (name,) in service.store.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in {*tables} - {"forgotten"}:
        assert not service.store.database.execute(f"SELECT * FROM {table} WHERE run = 'old'").fetchall()
    assert_refused(lambda: forget_run(service.store, "old"), CheckpointError, "'old'", "new")
    service.close()
    more = {"name": "digits", "partition": {"name": "label_groups", "clients": 2}}
    restarted = Talk(make_services(tmp_path, ["a"], more)["a"], "new")
    assert "are not those of the run any more" in restarted.ask(train_request(start, 1, 0), number=9)


def test_the_levels_of_a_deleted_client_are_in_no_description(tmp_path):
    rows = [f"p{at % 3},{'odd' if at % 3 == 1 else 'even'},{at},{at % 2}" for at in range(12)]
    write_table(tmp_path / "a", "who,kind,age,y", rows)
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

    def on_round_end(seed, end):
        last[end.state.round] = end.state.server
        if end.state.round == 1:  # its work for the second round has been sent with the scores of the first
            delete(site_with(sites, CLIENT), CLIENT)

    record = sites.run(on_round_end=on_round_end)
    n, at = len(record.ids), record.ids.index(CLIENT)
    assert [one["participants"] for one in record.metrics] == [n, n, n - 1, n - 1]
    assert not any(one.get("sites_refused") or one.get("sites_lost") for one in record.metrics)
    if not secure:
        without_score = [[i for i, score in enumerate(one["per_client"]) if score is None] for one in record.metrics]
        assert without_score == [[], [at], [at], [at]]
    if method == "ppfl-outputs":  # the server's last known membership is gone
        c = server_of(record)["server.memberships"]
        even = torch.full_like(c[at], 1 / c.shape[1])
        assert torch.equal(c[at], even) and not torch.allclose(last[2].memberships[at], even)
        assert torch.equal(record.memberships[at], even)
    if method == "fedavg":  # the others are trained as where the client is there and not asked after round 2
        others = Sites(experiment, tmp_path / "not asked")
        service = site_with(others, CLIENT)
        rest = tuple(client for client in service.federation.ids if client != CLIENT)
        work = service._work[Train]
        service._work[Train] = lambda run, asked: work(run, asked._replace(who=rest) if asked.round >= 2 else asked)
        expected = server_of(others.run())
        for name, leaf in server_of(record).items():
            torch.testing.assert_close(leaf, expected[name], rtol=0, atol=1e-7)


def test_a_server_resumes_where_the_rows_of_the_client_are_gone_from_the_data(tmp_path):
    experiment = make_experiment("ppfl-outputs", rounds=4, data=TABLE, method={"name": "ppfl", "lr": 0.1})
    rows, folder = [f"p{at % 4},{at % 7},{at % 3},{at % 2}" for at in range(60)], tmp_path / "sites"
    for name in SITES:
        write_table(folder / name, "who,a,b,y", rows)
    sites = Sites(experiment, tmp_path, make_services(folder, SITES, TABLE, part=None))
    with pytest.raises(Killed):
        sites.run(on_round_end=stop_after(2, Killed))
    delete(sites.services["b"], "p2")
    write_table(folder / "b", "who,a,b,y", [row for row in rows if not row.startswith("p2,")])
    sites.restart("b")
    record = sites.run(resume=True)
    assert [one["participants"] for one in record.metrics] == [12, 12, 11, 11]
    assert models_of(sites.services["b"]).personal.ids == ("b/p0", "b/p1", "b/p3")
