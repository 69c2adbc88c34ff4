"""`ppfl federation status`: what files say of a run, while it goes on and after it."""

import json

import pytest

from federation.test_faults import Killed
from federation.test_federated_run import SITES, make_experiment, run_over_sites
from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.federation_status import server_status, site_status


def total(file, direction, key, value):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sum(line["bytes"] for line in lines if line.get("direction") == direction and line[key] == value)


def test_the_status_of_a_run_that_goes_on_stops_and_ends(tmp_path):
    experiment, clock, seen = make_experiment("fedavg", rounds=3), FakeClock(), []
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])
    carrier = FakeCarrier(services, clock)
    with pytest.raises(FederationError, match="no run over sites"):
        server_status(tmp_path / "out")

    def look(seed, end):
        (status,) = server_status(tmp_path / "out")
        seen.append((status.state, status.round, status.rounds))
        if end.state.round == 2 and len(seen) == 2:
            raise Killed

    with pytest.raises(Killed):
        run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, on_round_end=look)
    (stopped,) = server_status(tmp_path / "out")
    run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, on_round_end=look, resume=True)
    (status,) = server_status(tmp_path / "out")
    assert seen == [("running", 1, 3), ("running", 2, 3), ("running", 3, 3)]
    assert (stopped.state, stopped.round, stopped.starts) == ("stopped", 2, 1)
    assert (status.state, status.round, status.starts) == ("finished", 3, 2)
    assert status.run in services["a"].store.runs()
    ledger = tmp_path / "out" / "seed-0.federation" / "ledger.jsonl"
    for name in SITES:
        found = status.sites[name]
        assert found.to_site == total(ledger, "to site", "site", name)
        assert found.to_server == total(ledger, "to server", "site", name) > 0
        assert found.refused == 0 and found.last is not None


def test_refused_replies_are_counted_with_their_reason_and_silent_sites_are_listed(tmp_path):
    experiment, clock = make_experiment("fedavg", rounds=2), FakeClock()
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])
    carrier, count = FakeCarrier(services, clock), []

    def damage(reply):
        count.append(1)
        return b"nonsense" if len(count) == 4 else reply

    carrier.faults["b"] = [damage]
    run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    (tmp_path / "out" / "sites").mkdir()
    (tmp_path / "out" / "sites" / "west.pub").touch()
    (status,) = server_status(tmp_path / "out")
    assert {name: found.refused for name, found in status.sites.items()} == {"a": 0, "b": 1, "c": 0, "west": 0}
    assert "no message of ppfl" in status.sites["b"].reason and status.sites["west"].last is None


def test_a_half_written_line_does_no_harm(tmp_path):
    run_over_sites(make_experiment("fedavg", rounds=1), tmp_path)
    before = server_status(tmp_path / "out")
    with (tmp_path / "out" / "seed-0.federation" / "ledger.jsonl").open("a") as opened:
        opened.write('{"time": 1, "dire')
    assert server_status(tmp_path / "out") == before


def test_the_status_of_a_site(tmp_path):
    experiment = make_experiment("ppfl-weights", rounds=2, seeds=[0, 1])
    data, clock = experiment.model_dump(mode="json")["data"], FakeClock()
    services = make_services(tmp_path / "sites", SITES, data)
    service = services["a"]
    nothing = site_status(service.settings, tmp_path / "elsewhere")
    assert nothing.runs == [] and nothing.forgotten == ()
    run_over_sites(experiment, tmp_path, carrier=FakeCarrier(services, clock), clock=clock)
    found = site_status(service.settings, service.base)
    assert [one.run for one in found.runs] == list(service.store.runs())
    for one in found.runs:
        assert one.rounds == 2 and one.has_models and one.stored > 0
        assert one.traffic.to_server == total(service.ledger.file, "to server", "run", one.run) > 0
