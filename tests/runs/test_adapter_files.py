"""Adapters in files: what peft reads, fits that are saved and loaded, and experiment files."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ppfl import PPFL, FedAvg, Federation, Fitted, Population, fit, load, lora, with_adapters
from ppfl.core.errors import ModelError, WriteError
from ppfl.runs import run
from ppfl.runs.adapter_files import save_adapter
from ppfl.runs.load import load_experiment


class Tokens(nn.Module):
    """An embedding and linear layers, of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(9, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.tokens(x).mean(1))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        images = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        return {
            "linear": (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(48, 4)),
            "convolution": (images, torch.randn(48, 1, 4, 4)),
            "embedding": (Tokens(), torch.randint(9, (48, 5))),
        }


CHOICES = {
    "linear": lora(rank=2, alpha=4, on="linear"),
    "convolution": lora(rank=2, on="convolution", train=("3",)),
    "embedding": lora(rank=2, alpha=1, on=("tokens", "layers.0")),
}


def fitted(kind: str, k: int = 3) -> tuple[nn.Module, Tensor, Fitted]:
    net, x = networks()[kind]
    y, ids = torch.arange(48) % 3, [f"shop-{at % 6}" for at in range(48)]
    federation = Federation.from_arrays(x, y, ids, tokens=kind == "embedding")
    method = PPFL(lr=0.3, local_epochs=3) if k > 1 else FedAvg(lr=0.3)
    net_or_part = (net, CHOICES[kind]) if k > 1 else (with_adapters(net, CHOICES[kind]), "all")
    population = Population(net_or_part[0], canonical=net_or_part[1], k=k)
    return net, x, fit(population, federation, method, rounds=3, progress=False)


# ---------------------------------------------------------------------- peft


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
            kind = "lora_embedding_{}" if isinstance(layer, nn.Embedding) else "lora_{}.weight"
            A, B = (values.pop(f"{name}.{kind.format(letter)}") for letter in "AB")
            assert A.shape[0] == B.shape[1] == config["r"]
            product = (
                (B.flatten(1) @ A.flatten(1)).T if isinstance(layer, nn.Embedding) else B.flatten(1) @ A.flatten(1)
            )
            layer.weight.data += factor * product.reshape(layer.weight.shape)
    assert not values  # nothing else is in the file
    return changed


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", CHOICES)
def test_the_files_hold_the_clients_own_adapter(kind: str, k: int, tmp_path: Path) -> None:
    net, x, found = fitted(kind, k)
    for client in found.ids[:2]:
        again = read_by_its_layout(net, found.save_adapter(client, tmp_path / client))
        torch.testing.assert_close(again(x), found.model(client)(x), atol=1e-6, rtol=0)
        assert float((again(x) - net(x)).detach().abs().max()) > 1e-3
        torch.testing.assert_close(again(x).softmax(-1), found.predict(client, x), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("kind", CHOICES)
def test_peft_reads_them(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    net, x, found = fitted(kind)
    client = found.ids[0]
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), found.save_adapter(client, tmp_path / "adapter")).eval()
    torch.testing.assert_close(model(x), found.model(client)(x), atol=1e-6, rtol=0)


def test_what_peft_cannot_hold_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv1d(2, 4, 2, dilation=2), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ModelError, match="'0' is a convolution with dilation"):
        save_adapter(with_adapters(net, lora(rank=2, on="0")), tmp_path / "adapter")
    with pytest.raises(ModelError, match="no adapters to save"):
        save_adapter(net, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="is a file"):
        save_adapter(with_adapters(net, lora(rank=2, on="2")), tmp_path / "file")
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"takes the adapter '1.0' for a part of '0'"):
        save_adapter(with_adapters(nested, lora(rank=2, on="1.0", train=("0",))), tmp_path / "adapter")


def test_outputs_of_several_whole_adapters_are_no_single_adapter(tmp_path: Path) -> None:
    net, _ = networks()["linear"]
    federation = Federation.from_arrays(torch.randn(24, 4), torch.arange(24) % 3, [f"c{at % 4}" for at in range(24)])
    population = Population(with_adapters(net, lora(rank=2)), canonical="adapters", k=2)
    found = fit(population, federation, PPFL(lr=0.1), rounds=2, progress=False)
    with pytest.raises(ModelError, match="save the model"):
        found.save_adapter("c0", tmp_path / "adapter")
    x = torch.randn(5, 4)
    torch.testing.assert_close(found.model("c0")(x).softmax(-1), found.predict("c0", x), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- saved fits


@pytest.mark.parametrize("kind", CHOICES)
def test_a_fit_with_adapters_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    net, x, found = fitted(kind)
    path, client = found.save(tmp_path / "fit.safetensors"), found.ids[0]
    nets = [networks()[kind][0], with_adapters(networks()[kind][0], CHOICES[kind])]
    nets += [None] if isinstance(net, nn.Sequential) else []
    for given in nets:  # a chain is built from the file; any other network may come with or without adapters
        again = load(path, net=given)
        assert torch.equal(again.predict(client, x), found.predict(client, x))
        assert again.population.canonical_names == found.population.canonical_names
        assert repr(again.population) == repr(found.population)


def test_a_model_with_adapters_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    _, x, found = fitted("convolution")
    file = found.export_onnx(found.ids[0], tmp_path / "client.onnx")
    (given,) = onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(given), found.predict(found.ids[0], x), atol=1e-5, rtol=0)


# ---------------------------------------------------------------------- experiment files

EXPERIMENT = """
rounds = 2
[data]
name = "digits"
partition = {name = "iid", clients = 4}
[model]
name = "perceptron"
hidden = 8
adapters = {rank = 2, on = "linear"}
"""
USES = {
    "canonical": ('[population]\nk = 2\ncanonical = "adapters.up"\n[algorithm]\nname = "ppfl"\nlr = 0.1', 2),
    "common": ('[algorithm]\nname = "fedavg"\nlr = 0.1', 1),
    "personal": ('[algorithm]\nname = "fedalt"\nlr = 0.1\npersonal_part = "adapters.up"', 1),
}


def test_a_run_starts_with_adapters_of_the_network_of_another_run(tmp_path: Path) -> None:
    """With steps too small to change anything, every client predicts as the network of the first run does."""
    first = EXPERIMENT.replace("adapters =", "# ") + USES["common"][0]
    text = USES["canonical"][0].replace("lr = 0.1", "lr = 1e-12") + '\n[start]\nrun = "pretrain"'
    for name, content in (("pretrain", first), ("next", EXPERIMENT + text)):
        (tmp_path / f"{name}.toml").write_text(content)
        run(load_experiment(tmp_path / f"{name}.toml"), tmp_path / name, base=tmp_path)
    before, after = load(tmp_path / "pretrain"), load(tmp_path / "next")
    x = torch.rand(5, 64)
    for client in after.ids:
        torch.testing.assert_close(after.predict(client, x), before.predict(client, x), atol=1e-6, rtol=0)
    untrained = load_experiment(tmp_path / "next.toml").build_population(before.kind.stand_in(), 0)
    assert not torch.allclose(untrained.net(x).softmax(-1), before.predict(after.ids[0], x), atol=1e-3)


@pytest.mark.parametrize("use", USES)
def test_an_experiment_file_names_adapters(use: str, tmp_path: Path) -> None:
    text, k = USES[use]
    (tmp_path / "mine.toml").write_text(EXPERIMENT + text)
    (record,) = run(load_experiment(tmp_path / "mine.toml"), tmp_path / "out", base=tmp_path)
    assert record.finished
    found = load(tmp_path / "out" / "seed-0")
    assert found.population.k == k
    trained = {"body.1.down.weight", "body.1.up.weight", "classifier.down.weight", "classifier.up.weight"}
    assert found.population.canonical_names | found.population.common_names == trained
    assert found.population.common_names == ({n for n in trained if "down" in n} if k > 1 else set())
    assert found.save_adapter(found.ids[0], tmp_path / "adapter").is_dir()
