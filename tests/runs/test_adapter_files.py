"""Adapters in files: the layout that peft documents, fits that are saved and loaded, and experiment files."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kit.experiments import small_experiment
from kit.problems import PROBLEMS
from kit.refusals import ModelError, WriteError, assert_refused
from ppfl import PPFL, FedAvg, Federation, Fitted, Population, fit, load, lora, with_adapters
from ppfl.runs import run
from ppfl.runs.adapter_files import save_adapter

CHOICES = {
    "chain": lora(rank=2, alpha=4, on="linear"),
    "images": lora(rank=2, on="convolution", train=("4",)),
    "texts": lora(rank=2, alpha=1, on=("embed", "hidden")),
}
every_kind = pytest.mark.parametrize("kind", CHOICES)
CLOSE = {"atol": 1e-6, "rtol": 0}


def data(kind: str) -> Federation:
    return PROBLEMS[kind]().federation.to(dtype=torch.float32)


def network(kind: str) -> nn.Module:
    return PROBLEMS[kind]().net().float()


@cache
def fitted(kind: str, k: int = 3, canonical: str = "") -> Fitted:
    """Adapters as the canonical part of a network; with one model, or by name, as a part of the network itself."""
    net, choice = network(kind), CHOICES[kind]
    part = canonical or ("all" if k == 1 else choice)
    net = net if part is choice else with_adapters(net, choice)
    method = PPFL(lr=0.3, local_epochs=3) if k > 1 else FedAvg(lr=0.3, local_epochs=3)
    return fit(Population(net, canonical=part, k=k), data(kind), method, rounds=3, progress=False)


def read_by_its_layout(net: nn.Module, folder: Path) -> nn.Module:
    """What peft documents: W + lora_alpha / r * B A for layers that fit the pattern, other modules as saved."""
    config = json.loads((folder / "adapter_config.json").read_text())
    values = load_file(folder / "adapter_model.safetensors")
    values = {name.removeprefix("base_model.model."): value for name, value in values.items()}
    assert config["peft_type"] == "LORA"
    changed, factor = copy.deepcopy(net), config["lora_alpha"] / config["r"]
    for name, layer in changed.named_modules():
        if name in (config["modules_to_save"] or []):
            layer.load_state_dict({part: values.pop(f"{name}.{part}") for part in layer.state_dict()})
        elif re.fullmatch(config["target_modules"], name):
            embeds = isinstance(layer, nn.Embedding)
            kind = "lora_embedding_{}" if embeds else "lora_{}.weight"
            A, B = (values.pop(f"{name}.{kind.format(letter)}") for letter in "AB")
            assert A.shape[0] == B.shape[1] == config["r"]
            product = B.flatten(1) @ A.flatten(1)
            layer.weight.data += factor * (product.T if embeds else product).reshape(layer.weight.shape)
    assert not values  # nothing else is in the file
    return changed


@pytest.mark.parametrize("k", [1, 3])
@every_kind
def test_the_files_hold_the_clients_own_adapter(kind: str, k: int, tmp_path: Path) -> None:
    found, net, x = fitted(kind, k), network(kind), data(kind).train.x
    for client in found.ids[:2]:
        again = read_by_its_layout(net, found.save_adapter(client, tmp_path / client))
        torch.testing.assert_close(again(x), found.model(client)(x), **CLOSE)
        torch.testing.assert_close(again(x).softmax(-1), found.predict(client, x), **CLOSE)
        assert float((again(x) - net(x)).detach().abs().max()) > 1e-3


def test_outputs_of_several_whole_adapters_are_no_single_adapter(tmp_path: Path) -> None:
    found, x = fitted("chain", 2, "adapters"), data("chain").train.x
    assert_refused(lambda: found.save_adapter("c0", tmp_path / "adapter"), ModelError, "save the model")
    torch.testing.assert_close(found.model("c0")(x).softmax(-1), found.predict("c0", x), **CLOSE)


def test_what_peft_cannot_hold_is_refused(tmp_path: Path) -> None:
    dilated = nn.Sequential(nn.Conv1d(2, 4, 2, dilation=2), nn.Flatten(), nn.Linear(8, 3))
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    clash, out, file = lora(rank=2, on="1.0", train=("0",)), tmp_path / "adapter", tmp_path / "file"
    for net, words in (
        (with_adapters(dilated, lora(rank=2, on="0")), "'0' is a convolution with dilation"),
        (dilated, "no adapters to save"),
        (with_adapters(nested, clash), "takes the adapter '1.0' for a part of '0'"),
    ):
        assert_refused(lambda: save_adapter(net, out), ModelError, words)
    assert not out.exists()
    file.write_text("")
    assert_refused(lambda: save_adapter(with_adapters(nested, clash), file), WriteError, "is a file")


@every_kind
def test_a_fit_with_adapters_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """A chain is built from the file; any other network may come with adapters or without."""
    found, net, x = fitted(kind), network(kind), data(kind).train.x
    path = found.save(tmp_path / "fit.safetensors")
    nets = [net, with_adapters(network(kind), CHOICES[kind])]
    for given in nets + ([None] if isinstance(net, nn.Sequential) else []):
        again = load(path, net=given)
        assert torch.equal(again.predict(found.ids[0], x), found.predict(found.ids[0], x))
        assert again.population.canonical_names == found.population.canonical_names
        assert repr(again.population) == repr(found.population)


# ---------------------------------------------------------------------- experiment files

PLAIN = {"name": "perceptron", "hidden": 8}
MODEL = PLAIN | {"adapters": {"rank": 2, "on": "linear"}}
FEDAVG = {"algorithm": {"name": "fedavg", "lr": 0.1}, "population": {"k": 1}, "rounds": 2}
CANONICAL = {"algorithm": {"name": "ppfl", "lr": 0.1}, "population": {"k": 2, "canonical": "adapters.up"}, "rounds": 2}
PERSONAL = FEDAVG | {"algorithm": {"name": "fedalt", "lr": 0.1, "personal_part": "adapters.up"}}


def test_a_run_starts_with_adapters_of_the_network_of_another_run(tmp_path: Path) -> None:
    """With steps too small to change anything, every client predicts as the network of the first run does."""
    run(small_experiment(**FEDAVG, model=PLAIN), tmp_path / "pretrain")
    still = CANONICAL | {"algorithm": {"name": "ppfl", "lr": 1e-12}}
    experiment = small_experiment(**still, model=MODEL, start={"run": "pretrain"})
    run(experiment, tmp_path / "next", base=tmp_path)
    before, after = load(tmp_path / "pretrain"), load(tmp_path / "next")
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    for client in after.ids:
        torch.testing.assert_close(after.predict(client, x), before.predict(client, x), **CLOSE)
    untrained = experiment.build_population(experiment.data.build(), 0)
    assert not torch.allclose(untrained.net(x).softmax(-1), before.predict(after.ids[0], x), atol=1e-3)


@pytest.mark.parametrize("use", [CANONICAL, FEDAVG, PERSONAL], ids=["canonical", "common", "personal"])
def test_an_experiment_file_names_adapters(use: dict, tmp_path: Path) -> None:
    (record,) = run(small_experiment(**use, model=MODEL), tmp_path / "out")
    population = load(record.folder).population
    trained = {f"{layer}.{part}.weight" for layer in ("body.1", "classifier") for part in ("down", "up")}
    assert population.canonical_names | population.common_names == trained
    assert population.common_names == ({n for n in trained if "down" in n} if use is CANONICAL else set())
    assert load(record.folder).save_adapter(record.ids[0], tmp_path / "adapter").is_dir()
