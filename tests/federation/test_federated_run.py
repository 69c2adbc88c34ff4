"""An experiment over sites gives what it gives in one process, whatever happens to messages on the way."""

import json
import sys
import types

import pytest
import torch

from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl.core.errors import SettingError
from ppfl.federation.envelope import unseal
from ppfl.federation.federated_run import run_federated
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_processes import require_flower
from ppfl.runs import run
from ppfl.runs.experiment import Experiment
from ppfl.runs.folder import RunFolder
from ppfl.sites.wire import decode

SITES = ("a", "b", "c")
SMALL = {"lr": 0.3, "batch_size": 20}
METHODS = {
    "ppfl-outputs": ({"name": "ppfl", "penalty": 0.02}, 3, "outputs"),
    "ppfl-predictions": ({"name": "ppfl", "penalty": 0.02, "membership_steps": 2}, 3, "predictions"),
    "ppfl-weights": ({"name": "ppfl", "share_memberships": False}, 3, "weights"),
    "ppfl-random": ({"name": "ppfl", "order": "random", "lr": 0.05}, 2, "outputs"),
    "fedavg": ({"name": "fedavg"}, 1, "outputs"),
    "ditto": ({"name": "ditto"}, 1, "outputs"),
    "fedem": ({"name": "fedem"}, 2, "predictions"),
    "scaffold": ({"name": "scaffold"}, 1, "outputs"),
}


def make_experiment(method: str, rounds: int = 5, **settings) -> Experiment:
    algorithm, k, mix = METHODS[method]
    return Experiment.model_validate(
        {
            "name": method,
            "rounds": rounds,
            "data": {"name": "digits", "partition": {"name": "label_groups", "clients": 2}},
            "model": {"name": "linear"},
            "population": {"k": k, "mix": mix},
            "algorithm": {**SMALL, **algorithm},
            **settings,
        }
    )


def run_over_sites(experiment, folder, *, carrier=None, clock=None, **options):
    clock = clock or FakeClock()
    data = experiment.model_dump(mode="json")["data"]
    carrier = carrier or FakeCarrier(make_services(folder / "sites", SITES, data), clock)
    options = {"sites": SITES, "now": clock.now, "sleep": clock.sleep, **options}
    return run_federated(experiment, folder / "out", carrier, **options)


def server_of(folder) -> dict[str, torch.Tensor]:
    tensors, _ = RunFolder(folder).read_result()
    return {name: leaf for name, leaf in tensors.items() if name.startswith(("server", "memberships"))}


def assert_same_run(here, there, experiment) -> None:
    """A run over sites is, to rounding, the run in one process."""
    for one, other in zip(here.metrics, there.metrics, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other.get("accuracy") == pytest.approx(one.get("accuracy"), abs=1e-5)
        assert other["bytes_up"] == one["bytes_up"]
    alone, federated = (server_of(run.folder) for run in (here, there))
    if not experiment.algorithm.visible_rows:  # in one process they are seen, over sites they stay at home
        assert alone.pop("memberships", None) is None or "memberships" not in federated
    order = [there.ids.index(client) for client in here.ids]
    for name, leaf in alone.items():
        other = federated[name]
        rows = leaf.dim() > 0 and len(leaf) == len(here.ids)
        torch.testing.assert_close(other[order] if rows else other, leaf, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_three_sites_give_the_trajectory_of_one_process(method, tmp_path):
    experiment = make_experiment(method)
    (there,) = run_over_sites(experiment, tmp_path / "federated")
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)


@pytest.mark.parametrize("output", ["best", "random"])
def test_the_state_of_another_round_than_the_last_can_be_returned(output, tmp_path):
    experiment = make_experiment("ditto", rounds=4, watch={"output": output}, seeds=[3])
    (there,) = run_over_sites(experiment, tmp_path / "federated")
    (here,) = run(experiment, tmp_path / "alone")
    assert there.scores["round"] == here.scores["round"]
    assert there.scores["accuracy"] == pytest.approx(here.scores["accuracy"], abs=1e-5)
    assert_same_run(here, there, experiment)


# ---------------------------------------------------------------------- the ledger


def sent_to_server(file):
    """All fields that sites sent, with the kind of message and its number."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        (line["site"], line["number"], field["field"], field.get("bytes"))
        for line in lines
        if line.get("direction") == "to server"
        for message in line["messages"]
        for field in message["fields"]
    ]


def ledgers(folder):
    server = sent_to_server(folder / "out" / "seed-0.federation" / "ledger.jsonl")
    return server, [one for name in SITES for one in sent_to_server(folder / "sites" / name / "ledger.jsonl")]


def personal(fields):
    """Those that are about one client, and more than its scores."""
    names = {name for _, _, name, _ in fields}
    return {name for name in names if "membership" in name or "label" in name or "feature" in name or ".x" in name}


def test_no_membership_label_count_or_sample_leaves_a_site_that_keeps_them(tmp_path):
    run_over_sites(make_experiment("ppfl-weights", rounds=3), tmp_path)
    server, sites = ledgers(tmp_path)
    assert sites and not personal(sites) and not personal(server)


def test_the_ledger_of_a_method_that_shows_memberships_says_so(tmp_path):
    run_over_sites(make_experiment("ppfl-outputs", rounds=3), tmp_path)
    server, _ = ledgers(tmp_path)
    assert {"rows.membership", "rows.label_counts"} <= personal(server)


def test_server_and_sites_wrote_down_the_same(tmp_path):
    run_over_sites(make_experiment("ditto", rounds=3), tmp_path)
    server, sites = ledgers(tmp_path)
    assert sorted(server, key=str) == sorted(sites, key=str)


def test_a_round_says_where_its_seconds_went(tmp_path):
    (record,) = run_over_sites(make_experiment("fedavg", rounds=2), tmp_path)
    for one in record.metrics:
        assert all(one[f"seconds_{part}"] >= 0 for part in ("sites", "transport", "server"))
        assert one["seconds_sites"] > 0


@pytest.mark.parametrize("method", ["ppfl-outputs", "ditto"])
def test_a_run_that_starts_from_another_run_is_the_one_in_one_process(method, tmp_path):
    run(make_experiment("fedavg", rounds=2), tmp_path / "first")
    experiment = make_experiment(method, rounds=3, start={"run": str(tmp_path / "first")})
    (there,) = run_over_sites(experiment, tmp_path / "federated")
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    (fresh,) = run(make_experiment(method, rounds=3), tmp_path / "fresh")
    assert abs(there.metrics[0]["loss"] - fresh.metrics[0]["loss"]) > 1e-3
    one, other = (RunFolder(record.folder).read_start() for record in (here, there))
    assert one.about == other.about


@pytest.mark.parametrize("changes", [{"newcomers": 0.2}, {"start": {"run": "elsewhere", "frozen": ["body"]}}])
def test_what_is_not_possible_over_sites_is_said_before_anything_is_sent(changes, tmp_path):
    experiment = make_experiment("fedavg", **changes)
    with pytest.raises(SettingError, match="federation"):
        run_federated(experiment, tmp_path, None)


@pytest.mark.parametrize("name", ["flwr", "cryptography"])
def test_a_missing_library_is_an_error_that_says_what_to_install(name, monkeypatch):
    missing = {"flwr": types.ModuleType("flwr"), "cryptography": types.ModuleType("cryptography"), name: None}
    for module, value in missing.items():
        monkeypatch.setitem(sys.modules, module, value)
    with pytest.raises(FederationError, match=f"{name} is not installed.*pip install 'ppfl"):
        require_flower()


@pytest.mark.parametrize("method", ["fedavg", "ppfl-outputs"])
def test_a_round_is_one_message_with_the_scores_of_the_one_before(method, tmp_path):
    experiment, clock = make_experiment(method, rounds=4), FakeClock()
    data = experiment.model_dump(mode="json")["data"]
    carrier = FakeCarrier(make_services(tmp_path / "sites", SITES, data), clock)
    run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    for site in SITES:
        sent = [decode(unseal(message).payload) for to, message in carrier.pushed if to == site]
        kinds = [[type(request).__name__ for request in requests] for requests in sent]
        assert kinds[0] == ["DescribeData"] and "OpenRun" in kinds[1]
        assert kinds[-4:] == [["Evaluate", "Train"]] * 3 + [["Evaluate"]]  # the first round of PPFL finds its start
