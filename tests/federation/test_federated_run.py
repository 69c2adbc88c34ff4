"""An experiment over sites gives what it gives in one process, whatever happens to messages on the way."""

import pytest
import torch

from federation.fake_carrier import FakeCarrier, FakeClock, make_services
from ppfl.federation.federated_run import run_federated
from ppfl.runs import run
from ppfl.runs.experiment import Experiment
from ppfl.runs.folder import RunFolder

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
    return run_federated(experiment, folder / "out", carrier, now=clock.now, sleep=clock.sleep, sites=SITES, **options)


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
