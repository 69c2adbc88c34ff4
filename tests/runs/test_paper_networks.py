"""The networks of the paper's larger experiments: sizes, causality, and the same training on every engine."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter

from kit.training import assert_same, run
from ppfl import PPFL, FedAvg, Population, fit
from ppfl.core import ModelError
from ppfl.core.backends import make_backend
from ppfl.core.losses import LOSSES
from ppfl.core.models import Mixture
from ppfl.data import Federation, synthetic_groups
from ppfl.data.limits import limited
from ppfl.data.sample_kind import SampleKind
from ppfl.runs.image_networks import DigitsCnn, ResNet18
from ppfl.runs.network_settings import ModelSettings
from ppfl.runs.sequence_networks import CausalAttention, Lstm, Transformer

WORDS, LENGTH = 7, 5
CROSS_ENTROPY = LOSSES["cross_entropy"]
IMAGE_NETWORKS = [
    ResNet18(width=4),
    ResNet18(width=6, groups=3),
    DigitsCnn(channels=(4, 4, 8), hidden=(12, 8)),
]
TEXT_NETWORKS = [
    Transformer(layers=2, heads=2, width=8),
    Transformer(layers=1, heads=4, width=8, dropout=0.3, vocabulary=WORDS + 2),
    Lstm(width=6),
    Lstm(layers=2, width=6, embedding=3, dropout=0.3),
]
NETWORKS = [*IMAGE_NETWORKS, *TEXT_NETWORKS]


def make_images(channels: int = 1, size: int = 8) -> Federation:
    x = torch.rand(24, channels, size, size, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, torch.arange(24) % 3, torch.arange(24) // 8, test_fraction=0.25)


def make_texts() -> Federation:
    """Sequences whose next token is the last one plus a number of the client's own; some are padded."""
    first = torch.randint(WORDS, (24, 1), generator=torch.Generator().manual_seed(0))
    clients = torch.arange(24) // 8
    tokens = (first + torch.arange(LENGTH + 1) * (1 + clients[:, None])) % WORDS
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    x[::4, -2:], y[::4, -2:] = 0, -100
    return Federation.from_arrays(x, y, clients, test_fraction=0.25, tokens=True, classes=[*map(str, range(WORDS))])


def data_of(network) -> Federation:
    return make_texts() if network in TEXT_NETWORKS else make_images()


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_a_network_gives_one_row_of_outputs_per_label(network) -> None:
    federation = data_of(network)
    net = network.build(federation, 0, CROSS_ENTROPY)
    x, y = federation.train.x[:4], federation.train.y[:4]
    assert net(x).shape == (*y.shape, federation.n_classes)
    population = Population(net, k=2, canonical="classifier")
    assert make_backend(population, x, y, federation.n_classes).caches_outputs
    assert all(name.startswith("classifier.") for name in population.canonical_names)


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_an_experiment_file_can_name_it(network) -> None:
    assert TypeAdapter(ModelSettings).validate_json(network.model_dump_json()) == network


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_values_come_from_the_seed_and_from_nothing_else(network) -> None:
    def values(seed: int) -> torch.Tensor:
        net = network.build(data_of(network), seed, CROSS_ENTROPY)
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    state = torch.random.get_rng_state()
    first = values(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(17)
    assert torch.equal(values(3), first)
    assert not torch.equal(values(4), first)


METHODS = {
    "fedavg": (FedAvg(lr=0.1, batch_size=4), {"k": 1}),
    "ppfl-outputs": (PPFL(lr=0.1, batch_size=4), {"k": 2, "mix": "outputs", "canonical": "classifier"}),
    "ppfl-weights": (PPFL(lr=0.1, batch_size=4), {"k": 2, "mix": "weights", "canonical": "classifier"}),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_engines_give_the_same_trajectory(network, method: str) -> None:
    federation = data_of(network).to(dtype=torch.float64)
    net = network.build(federation, 0, CROSS_ENTROPY).double()
    algorithm, settings = METHODS[method]
    reference, found = (
        run(algorithm, Population(net, **settings), federation, engine=engine, rounds=3)
        for engine in ("loop", "stacked")
    )
    assert_same(found.everything(), reference.everything(), atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("mix", ["outputs", "weights"])
@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_a_membership_at_a_corner_picks_one_network(network, mix: str) -> None:
    federation = data_of(network)
    net = network.build(federation, 0, CROSS_ENTROPY)
    population = Population(net, k=3, canonical="classifier", mix=mix)
    x = federation.train.x[:4]
    backend = make_backend(population, x, federation.train.y, federation.n_classes)
    models = population.initial_models(0, distinct=True)
    common, theta = population.split(models)
    for k in range(3):
        one = common | {name: leaf[k] for name, leaf in theta.items()}
        expected = torch.func.functional_call(net.eval(), one, x).softmax(-1)
        found = backend.predict(Mixture(models, torch.eye(3)[k : k + 1]), x[None])[0]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("network", [Transformer(layers=1, heads=2, width=16), Lstm(width=16)], ids=repr)
def test_language_models_learn_to_count(network) -> None:
    """The next token follows from the two before it."""
    federation = make_texts()
    net = network.build(federation, 0, CROSS_ENTROPY)
    fitted = fit(Population(net, k=1), federation, FedAvg(lr=0.3, batch_size=6, local_epochs=5), rounds=20)
    assert fitted.history[-1]["loss"] < 0.6 * fitted.history[0]["loss"]


# ---------------------------------------------------------------------- sequences


@pytest.mark.parametrize("network", TEXT_NETWORKS, ids=repr)
def test_an_output_depends_on_no_later_token(network) -> None:
    federation = make_texts()
    net = network.build(federation, 0, CROSS_ENTROPY).eval()
    x = federation.train.x[:3]
    for at in range(LENGTH):
        other = x.clone()
        other[:, at:] = (other[:, at:] + 1) % WORDS
        torch.testing.assert_close(net(other)[:, :at], net(x)[:, :at])
        assert not torch.allclose(net(other)[:, at:], net(x)[:, at:])


def test_attention_is_torchs_own() -> None:
    torch.manual_seed(0)
    mine, reference = CausalAttention(8, 2), torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(mine.queries_keys_values.weight)
        reference.in_proj_bias.copy_(mine.queries_keys_values.bias)
        reference.out_proj.weight.copy_(mine.out.weight)
        reference.out_proj.bias.copy_(mine.out.bias)
    x = torch.randn(3, LENGTH, 8)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    expected, _ = reference(x, x, x, attn_mask=later, need_weights=False)
    torch.testing.assert_close(mine(x), expected)


def test_transformers_run_side_by_side_and_lstms_do_not() -> None:
    federation = make_texts()
    x, y = federation.train.x[:2], federation.train.y[:2]
    for network, alone in ((TEXT_NETWORKS[0], False), (TEXT_NETWORKS[2], True)):
        population = Population(network.build(federation, 0, CROSS_ENTROPY), k=2, canonical="classifier")
        assert make_backend(population, x, y, WORDS).clients.one_by_one == alone


@pytest.mark.parametrize("network", TEXT_NETWORKS, ids=repr)
def test_padded_labels_do_not_count(network) -> None:
    federation = make_texts()
    net = network.build(federation, 0, CROSS_ENTROPY).eval()
    x, y = federation.train.x, federation.train.y
    padded = (y == -100).any(1)
    losses = CROSS_ENTROPY.per_sample(net(x), y)[padded]
    expected = F.cross_entropy(net(x)[padded, :-2].flatten(0, 1), y[padded, :-2].flatten(), reduction="none")
    torch.testing.assert_close(losses, expected.view(int(padded.sum()), -1).mean(1))


@pytest.mark.parametrize("network", TEXT_NETWORKS, ids=repr)
def test_the_size_does_not_depend_on_which_tokens_occur(network) -> None:
    """A saved run is loaded without its data."""
    federation = make_texts()
    nets = [network.build(data, 0, CROSS_ENTROPY) for data in (federation, SampleKind.of(federation).stand_in())]
    shapes = [{name: p.shape for name, p in net.named_parameters()} for net in nets]
    assert shapes[0] == shapes[1]


# ---------------------------------------------------------------------- images


def test_resnet18_has_eighteen_layers_and_halves_an_image_three_times() -> None:
    net = ResNet18().build(make_images(3, 32), 0, CROSS_ENTROPY)
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) + 1 == 18
    assert net.body[:-2](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    of_torchvision, smaller_filters = 11_176_512, (7 * 7 - 3 * 3) * 3 * 64  # without the last layer
    assert sum(p.numel() for p in net.body.parameters()) == of_torchvision - smaller_filters


def test_digits_cnn_has_the_layers_of_the_paper_and_its_canonical_part_in_one_name() -> None:
    net = DigitsCnn().build(make_images(3, 28), 0, CROSS_ENTROPY)
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert [tuple(m.weight.shape[:2]) for m in layers] == [
        (64, 3), (64, 64), (128, 64), (2048, 128 * 7 * 7), (512, 2048), (3, 512),
    ]  # fmt: skip
    canonical = [m for m in net.classifier.modules() if isinstance(m, torch.nn.Linear)]
    assert canonical == layers[-2:]


# ---------------------------------------------------------------------- what does not fit


def test_what_does_not_fit_says_what_does() -> None:
    table, texts = synthetic_groups(), make_texts()
    for network in (ResNet18(), DigitsCnn()):
        with pytest.raises(ModelError, match=rf"{network.name} takes images.*shape \(8,\).*perceptron"):
            network.build(table, 0, CROSS_ENTROPY)
    with pytest.raises(ModelError, match="3 x 3 pixels are too small to halve 2 times"):
        DigitsCnn().build(make_images(1, 3), 0, CROSS_ENTROPY)
    for network in (Lstm(), Transformer()):
        with pytest.raises(ModelError, match=rf"{network.name} takes sequences.*float32 \(n, 8\).*tokens=True"):
            network.build(table, 0, CROSS_ENTROPY)
        one = Federation.from_arrays(texts.train.x, texts.train.y[:, 0], texts.train.client_of(), tokens=True)
        with pytest.raises(ModelError, match=r"one label per token.*5 tokens.*targets \(n, 5\)"):
            network.build(one, 0, CROSS_ENTROPY)
        with pytest.raises(ModelError, match="one label per token.*multilabel"):
            network.build(texts, 0, LOSSES["multilabel"])
    with pytest.raises(ModelError, match="the token 6 among its train samples.*from 0 to 4.*set vocabulary"):
        Transformer(width=8, vocabulary=5).build(texts, 0, CROSS_ENTROPY)


@pytest.mark.parametrize(
    ("network", "settings", "fault"),
    [
        (ResNet18, {"width": 5}, "5 channels do not split into 2 groups"),
        (DigitsCnn, {"hidden": (2048, 510)}, "510 channels do not split into 4 groups"),
        (Transformer, {"width": 10, "heads": 4}, "width 10 does not split into 4 heads"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(network, settings: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        network(**settings)


@pytest.mark.parametrize(
    "network", [ResNet18(width=2**20), DigitsCnn(), Lstm(width=10**6), Transformer(width=2**20)], ids=repr
)
def test_size_is_checked_before_memory_is_taken(network) -> None:
    federation = make_texts() if isinstance(network, Lstm | Transformer) else make_images()
    with (
        limited(bytes=10**6),
        pytest.raises(ModelError, match=r"3 of it take .* bytes, more than the limit"),
    ):
        network.build(federation, 0, CROSS_ENTROPY, copies=3)
