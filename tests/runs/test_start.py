"""`[start]`: a run from a pre-trained network begins where that one ended, whatever happens on the way."""

import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.experiments import file_bytes, small_experiment
from ppfl import Population, fit
from ppfl.algorithms import METHODS
from ppfl.core.errors import CheckpointError, ModelError, SettingError
from ppfl.core.frozen_layers import frozen_start
from ppfl.core.losses import cross_entropy
from ppfl.core.models import OneNetwork
from ppfl.core.network_parts import freeze
from ppfl.data import Federation, digits_federation
from ppfl.fitted import load
from ppfl.runs import RunFolder, load_experiment, run
from ppfl.runs.comparison import load_comparison, run_tasks, tasks_of, with_starts
from ppfl.runs.sequence_networks import Lstm
from ppfl.runs.storage import read_checksum, read_tensors

ONE = {"population": {"k": 1}}
FEDAVG = {"algorithm": {"name": "fedavg", "lr": 0.3, "batch_size": 4}, **ONE}
FROM = {"start": {"run": "pretrain"}}
FROZEN = {"lr": 1e-12, "momentum": 0.0}  # a step that changes no bit of a number of single precision

METHODS_FROM_A_START: dict[str, dict[str, Any]] = {
    "ppfl": {"algorithm": {"name": "ppfl", **FROZEN}, "population": {"k": 3, "mix": "weights"}},
    "ppfl-common": {
        "algorithm": {"name": "ppfl", **FROZEN},
        "population": {"k": 2, "mix": "outputs", "canonical": "classifier"},
    },
    "ditto": {"algorithm": {"name": "ditto", **FROZEN}, **ONE},
    "pfedme": {"algorithm": {"name": "pfedme", **FROZEN, "mu": 1e-6, "outer_lr": 1e-12}, **ONE},
    "fedalt": {"algorithm": {"name": "fedalt", **FROZEN, "personal_part": "classifier"}, **ONE},
    "finetune": {"algorithm": {"name": "finetune", "lr": 1e-12, "method": {"name": "fedavg", **FROZEN}}, **ONE},
    "local": {"algorithm": {"name": "local", **FROZEN}, **ONE},
}
NETWORK = {"model": {"name": "perceptron", "hidden": [4]}}


@pytest.fixture
def pretrained(tmp_path: Path) -> dict[str, torch.Tensor]:
    (record,) = run(small_experiment(**FEDAVG, **NETWORK), tmp_path / "pretrain")
    tensors, _ = read_tensors(record.folder / "result.safetensors")
    shared = "server.shared."
    return {name.removeprefix(shared): leaf for name, leaf in tensors.items() if name.startswith(shared)}


@pytest.mark.parametrize("name", METHODS_FROM_A_START)
def test_every_client_begins_with_the_pretrained_network(
    name: str, tmp_path: Path, pretrained: dict[str, torch.Tensor]
) -> None:
    """With steps too small to change anything, every client predicts as the pre-trained network does."""
    experiment = small_experiment(**METHODS_FROM_A_START[name], **NETWORK, **FROM)
    (record,) = run(experiment, tmp_path / "next", base=tmp_path)
    fitted, expected = load(record.folder), load(tmp_path / "pretrain")
    x = torch.randn(5, *fitted.kind.shape)
    for client in fitted.ids:
        assert torch.allclose(fitted.predict(client, x), expected.predict(client, x), atol=1e-6)
    assert fitted.population.initial_network().keys() == pretrained.keys()
    assert all(torch.equal(leaf, pretrained[n]) for n, leaf in fitted.population.initial_network().items())


def test_the_new_folder_says_of_which_run_its_start_is(tmp_path: Path, pretrained: dict[str, torch.Tensor]) -> None:
    run(small_experiment(**NETWORK, **FROM), tmp_path / "next", base=tmp_path)
    start = RunFolder(tmp_path / "next" / "seed-0").read_start()
    assert start is not None
    other = tmp_path / "pretrain" / "seed-0"
    checksum = read_checksum(other / "result.safetensors")
    assert start.about == {"folder": str(other), "seed": 0, "round": 6, "method": "fedavg", "checksum": checksum}
    assert all(torch.equal(start.values[name], leaf) for name, leaf in pretrained.items())
    assert RunFolder(other).read_start() is None


class StopError(Exception):
    pass


@pytest.mark.parametrize("keep", [True, False])
def test_a_stopped_run_ends_with_the_same_bits_even_if_the_other_folder_is_gone(
    keep: bool, tmp_path: Path, pretrained: dict[str, torch.Tensor]
) -> None:
    experiment = small_experiment(**METHODS_FROM_A_START["ppfl-common"], **NETWORK, **FROM, newcomers=0.4)
    experiment = experiment.model_copy(update={"algorithm": METHODS["ppfl"](lr=0.3)})
    run(experiment, tmp_path / "whole", base=tmp_path)

    def stop(_seed: int, end: Any) -> None:
        if end.state.round == 4:
            raise StopError

    with pytest.raises(StopError):
        run(experiment, tmp_path / "parts", base=tmp_path, checkpoint_every=2, on_round_end=stop)
    if not keep:
        shutil.rmtree(tmp_path / "pretrain")
    run(experiment, tmp_path / "parts", base=tmp_path, resume=True)
    whole, parts = (file_bytes(tmp_path / name / "seed-0") for name in ("whole", "parts"))
    for name in ("result.safetensors", "start.safetensors", "memberships.log"):
        assert whole[name] == parts[name]


def test_seeds_start_from_the_run_with_their_seed_or_from_the_only_one(tmp_path: Path) -> None:
    def seed_of(out: str) -> list[int]:
        folders = sorted((tmp_path / out).iterdir())
        return [start.about["seed"] for folder in folders if (start := RunFolder(folder).read_start()) is not None]

    run(small_experiment(**FEDAVG, seeds=[1, 2]), tmp_path / "pretrain")
    run(small_experiment(**FROM, seeds=[1, 2]), tmp_path / "same", base=tmp_path)
    assert seed_of("same") == [1, 2]
    with pytest.raises(CheckpointError, match="has 2 runs and none with seed 3"):
        run(small_experiment(**FROM, seeds=[3]), tmp_path / "none", base=tmp_path)
    shutil.rmtree(tmp_path / "pretrain" / "seed-1")
    run(small_experiment(**FROM, seeds=[1, 3]), tmp_path / "only", base=tmp_path)
    assert seed_of("only") == [2, 2]
    one = {"start": {"run": str(tmp_path / "pretrain" / "seed-2")}}  # an absolute path of one run
    run(small_experiment(**one, seeds=[0]), tmp_path / "one", base=tmp_path / "elsewhere")
    assert seed_of("one") == [2]


def test_what_cannot_be_a_start_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run(small_experiment(**FEDAVG), tmp_path / "pretrain")
    run(small_experiment(algorithm={"name": "ditto", "lr": 0.3}, **ONE), tmp_path / "ditto")
    other = small_experiment(**FROM, model={"name": "perceptron", "hidden": [4]})
    for experiment, error, said in [
        (other, ModelError, r"'body.1.weight' is missing there and of shape \(4, 3\) here"),
        (small_experiment(**FROM, data=DATA_OF_FOUR), ModelError, r"weight' is of shape \(\d+, 3\) there.* 4\) here"),
        (small_experiment(start={"run": "ditto"}), SettingError, "Ditto, which has no single network"),
        (small_experiment(start={"run": "nowhere"}), CheckpointError, "there is no run in"),
        (
            small_experiment(start={"method": "FedAvg"}),
            SettingError,
            "that ppfl compare runs first; for a single run and for trials set run",
        ),
    ]:
        with pytest.raises(error, match=said):
            run(experiment, tmp_path / "next", base=tmp_path)
    (tmp_path / "pretrain" / "seed-0" / "result.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is not finished"):
        run(small_experiment(**FROM), tmp_path / "next", base=tmp_path)
    assert not (tmp_path / "next" / "seed-0").exists() or not list((tmp_path / "next" / "seed-0").iterdir())


DATA_OF_FOUR = {"name": "synthetic_groups", "n_clients": 6, "groups": 2, "dim": 4, "samples": 9, "test_points": 4}


@pytest.mark.parametrize("table", ["{}", '{ run = "a", method = "b" }'])
def test_a_start_names_one_run(table: str, tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(
        f'rounds = 1\nstart = {table}\ndata.name = "synthetic"\nmodel.name = "linear"\nalgorithm.name = "ppfl"'
    )
    with pytest.raises(SettingError, match="names one run to begin from; set run"):
        load_experiment(file)


def test_a_method_says_whether_it_has_one_network_for_all() -> None:
    """By the models that clients use: they are the one network, or they are not."""
    federation = digits_federation()
    federation = federation.select(federation.ids[:6])
    for name, method in METHODS.items():
        net = torch.nn.Sequential(torch.nn.Linear(64, 4), torch.nn.Linear(4, 10))
        fitted = fit(Population(net, k=1, mix="predictions"), federation, method().with_lr(0.1), rounds=2)
        models, network = fitted.models(fitted.ids), fitted.method.global_network(fitted.state.server)
        assert (network is not None) == isinstance(models, OneNetwork), name
        if network is not None:
            assert isinstance(models, OneNetwork)
            assert all(torch.equal(network[key], leaf) for key, leaf in models.values.items()), name


def test_fit_begins_with_the_network_of_another_method() -> None:
    federation = digits_federation()
    federation = federation.select(federation.ids[::8])
    pretrained = fit(Population(torch.nn.Linear(64, 10), k=1), federation, METHODS["fedavg"](lr=0.1), rounds=2)
    still = METHODS["ppfl"](**FROZEN)
    fitted = fit(Population(torch.nn.Linear(64, 10), k=3), federation, still, rounds=2, start=pretrained)
    x = torch.rand(4, 64)
    for client in federation.ids:
        assert torch.allclose(fitted.predict(client, x), pretrained.predict(client, x), atol=1e-6)
    assert len(fitted.history) == 2  # it is a run of its own
    with pytest.raises(ModelError, match=r"'0.weight' is missing there and of shape \(10, 64\) here"):
        fit(Population(torch.nn.Sequential(torch.nn.Linear(64, 10)), k=2), federation, "ppfl", start=pretrained)
    with pytest.raises(SettingError, match="trained by PPFL, whose clients have models of their own"):
        fit(Population(torch.nn.Linear(64, 10), k=1), federation, "fedavg", start=fitted)


def test_distinct_copies_of_a_trained_network_stay_near_it() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GroupNorm(2, 16), torch.nn.Linear(16, 4))
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
rounds = 3
seeds = [0, 1]
data = { name = "synthetic_groups", n_clients = 6, groups = 2, dim = 3, samples = 9, test_points = 4 }
model = { name = "linear" }
algorithm = { lr = 0.3, batch_size = 4 }
start.method = "Pre-trained"
[methods."PPFL, weights"]
algorithm.name = "ppfl"
population = { k = 2, mix = "weights" }
[methods.Pre-trained]
rounds = 5
algorithm.name = "fedavg"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "from-one.toml"
    path.write_text(COMPARISON)
    return path


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_comparison_runs_the_start_once_for_each_seed_and_first(jobs: int, file: Path, tmp_path: Path) -> None:
    experiments = load_comparison(file)
    assert experiments["Pre-trained"].start is None
    done: list[str] = []
    run_tasks(tasks_of(experiments, tmp_path / "out", tmp_path), jobs, lambda task: done.append(task.label))
    assert done == ["Pre-trained"] * 2 + ["PPFL, weights"] * 2
    for seed in (0, 1):
        start = RunFolder(tmp_path / "out" / "PPFL-weights" / f"seed-{seed}").read_start()
        tensors, _ = read_tensors(tmp_path / "out" / "Pre-trained" / f"seed-{seed}" / "result.safetensors")
        assert start is not None
        assert all(torch.equal(tensors[f"server.shared.{name}"], leaf) for name, leaf in start.values.items())
    moved = (tmp_path / "out").rename(tmp_path / "moved")  # finished runs are found again wherever they are
    written = file_bytes(moved)
    run_tasks(tasks_of(load_comparison(file), moved, tmp_path), 1)
    assert file_bytes(moved) == written


def test_a_start_that_fails_fails_those_that_need_it(file: Path, tmp_path: Path) -> None:
    tasks = tasks_of(load_comparison(file, ["methods.Pre-trained.population.k=3"]), tmp_path / "out", tmp_path)
    with pytest.raises(SettingError, match=r"4 of 4 runs failed.*Pre-trained, seed 0.*k = 3"):
        run_tasks(tasks, 1)


def test_methods_that_are_chosen_bring_what_they_start_from(file: Path) -> None:
    file.write_text(COMPARISON + '[methods.Local]\nalgorithm.name = "local"\nstart.method = "PPFL, weights"')
    experiments = load_comparison(file)
    assert list(with_starts(experiments, ["Pre-trained"])) == ["Pre-trained"]
    assert list(with_starts(experiments, ["Local"])) == list(experiments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("start.method=FedEM", "start.method is 'FedEM'; name one of 'PPFL, weights', 'Pre-trained'"),
        ("methods.Pre-trained.start.method='PPFL, weights'", "methods start from each other"),
    ],
)
def test_starts_that_lead_nowhere_are_refused(file: Path, change: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        load_comparison(file, [change])


@pytest.mark.parametrize("k", [1, 3])
def test_frozen_parts_stay_as_they_are_in_the_start(
    k: int, tmp_path: Path, pretrained: dict[str, torch.Tensor]
) -> None:
    """The rest is trained as if the outputs of the frozen layers were the data."""
    algorithm = {"name": "ppfl", "lr": 0.3, "batch_size": 4} if k > 1 else FEDAVG["algorithm"]
    settings = {"algorithm": algorithm, "population": {"k": k}, **NETWORK}
    experiment = small_experiment(**settings, start={"run": "pretrain", "frozen": "body"})
    (record,) = run(experiment, tmp_path / "next", base=tmp_path)
    fitted = load(record.folder)
    for name, leaf in fitted.population.network_without_adapters().items():
        assert torch.equal(leaf, pretrained[name])  # what the run began with, wherever it is loaded
    tensors, _ = read_tensors(record.folder / "result.safetensors")
    assert not any("body" in name for name in tensors)

    whole = experiment.data.build()
    body = load(tmp_path / "pretrain").model(whole.ids[0]).body.eval()
    parts = {name: replace(samples, x=body(samples.x).detach()) for name, samples in whole.splits.items()}
    head = torch.nn.Sequential(OrderedDict(classifier=torch.nn.Linear(4, whole.n_classes)))
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(pretrained[name])
    population = Population(head, k=k)
    other = fit(population, replace(whole, **parts), experiment.algorithm, rounds=experiment.rounds)
    for client in whole.ids:
        x = whole.client(client)["train"].x
        assert torch.allclose(fitted.predict(client, x), other.predict(client, body(x).detach()), atol=1e-4)


@pytest.mark.parametrize(
    ("frozen", "pattern"),
    [("head", "frozen names 'head'.*use some of 'body'"), (["body", "classifier"], "leaves nothing to train")],
)
def test_parts_that_cannot_be_frozen_are_refused(
    frozen: Any, pattern: str, tmp_path: Path, pretrained: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(ModelError, match=pattern):
        run(small_experiment(**NETWORK, start={"run": "pretrain", "frozen": frozen}), tmp_path / "next", base=tmp_path)


def test_a_frozen_lstm_runs_once_per_sample() -> None:
    """What is left for a round is the last layer; its outputs are those of the whole network."""
    x = torch.randint(0, 5, (24, 4), generator=torch.Generator().manual_seed(0))
    data = Federation.from_arrays(x, x.roll(1, dims=1), [f"c{i % 3}" for i in range(24)], tokens=True)
    net = Lstm(width=6, embedding=3).build(data, 0, cross_entropy)
    freeze(net, ("tokens", "cells"))
    assert frozen_start(net) == ("tokens", "dropout", "cells")
    population = Population(net, k=2, canonical="classifier", mix="weights")
    fitted = fit(population, data, METHODS["ppfl"](lr=0.5), rounds=2)
    states = net.cells(net.tokens(x))
    for client in data.ids:
        whole = fitted.model(client)
        assert torch.equal(whole.cells.weight_hh_l0, net.cells.weight_hh_l0)
        assert torch.allclose(whole(x), whole.classifier(states), atol=1e-6)
