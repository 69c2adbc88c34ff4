"""`[start]`: a run from a pre-trained network begins where that one ended, whatever happens on the way."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from kit.experiments import TEXT, StopError, file_bytes, small_experiment, stop_after, tensors_of, write_experiment
from kit.problems import make_linear, make_net
from kit.refusals import CheckpointError, ModelError, SettingError, assert_refused
from ppfl import Population, fit, load
from ppfl.algorithms import METHODS
from ppfl.data import digits_federation
from ppfl.runs import RunFolder, run
from ppfl.runs.comparison import load_comparison, run_tasks, tasks_of

ONE = {"population": {"k": 1}}
FEDAVG = {"method": {"name": "fedavg", "lr": 0.3, "batch_size": 4}, **ONE}
NETWORK = {"model": {"name": "perceptron", "hidden": [4]}}
FROZEN = {"lr": 1e-12, "momentum": 0.0}  # a step that changes no bit of a number of single precision
FROM = {"start": {"run": "pretrain"}}
COMMON = {"population": {"k": 2, "mix": "outputs", "canonical": "classifier"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with runs: `pretrain` has one network for all, in `ditto` clients have their own, one is unfinished."""
    folder = tmp_path_factory.mktemp("base")
    run(small_experiment(**FEDAVG, **NETWORK), folder / "pretrain")
    run(small_experiment(method={"name": "ditto", "lr": 0.3}, **ONE), folder / "ditto")
    with pytest.raises(StopError):
        run(small_experiment(**FEDAVG), folder / "unfinished", on_round_end=stop_after(2))
    return folder


def result_of(folder: Path) -> dict[str, torch.Tensor]:
    return tensors_of(folder / "result.safetensors")


def network_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a run in which all clients have the same."""
    tensors, shared = result_of(folder), "state.server.shared."
    return {name.removeprefix(shared): leaf for name, leaf in tensors.items() if name.startswith(shared)}


def without_adapters(fitted) -> dict[str, torch.Tensor]:
    """The start values of the network that its adapters were added to."""
    named = fitted.population.net.named_parameters()
    return {
        name.replace(".base", ""): p.detach() for name, p in named if not name.endswith(("up.weight", "down.weight"))
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(found), expected, atol=0, rtol=0)


METHODS_FROM_A_START = {
    "ppfl": {"method": {"name": "ppfl", **FROZEN}, "population": {"k": 3, "mix": "weights"}},
    "ppfl, common part": {"method": {"name": "ppfl", **FROZEN}, **COMMON},
    "fedalt": {"method": {"name": "fedalt", **FROZEN, "personal_part": "classifier"}, **ONE},
    "finetune": {"method": {"name": "finetune", "lr": 1e-12, "method": {"name": "fedavg", **FROZEN}}, **ONE},
    "local": {"method": {"name": "local", **FROZEN}, **ONE},
    "ppfl, adapters": {
        "method": {"name": "ppfl", **FROZEN},
        "model": NETWORK["model"] | {"adapters": {"rank": 2, "on": "linear"}},
        "population": {"k": 2, "canonical": "adapters.up"},
    },
}


@pytest.mark.parametrize("name", METHODS_FROM_A_START)
def test_every_client_begins_with_the_pretrained_network(name, base, tmp_path):
    """With steps too small to change anything, every client predicts as the pre-trained network does."""
    run(small_experiment(**NETWORK | FROM | METHODS_FROM_A_START[name], rounds=2), tmp_path, base=base)
    fitted, expected = load(tmp_path), load(base / "pretrain")
    x = torch.randn(5, *fitted.spec.shape, generator=torch.Generator().manual_seed(0))
    for client in fitted.ids:
        torch.testing.assert_close(fitted.predict(client, x), expected.predict(client, x), atol=1e-6, rtol=0)
    assert_same(without_adapters(fitted), network_of(base / "pretrain" / "seed-0"))
    if name == "ppfl, adapters":
        assert fitted.population.canonical_names == {f"{layer}.up.weight" for layer in ("body.1", "classifier")}
        assert fitted.save_adapter(fitted.ids[0], tmp_path / "adapter").is_dir()


def test_a_stopped_run_ends_with_the_same_bits_even_if_the_other_folder_is_gone(base, tmp_path):
    shutil.copytree(base / "pretrain", tmp_path / "pretrain")
    experiment = small_experiment(**COMMON, **NETWORK, **FROM, method={"name": "ppfl", "lr": 0.3}, newcomers=0.4)
    run(experiment, tmp_path / "whole", base=tmp_path)
    with pytest.raises(StopError):
        run(experiment, tmp_path / "parts", base=tmp_path, checkpoint_every=2, on_round_end=stop_after(4))
    shutil.rmtree(tmp_path / "pretrain")
    run(experiment, tmp_path / "parts", base=tmp_path, resume=True)
    whole, parts = (file_bytes(tmp_path / name / "seed-0") for name in ("whole", "parts"))
    for name in ("start.safetensors", "memberships.log"):
        assert whole[name] == parts[name]
    assert_same(*(result_of(tmp_path / name / "seed-0") for name in ("parts", "whole")))


def test_seeds_start_from_the_run_with_their_seed_or_from_the_only_one_and_say_which(tmp_path):
    def assert_starts(seeds: list[int], *folders: Path, start: str = "pretrain") -> None:
        out = tmp_path / f"from {[folder.name for folder in folders]}"
        run(small_experiment(start={"run": start}, seeds=seeds, rounds=1), out, base=tmp_path)
        for seed, folder in zip(seeds, folders, strict=True):
            found = RunFolder(out / f"seed-{seed}").read_start()
            assert found.about["folder"] == str(folder) and found.about["method"] == "fedavg"
            assert found.about["sha256"] == (folder / "result.safetensors").read_bytes()[-32:].hex()
            assert_same(found.values, network_of(folder))

    run(small_experiment(**FEDAVG, seeds=[1, 2]), tmp_path / "pretrain")
    first, second = (tmp_path / "pretrain" / f"seed-{seed}" for seed in (1, 2))
    assert_starts([1, 2], first, second)
    assert_refused(lambda: assert_starts([3], first), CheckpointError, "has 2 runs and none with seed 3")
    assert_starts([0], second, start=str(second))  # an absolute path of one run
    shutil.rmtree(first)
    assert_starts([1, 3], second, second)


NO_START = {
    "another network": (FROM, ModelError, "'classifier.weight' is of shape (2, 4) there", "(2, 3) here"),
    "own networks": ({"start": {"run": "ditto"}}, SettingError, "Ditto, which has no single network"),
    "a run that is not finished": ({"start": {"run": "unfinished"}}, CheckpointError, "is not finished"),
    "an unknown part": (NETWORK | {"start": {"run": "pretrain", "frozen": "head"}}, SettingError, "'head'", "'body'"),
    "no comparison": ({"start": {"method": "FedAvg"}}, SettingError, "ppfl compare", "set run"),
}


def test_what_cannot_be_a_start_is_refused_and_leaves_nothing_behind(base, tmp_path):
    for changes, *refused in NO_START.values():
        assert_refused(lambda: run(small_experiment(**changes), tmp_path, base=base), *refused)
        assert file_bytes(tmp_path) == {}


@pytest.mark.parametrize("k", [1, 3])
def test_frozen_parts_stay_as_they_are_in_the_start(k, base, tmp_path):
    """They are in every client's model, and in no state of server or client; all else is trained."""
    settings = {"population": {"k": k, "mix": "weights"}} | ({} if k > 1 else {"method": FEDAVG["method"]})
    experiment = small_experiment(**settings, **NETWORK, start={"run": "pretrain", "frozen": "body"})
    (record,) = run(experiment, tmp_path, base=base)
    fitted, pretrained = load(record.folder), network_of(base / "pretrain" / "seed-0")
    assert_same(without_adapters(fitted), pretrained)
    assert not any("body" in name for name in result_of(record.folder))
    for client in fitted.ids:
        for name, leaf in fitted.model(client).named_parameters():
            assert torch.equal(leaf, pretrained[name]) == name.startswith("body.")
    assert fitted.evaluate(experiment.build_data()).pooled == pytest.approx(record.scores["accuracy"])


@pytest.mark.parametrize("name", METHODS)
def test_fit_begins_with_the_network_of_any_method_that_has_one_for_all(name):
    several = {"ppfl", "ifca", "fedem", "cfl"}  # models, even where only one is asked for
    federation = digits_federation()
    federation = federation.select(federation.ids[:4])
    x = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    one, three = (Population(make_net(64, 4, 10), k=k, mix="predictions") for k in (1, 3))
    found = fit(one, federation, METHODS[name]().with_local(lr=0.1), rounds=2)
    first, *others = (found.predict(client, x) for client in found.ids)
    population, method = (one, "fedavg") if name == "ppfl" else (three, "ppfl")
    frozen = {"rounds": 2, "method": METHODS[method](**FROZEN), "start": found}
    if name in several or not all(torch.equal(first, other) for other in others):
        assert_refused(lambda: fit(population, federation, **frozen), SettingError, "one network for all")
    else:
        again = fit(population, federation, **frozen)
        assert len(again.history) == 2  # it is a run of its own
        for client in again.ids:
            torch.testing.assert_close(again.predict(client, x), first, atol=1e-6, rtol=0)


def test_distinct_copies_of_a_trained_network_stay_near_it():
    population = Population(nn.Sequential(make_linear(8, 16), nn.GroupNorm(2, 16), make_linear(16, 4)), k=4)
    trained = {name: leaf + 1 for name, leaf in population.initial_network().items()}
    population.start_from(trained)
    same, apart = population.initial_models(seed=0), population.initial_models(seed=0, distinct=True)
    for name, leaf in trained.items():
        assert torch.equal(same[name], leaf.expand_as(same[name]))
        assert torch.equal(apart[name][0], leaf)
        assert torch.equal(apart[name][1], apart[name][2]) == name.startswith("1.")  # constants of the initialiser
        assert (apart[name] - leaf).abs().max() <= 0.2 * 8**-0.5  # draws are at most 1/sqrt(fan in)


COMPARISON = f"""seeds = [0, 1]
{TEXT}
[start]
method = "Pre-trained"
[methods."PPFL, weights"]
population.mix = "weights"
[methods.Pre-trained]
method.name = "fedavg"
population.k = 1
"""


@pytest.mark.processes
def test_a_comparison_runs_the_start_first_in_one_process_or_in_several(tmp_path):
    """Once for each seed. A run that fails stops no other, and results have the same bits."""
    file = write_experiment(tmp_path, COMPARISON + '[methods.Wrong]\npopulation.k = 3\nmethod.name = "fedavg"')
    refused = SettingError, "2 of 6 runs failed", "Wrong, seed 0", "k = 3"
    for jobs in (1, 2):
        tasks, done = tasks_of(load_comparison(file), tmp_path / str(jobs), tmp_path), []
        assert_refused(lambda: run_tasks(tasks, jobs, lambda task: done.append(task.label)), *refused)
        assert done[:2] == ["Pre-trained"] * 2 and sorted(done[2:]) == ["PPFL, weights"] * 2
    one, two = (file_bytes(tmp_path / jobs) for jobs in ("1", "2"))
    results = [Path(name).parent for name in one if name.endswith("result.safetensors")]
    assert len(results) == 4
    for folder in results:
        assert_same(*(result_of(tmp_path / jobs / folder) for jobs in ("1", "2")))
    moved = (tmp_path / "2").rename(tmp_path / "moved")
    assert_refused(lambda: run_tasks(tasks_of(load_comparison(file), moved, tmp_path), 1), *refused)
    assert file_bytes(moved) == two, "finished runs are found again wherever they are"
    for seed in ("seed-0", "seed-1"):
        start = RunFolder(tmp_path / "1" / "PPFL-weights" / seed).read_start()
        assert_same(start.values, network_of(tmp_path / "1" / "Pre-trained" / seed))


def test_starts_that_fail_or_lead_nowhere_are_refused(tmp_path):
    file = write_experiment(tmp_path, COMPARISON)
    for change, *words in (
        ("start.method=FedEM", "start.method is 'FedEM'", "'PPFL, weights', 'Pre-trained'"),
        ("methods.Pre-trained.start.method='PPFL, weights'", "methods start from each other"),
    ):
        assert_refused(lambda: load_comparison(file, [change]), SettingError, *words)
    tasks = tasks_of(load_comparison(file, ["methods.Pre-trained.population.k=3"]), tmp_path / "out", tmp_path)
    assert_refused(lambda: run_tasks(tasks, 1), SettingError, "4 of 4 runs failed", "Pre-trained, seed 0", "k = 3")
