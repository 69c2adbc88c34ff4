"""`[start]`: a run from a pre-trained network begins where that one ended, whatever happens on the way."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.experiments import StopError, file_bytes, small_experiment, stop_after, write_experiment
from kit.problems import make_linear, make_net
from kit.refusals import CheckpointError, ModelError, SettingError, assert_refused
from ppfl import Population, fit, load
from ppfl.algorithms import METHODS
from ppfl.data import digits_federation
from ppfl.runs import RunFolder, run
from ppfl.runs.comparison import load_comparison, run_tasks, tasks_of, with_starts
from ppfl.runs.storage import read_checksum, read_tensors

ONE = {"population": {"k": 1}}
FEDAVG = {"algorithm": {"name": "fedavg", "lr": 0.3, "batch_size": 4}, **ONE}
NETWORK = {"model": {"name": "perceptron", "hidden": [4]}}
FROZEN = {"lr": 1e-12, "momentum": 0.0}  # a step that changes no bit of a number of single precision
FROM = {"start": {"run": "pretrain"}}
COMMON = {"population": {"k": 2, "mix": "outputs", "canonical": "classifier"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs: `pretrain` has one network for all, in `ditto` clients have their own."""
    folder = tmp_path_factory.mktemp("base")
    run(small_experiment(**FEDAVG, **NETWORK), folder / "pretrain")
    run(small_experiment(algorithm={"name": "ditto", "lr": 0.3}, **ONE), folder / "ditto")
    return folder


def network_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a run in which all clients have the same."""
    tensors, _ = read_tensors(folder / "result.safetensors")
    shared = "server.shared."
    return {name.removeprefix(shared): leaf for name, leaf in tensors.items() if name.startswith(shared)}


METHODS_FROM_A_START: dict[str, dict[str, Any]] = {
    "ppfl": {"algorithm": {"name": "ppfl", **FROZEN}, "population": {"k": 3, "mix": "weights"}},
    "ppfl, common part": {"algorithm": {"name": "ppfl", **FROZEN}, **COMMON},
    "ditto": {"algorithm": {"name": "ditto", **FROZEN}, **ONE},
    "pfedme": {"algorithm": {"name": "pfedme", **FROZEN, "mu": 1e-6, "outer_lr": 1e-12}, **ONE},
    "fedalt": {"algorithm": {"name": "fedalt", **FROZEN, "personal_part": "classifier"}, **ONE},
    "finetune": {"algorithm": {"name": "finetune", "lr": 1e-12, "method": {"name": "fedavg", **FROZEN}}, **ONE},
    "local": {"algorithm": {"name": "local", **FROZEN}, **ONE},
}


@pytest.mark.parametrize("name", METHODS_FROM_A_START)
def test_every_client_begins_with_the_pretrained_network(name: str, base: Path, tmp_path: Path) -> None:
    """With steps too small to change anything, every client predicts as the pre-trained network does."""
    experiment = small_experiment(**METHODS_FROM_A_START[name], **NETWORK, **FROM, rounds=2)
    (record,) = run(experiment, tmp_path, base=base)
    fitted, expected = load(record.folder), load(base / "pretrain")
    x = torch.randn(5, *fitted.kind.shape, generator=torch.Generator().manual_seed(0))
    for client in fitted.ids:
        assert torch.allclose(fitted.predict(client, x), expected.predict(client, x), atol=1e-6)
    pretrained, start = network_of(base / "pretrain" / "seed-0"), fitted.population.initial_network()
    assert start.keys() == pretrained.keys()
    assert all(torch.equal(leaf, pretrained[n]) for n, leaf in start.items())


def test_a_stopped_run_ends_with_the_same_bits_even_if_the_other_folder_is_gone(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "pretrain", tmp_path / "pretrain")
    algorithm = {"name": "ppfl", "lr": 0.3}
    experiment = small_experiment(**COMMON, **NETWORK, **FROM, algorithm=algorithm, newcomers=0.4)
    run(experiment, tmp_path / "whole", base=tmp_path)
    with pytest.raises(StopError):
        run(experiment, tmp_path / "parts", base=tmp_path, checkpoint_every=2, on_round_end=stop_after(4))
    shutil.rmtree(tmp_path / "pretrain")
    run(experiment, tmp_path / "parts", base=tmp_path, resume=True)
    whole, parts = (file_bytes(tmp_path / name / "seed-0") for name in ("whole", "parts"))
    for name in ("result.safetensors", "start.safetensors", "memberships.log"):
        assert whole[name] == parts[name]


def test_seeds_start_from_the_run_with_their_seed_or_from_the_only_one_and_say_which(tmp_path: Path) -> None:
    def starts_of(out: str, seeds: list[int], run_folder: str = "pretrain") -> list[Path]:
        run(small_experiment(start={"run": run_folder}, seeds=seeds, rounds=1), tmp_path / out, base=tmp_path)
        starts = [RunFolder(tmp_path / out / f"seed-{seed}").read_start() for seed in seeds]
        for start in starts:
            folder = Path(start.about["folder"])
            checksum, seed = read_checksum(folder / "result.safetensors"), int(folder.name.removeprefix("seed-"))
            about = {"folder": str(folder), "seed": seed, "round": 6, "method": "fedavg", "checksum": checksum}
            assert start.about == about
            assert all(torch.equal(start.values[name], leaf) for name, leaf in network_of(folder).items())
        return [Path(start.about["folder"]) for start in starts]

    run(small_experiment(**FEDAVG, seeds=[1, 2]), tmp_path / "pretrain")
    first, second = (tmp_path / "pretrain" / f"seed-{seed}" for seed in (1, 2))
    assert RunFolder(first).read_start() is None
    assert starts_of("same", [1, 2]) == [first, second]
    assert_refused(lambda: starts_of("none", [3]), CheckpointError, "has 2 runs and none with seed 3")
    assert starts_of("one", [0], str(second)) == [second]  # an absolute path of one run
    shutil.rmtree(first)
    assert starts_of("only", [1, 3]) == [second, second]


OTHER_DATA = {"name": "synthetic_groups", "n_clients": 6, "groups": 2, "dim": 4, "samples": 9, "test_points": 4}
NO_START = {
    "another network": (FROM, ModelError, "'classifier.weight' is of shape (2, 4) there", "(2, 3) here"),
    "other data": ({**FROM, **NETWORK, "data": OTHER_DATA}, ModelError, "(4, 3) there", "(4, 4) here"),
    "own networks": ({"start": {"run": "ditto"}}, SettingError, "Ditto, which has no single network"),
    "no run": ({"start": {"run": "nowhere"}}, CheckpointError, "there is no run in"),
    "a run that is not finished": ({"start": {"run": "unfinished"}}, CheckpointError, "is not finished"),
    "no comparison": ({"start": {"method": "FedAvg"}}, SettingError, "ppfl compare", "set run"),
    "an unknown part": (NETWORK | {"start": {"run": "pretrain", "frozen": "head"}}, ModelError, "'head'", "'body'"),
    "all of it frozen": (
        NETWORK | {"start": {"run": "pretrain", "frozen": ["body", "classifier"]}}, ModelError, "nothing to train",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_START)
def test_what_cannot_be_a_start_is_refused_and_leaves_nothing_behind(case: str, base: Path, tmp_path: Path) -> None:
    changes, error, *words = NO_START[case]
    unfinished = shutil.copytree(base / "pretrain", base / "unfinished", dirs_exist_ok=True)
    (Path(unfinished) / "seed-0" / "result.safetensors").unlink()
    assert_refused(lambda: run(small_experiment(**changes), tmp_path, base=base), error, *words)
    assert file_bytes(tmp_path) == {}


@pytest.mark.parametrize("k", [1, 3])
def test_frozen_parts_stay_as_they_are_in_the_start(k: int, base: Path, tmp_path: Path) -> None:
    """They are in every client's model, and in no state of server or client; all else is trained."""
    algorithm = {"name": "ppfl", "lr": 0.3, "batch_size": 4} if k > 1 else FEDAVG["algorithm"]
    start = {"run": "pretrain", "frozen": "body"}
    population = {"k": k, "mix": "weights"}  # so that a model of a client is one network
    experiment = small_experiment(algorithm=algorithm, population=population, **NETWORK, start=start)
    (record,) = run(experiment, tmp_path, base=base)
    fitted, pretrained = load(record.folder), network_of(base / "pretrain" / "seed-0")
    for name, leaf in fitted.population.network_without_adapters().items():
        assert torch.equal(leaf, pretrained[name])  # what the run began with, wherever it is loaded
    assert not any("body" in name for name in read_tensors(record.folder / "result.safetensors")[0])
    for client in fitted.ids:
        for name, leaf in fitted.model(client).named_parameters():
            assert torch.equal(leaf, pretrained[name]) == name.startswith("body.")
    federation = experiment.data.build()
    assert fitted.evaluate(federation).pooled == pytest.approx(record.scores["accuracy"])


# ---------------------------------------------------------------------- fit(start=...)


def test_a_method_says_whether_it_has_one_network_for_all() -> None:
    several = {"ppfl", "ifca", "fedem", "cfl"}  # models, even where only one is asked for
    federation = digits_federation()
    federation = federation.select(federation.ids[:4])
    for name, method in METHODS.items():
        net = make_net(64, hidden=4, classes=10)
        fitted = fit(Population(net, k=1, mix="predictions"), federation, method().with_lr(0.1), rounds=2)
        models = [dict(fitted.model(client).named_parameters()) for client in fitted.ids]
        alike = all(torch.equal(models[0][key], own[key]) for own in models for key in own)
        network = fitted.method.global_network(fitted.state.server)
        assert (network is not None) == (alike and name not in several), name
        assert network is None or all(torch.equal(network[key], leaf) for key, leaf in models[0].items()), name


def test_fit_begins_with_the_network_of_another_method() -> None:
    federation = digits_federation()
    federation = federation.select(federation.ids[::8])
    pretrained = fit(Population(make_linear(64, 10), k=1), federation, METHODS["fedavg"](lr=0.1), rounds=2)
    still = METHODS["ppfl"](**FROZEN)
    fitted = fit(Population(make_linear(64, 10), k=3), federation, still, rounds=2, start=pretrained)
    x = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    for client in federation.ids:
        assert torch.allclose(fitted.predict(client, x), pretrained.predict(client, x), atol=1e-6)
    assert len(fitted.history) == 2  # it is a run of its own
    chain, one = Population(nn.Sequential(make_linear(64, 10)), k=2), Population(make_linear(64, 10), k=1)
    assert_refused(lambda: fit(chain, federation, "ppfl", start=pretrained), ModelError, "'0.weight' is missing there")
    assert_refused(lambda: fit(one, federation, "fedavg", start=fitted), SettingError, "PPFL", "models of their own")


def test_distinct_copies_of_a_trained_network_stay_near_it() -> None:
    net = nn.Sequential(make_linear(8, 16), nn.GroupNorm(2, 16), make_linear(16, 4))
    population = Population(net, k=4)
    trained = {name: leaf + 1 for name, leaf in population.initial_network().items()}
    population.start_from(trained)
    same, apart = population.initial_models(seed=0), population.initial_models(seed=0, distinct=True)
    for name, leaf in trained.items():
        assert torch.equal(same[name], leaf.expand_as(same[name]))
        assert torch.equal(apart[name][0], leaf)
        if name.startswith("1."):  # constants of the initialiser
            assert torch.equal(apart[name], same[name])
        else:
            assert not torch.equal(apart[name][1], apart[name][2])
            assert (apart[name] - leaf).abs().max() <= 0.2 * 8**-0.5  # draws are at most 1/sqrt(fan in)


# ---------------------------------------------------------------------- comparisons

COMPARISON = """
rounds = 2
seeds = [0, 1]
data = { name = "synthetic_groups", n_clients = 6, groups = 2, dim = 3, samples = 9, test_points = 4 }
model = { name = "linear" }
algorithm = { lr = 0.3, batch_size = 4 }
start.method = "Pre-trained"
[methods."PPFL, weights"]
algorithm.name = "ppfl"
population = { k = 2, mix = "weights" }
[methods.Pre-trained]
rounds = 3
algorithm.name = "fedavg"
"""


@pytest.mark.processes
def test_a_comparison_runs_the_start_first_in_one_process_or_in_several(tmp_path: Path) -> None:
    """Once for each seed. A run that fails stops no other, and results have the same bits."""
    file = write_experiment(tmp_path, COMPARISON + '[methods.Wrong]\npopulation.k = 3\nalgorithm.name = "fedavg"')
    assert load_comparison(file)["Pre-trained"].start is None
    for jobs in (1, 2):
        tasks, done = tasks_of(load_comparison(file), tmp_path / str(jobs), tmp_path), []
        refused = "2 of 6 runs failed", "Wrong, seed 0", "k = 3"
        assert_refused(lambda: run_tasks(tasks, jobs, lambda task: done.append(task.label)), SettingError, *refused)
        assert done[:2] == ["Pre-trained"] * 2 and sorted(done[2:]) == ["PPFL, weights"] * 2
    one, two = (file_bytes(tmp_path / jobs) for jobs in ("1", "2"))
    results = [name for name in one if name.endswith("result.safetensors")]
    assert len(results) == 4 and all(one[name] == two[name] for name in results)
    moved = (tmp_path / "2").rename(tmp_path / "moved")
    assert_refused(lambda: run_tasks(tasks_of(load_comparison(file), moved, tmp_path), 1), SettingError, *refused)
    assert file_bytes(moved) == two, "finished runs are found again wherever they are"
    for seed in (0, 1):
        start = RunFolder(tmp_path / "1" / "PPFL-weights" / f"seed-{seed}").read_start()
        expected = network_of(tmp_path / "1" / "Pre-trained" / f"seed-{seed}")
        assert all(torch.equal(expected[name], leaf) for name, leaf in start.values.items())


def test_methods_that_are_chosen_bring_what_they_start_from(tmp_path: Path) -> None:
    local = '[methods.Local]\nalgorithm.name = "local"\nstart.method = "PPFL, weights"'
    experiments = load_comparison(write_experiment(tmp_path, COMPARISON + local))
    assert list(with_starts(experiments, ["Pre-trained"])) == ["Pre-trained"]
    assert list(with_starts(experiments, ["Local"])) == list(experiments)


def test_starts_that_fail_or_lead_nowhere_are_refused(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, COMPARISON)
    for change, *words in (
        ("start.method=FedEM", "start.method is 'FedEM'", "'PPFL, weights', 'Pre-trained'"),
        ("methods.Pre-trained.start.method='PPFL, weights'", "methods start from each other"),
    ):
        assert_refused(lambda: load_comparison(file, [change]), SettingError, *words)
    tasks = tasks_of(load_comparison(file, ["methods.Pre-trained.population.k=3"]), tmp_path / "out", tmp_path)
    assert_refused(lambda: run_tasks(tasks, 1), SettingError, "4 of 4 runs failed", "Pre-trained, seed 0", "k = 3")
