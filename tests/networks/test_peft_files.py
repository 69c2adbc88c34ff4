"""Adapters in files: the layout that peft documents, and fits that are saved and loaded."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kit.problems import PROBLEMS
from kit.refusals import ModelError, WriteError, assert_refused
from ppfl import PPFL, FedAvg, Fitted, Population, fit, load, lora, with_adapters
from ppfl.networks.peft_files import save_adapter

CHOICES = {
    "chain": lora(rank=2, alpha=4, on="linear"),
    "images": lora(rank=2, on="convolution", train=("4",)),
    "texts": lora(rank=2, alpha=1, on=("embed", "hidden")),
}
DATA = {kind: PROBLEMS[kind]().federation.to(dtype=torch.float32) for kind in CHOICES}
CLOSE = {"atol": 1e-6, "rtol": 0}


def network(kind: str) -> nn.Module:
    return PROBLEMS[kind]().net().float()


@cache
def fitted(kind: str, k: int = 3) -> Fitted:
    """Adapters as the canonical part of a network, or, with one model, as a part of the network itself."""
    if k == 1:
        population, method = Population(with_adapters(network(kind), CHOICES[kind]), k=1), FedAvg
    else:
        population, method = Population(network(kind), canonical=CHOICES[kind], k=k), PPFL
    return fit(population, DATA[kind], method(lr=0.3, local_epochs=3), rounds=3, progress=False)


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


@pytest.mark.parametrize("kind", CHOICES)
def test_files_of_adapters_and_of_fits_hold_what_the_client_has(kind, tmp_path):
    """A saved chain is built from the file; any other network may come with adapters or without."""
    net, x = network(kind), DATA[kind].train.x
    for k in (1, 3):
        found = fitted(kind, k)
        for client in found.ids[:2]:
            again = read_by_its_layout(net, found.save_adapter(client, tmp_path / f"{k} {client}"))
            torch.testing.assert_close(again(x), found.model(client)(x), **CLOSE)
            torch.testing.assert_close(again(x).softmax(-1), found.predict(client, x), **CLOSE)
            assert float((again(x) - net(x)).detach().abs().max()) > 1e-3
    path = found.save(tmp_path / "fit.safetensors")
    for given in (net, with_adapters(net, CHOICES[kind]), *([None] if isinstance(net, nn.Sequential) else [])):
        again = load(path, net=given)
        assert torch.equal(again.predict(client, x), found.predict(client, x))
        assert again.population.canonical_names == found.population.canonical_names


def test_what_is_no_single_adapter_or_what_peft_cannot_hold_is_refused(tmp_path):
    several = Population(with_adapters(network("chain"), CHOICES["chain"]), canonical="adapters", k=2)
    mixed = fit(several, DATA["chain"], "ppfl", rounds=1, progress=False)  # outputs of two whole adapters
    dilated = nn.Sequential(nn.Conv1d(2, 4, 2, dilation=2), nn.Flatten(), nn.Linear(8, 3))
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    clash, out, file = with_adapters(nested, lora(rank=2, on="1.0", train=("0",))), tmp_path / "out", tmp_path / "file"
    for call, words in (
        (lambda: mixed.save_adapter("c0", out), "save the model"),
        (lambda: save_adapter(network("chain"), out), "has no adapters"),
        (lambda: save_adapter(with_adapters(dilated, lora(rank=2, on="0")), out), "'0' is a convolution with dilation"),
        (lambda: save_adapter(clash, out), "takes the adapter '1.0' for a part of '0'"),
    ):
        assert_refused(call, ModelError, words)
    assert not out.exists()
    file.write_text("")
    assert_refused(lambda: save_adapter(clash, file), WriteError, "is a file")
