"""Secure sums over sites with stores of their own: the same run, and no sum of one site in any message."""

import json

import pytest

from federation.test_federated_run import SITES, assert_same_run, make_experiment, run_over_sites
from kit.masked_sites import PAIRS, PUBLIC_KEYS
from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl.core.errors import SettingError
from ppfl.federation.envelope import MOST_BYTES, REPLIES, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.provisioning import SecureSumsFile
from ppfl.federation.secure_sums import SecureSettings
from ppfl.runs import run
from ppfl.runs.storage import write_toml
from ppfl.sites.messages import Unmask
from ppfl.sites.wire import decode

SECURE = SecureSumsFile(SecureSettings(), {name: PUBLIC_KEYS[name] for name in SITES})
SUMS_ALONE = {"watch": {"report_clients": False}}


def secure_services(folder, experiment):
    """Sites with keys of their own."""
    keys = {name: key.decode().strip() for name, key in SECURE.public_keys.items()}
    for name in SITES:
        (folder / name).mkdir(parents=True)
        (folder / name / "site.key").write_bytes(PAIRS[name].private_key)
        write_toml(folder / name / "secure_sums.toml", {"settings": SECURE.settings.model_dump(), "public_keys": keys})
    data = experiment.model_dump(mode="json")["data"]
    files = {"private_key": "site.key", "secure_sums": "secure_sums.toml"}
    return make_services(folder, SITES, data, **files)


def secure_run(experiment, folder, faults=None, **options):
    clock = FakeClock()
    carrier = FakeCarrier(secure_services(folder / "sites", experiment), clock)
    carrier.faults.update(faults or {})
    return run_over_sites(experiment, folder, carrier=carrier, clock=clock, **{"secure": SECURE, **options})


@pytest.mark.parametrize("method", ["fedavg", "ppfl-weights", "scaffold"])
def test_a_run_with_secure_sums_is_the_run_in_one_process(method, tmp_path):
    experiment = make_experiment(method, rounds=3, **SUMS_ALONE)
    (there,) = secure_run(experiment, tmp_path / "federated")
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)


def test_the_ledger_has_no_sum_of_a_site_but_its_description(tmp_path):
    secure_run(make_experiment("fedavg", rounds=2, **SUMS_ALONE), tmp_path)
    lines = (tmp_path / "sites" / "a" / "ledger.jsonl").read_text().splitlines()
    replies = [line for line in map(json.loads, lines) if line.get("direction") == "to server"]
    types = [
        {field["type"] for one in line["messages"] for field in one["fields"] if "type" in field} for line in replies
    ]
    assert types[0] == {"float64"}  # numbers of samples, before the first round
    assert {"int64"} in types and all(found <= {"int64"} for found in types[1:])


def test_a_site_is_sent_the_shares_that_are_for_it(tmp_path):
    """All of them together grow with the third power of the number of sites."""
    experiment, clock = make_experiment("fedavg", rounds=2, **SUMS_ALONE), FakeClock()
    carrier = FakeCarrier(secure_services(tmp_path / "sites", experiment), clock)
    run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, secure=SECURE)
    sent = [(to, request) for to, message in carrier.pushed for request in decode(unseal(message).payload)]
    packets = [(to, one.packets) for to, one in sent if isinstance(one, Unmask)]
    assert packets
    for to, by_site in packets:
        assert {*by_site} == {*SITES} and all({*texts} == {to} for texts in by_site.values())


def test_sums_that_are_lost_cost_one_exchange(tmp_path):
    """The site is left out of it, and takes part in the next."""
    experiment = make_experiment("fedavg", rounds=4, **SUMS_ALONE)
    with_sums = []

    def lose_the_second(reply):
        found = unseal(reply, MOST_BYTES)
        if found.kind == REPLIES and any("totals" in one.metrics for one in decode(found.payload)):
            with_sums.append(reply)
            return None if len({*with_sums}) == 2 else reply
        return reply

    (there,) = secure_run(experiment, tmp_path, {"b": [lose_the_second]})
    counted = [one["participants"] for one in there.metrics]
    assert there.finished and counted[1] < counted[0] == counted[2] == counted[3]
    assert [one.get("lost", 0) for one in there.metrics] == [counted[0] - one for one in counted]


def test_a_site_that_joins_late_takes_part(tmp_path):
    """In the exchange in which it has no keys yet its clients are lost; then all sites agree on new ones."""
    experiment, clock = make_experiment("fedavg", rounds=5, **SUMS_ALONE), FakeClock()
    carrier = FakeCarrier(secure_services(tmp_path / "sites", experiment), clock)
    carrier.since["c"] = None

    def arrive(seed, end):
        if end.state.round == 2:
            carrier.since["c"] = "now"

    options = {"sites": ("a", "b"), "on_round_end": arrive, "secure": SECURE}
    (there,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, **options)
    counted, new = [one["participants"] for one in there.metrics], len(carrier.services["c"].federation.ids)
    assert there.finished and len(there.ids) == counted[0] + new
    assert counted == [counted[0]] * 3 + [len(there.ids)] * 2 and there.metrics[2]["lost"] == new


def test_a_server_without_secure_sums_gets_none(tmp_path):
    with pytest.raises(FederationError):
        secure_run(make_experiment("fedavg", rounds=1, **SUMS_ALONE), tmp_path, secure=None)
    assert "asked for sums without masks" in (tmp_path / "sites" / "a" / "ledger.jsonl").read_text()


def test_a_method_with_rows_is_refused(tmp_path):
    with pytest.raises(SettingError, match="share_memberships = false and penalty = 0"):
        secure_run(make_experiment("ppfl-random", rounds=1, **SUMS_ALONE), tmp_path)


def test_a_site_with_secure_sums_needs_its_key(tmp_path):
    services = secure_services(tmp_path / "sites", make_experiment("fedavg"))
    settings = services["a"].settings.model_copy(update={"private_key": None})
    with pytest.raises(SettingError, match="has secure sums and no private_key"):
        type(services["a"])(settings, tmp_path / "sites" / "a")
