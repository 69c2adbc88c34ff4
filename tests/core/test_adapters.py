"""Low-rank adapters: which layers get one, what they compute, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.problems import make_net
from ppfl.core import Lora, ModelError, Population, lora, with_adapters
from ppfl.core.adapters import AdaptedLayer, adapted_layers, merge_adapters_
from ppfl.core.frozen_layers import frozen_start
from ppfl.runs.sequence_networks import TokenTransformer

TOKENS = torch.tensor([[1, 0, 5], [4, 4, 2]])
LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), torch.randn(3, 6, dtype=torch.float64)),
    "linear over positions": (lambda: nn.Linear(6, 5, bias=False), torch.randn(3, 4, 6, dtype=torch.float64)),
    "convolution": (
        lambda: nn.Conv2d(3, 4, (3, 2), stride=2, padding=1, dilation=(1, 2), padding_mode="reflect"),
        torch.randn(2, 3, 8, 9, dtype=torch.float64),
    ),
    "convolution in one dimension": (
        lambda: nn.Conv1d(3, 4, 3, padding="same", bias=False),
        torch.randn(2, 3, 8, dtype=torch.float64),
    ),
    "embedding": (lambda: nn.Embedding(6, 4, padding_idx=0), TOKENS),
}


def drawn(net: nn.Module, settings: Lora, seed: int = 0) -> nn.Module:
    """The network with adapters whose factor B is not zero."""
    adapted = with_adapters(net, settings, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(adapted).values():
            layer.up.weight.copy_(torch.randn(layer.up.weight.shape, generator=generator))
    return adapted


def naive_change(layer: AdaptedLayer) -> torch.Tensor:
    """alpha / rank * B A, one entry after the other."""
    down, up, factor = layer.down.weight, layer.up.weight, layer.alpha / layer.rank
    if isinstance(layer.base, nn.Embedding):  # A is (rank, tokens) there, and W is (tokens, width)
        return factor * torch.einsum("or,nr->no", up, down)
    if isinstance(layer.base, nn.Linear):
        return factor * torch.einsum("or,ri->oi", up, down)
    return factor * torch.einsum("or,r...->o...", up.flatten(1), down)


# ---------------------------------------------------------------------- what an adapter computes


@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_the_layer_with_a_low_rank_change_of_its_weight(kind: str) -> None:
    make, x = LAYERS[kind]
    net = nn.Sequential(make()).double()
    adapted = drawn(net, lora(rank=2, alpha=3, on="0"))
    (layer,) = adapted_layers(adapted).values()
    changed = copy.deepcopy(net)
    with torch.no_grad():
        changed[0].weight += naive_change(layer)
        torch.testing.assert_close(adapted(x), changed(x), atol=1e-12, rtol=1e-10)
        assert not torch.allclose(adapted(x), net(x))
        merged = merge_adapters_(copy.deepcopy(adapted))
        torch.testing.assert_close(merged(x), adapted(x), atol=1e-12, rtol=1e-10)
    assert type(merged[0]) is type(net[0]) and merged.state_dict().keys() == net.state_dict().keys()
    assert int(torch.linalg.matrix_rank(naive_change(layer).flatten(1))) <= 2


@pytest.mark.parametrize("kind", LAYERS)
def test_it_begins_with_the_outputs_of_the_layer(kind: str) -> None:
    make, x = LAYERS[kind]
    net = nn.Sequential(make()).double()
    adapted = with_adapters(net, lora(rank=2, on="0"))
    assert torch.equal(adapted(x), net(x))
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert set(trained) == {"0.down.weight", "0.up.weight"}
    assert bool(trained["0.down.weight"].any())  # else nothing would ever be learned


def test_the_first_gradient_is_for_B_alone() -> None:
    adapted = with_adapters(make_net(), lora(rank=2))
    F.cross_entropy(adapted(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    for layer in adapted_layers(adapted).values():
        assert float(layer.up.weight.grad.abs().max()) > 0
        assert float(layer.down.weight.grad.abs().max()) == 0


def test_draws_depend_on_the_seed_alone_and_leave_torchs_generator_as_it_was() -> None:
    net, before = make_net(), torch.get_rng_state()
    values = []
    for seed in (0, 0, 1):
        values.append(with_adapters(net, lora(rank=2), seed)[0].down.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_the_network_that_was_given_is_not_changed() -> None:
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    drawn(net, lora(rank=2))
    assert all(p.requires_grad for p in net.parameters()) and type(net[0]) is nn.Linear
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_layer_in_two_places_has_one_adapter_and_a_tied_weight_is_merged_where_it_is_adapted() -> None:
    shared = nn.Linear(4, 4)
    adapted = drawn(nn.Sequential(shared, nn.ReLU(), shared), lora(rank=2))
    assert adapted[0] is adapted[2] and isinstance(adapted[0], AdaptedLayer)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    adapted, x = drawn(tied, lora(rank=2, on="0")), torch.randn(3, 4)
    assert torch.allclose(merge_adapters_(copy.deepcopy(adapted))(x), adapted(x), atol=1e-6)


def test_a_transformer_layer_of_torch_uses_its_adapters_in_evaluation_mode_too() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
    adapted, x = drawn(net, lora(rank=2, on="linear")), torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = adapted.train()(x)
        torch.testing.assert_close(adapted.eval()(x), expected)
        assert not torch.allclose(expected, net.eval()(x), atol=1e-3)


# ---------------------------------------------------------------------- which layers


class Mixed(nn.Module):
    """One layer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 6)
        self.attention = nn.ModuleDict({"queries": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "out": nn.Linear(6, 6)})
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6)
        self.filters = nn.Conv1d(6, 8, 3)
        self.torch_attention, self.cells = nn.MultiheadAttention(6, 2), nn.LSTM(6, 6)
        self.classifier = nn.Linear(8, 3)


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ("classifier", {"classifier"}),
        ("attention.out", {"attention.out"}),
        ("attention", {"attention.queries", "attention.out"}),  # a module: its layers
        ("queri", {"attention.queries"}),  # a part of names
        ("linear", {"attention.queries", "attention.out", "classifier"}),
        ("convolution", {"filters"}),
        ("embedding", {"tokens"}),
        (("tokens", "convolution"), {"tokens", "filters"}),
    ],
)
def test_layers_are_chosen_by_name_part_of_a_name_or_kind(on, expected: set[str]) -> None:
    assert adapted_layers(with_adapters(Mixed(), lora(rank=2, on=on))).keys() == expected


def test_attention_of_our_transformer_can_be_adapted() -> None:
    net = TokenTransformer(12, 5, 12, layers=2, heads=2, width=8, dropout=0.0)
    found = adapted_layers(with_adapters(net, lora(rank=2, on="attention")))
    assert found.keys() == {f"layers.{i}.attention.1.{name}" for i in (0, 1) for name in ("queries_keys_values", "out")}


def test_what_is_named_in_train_is_trained_as_a_whole_and_common() -> None:
    population = Population(make_net(), canonical=lora(rank=2, on="linear", train=("2",)), k=3)
    assert population.canonical_names == {"0.up.weight"}
    assert population.common_names == {"0.down.weight", "2.weight", "2.bias"}
    adapted = with_adapters(make_net(), lora(rank=2, on="0", train=("2",)))
    assert Population(adapted, canonical=("adapters.up", "2"), k=3).common_names == {"0.down.weight"}


def test_the_factor_A_can_stay_as_it_was_drawn() -> None:
    population = Population(make_net(), canonical=lora(rank=2, train_down=False), k=3)
    assert population.common_names == set() and population.canonical_names == {"0.up.weight", "2.up.weight"}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (lora(on="heads", rank=2), r"'heads'\) matches no layer .* 'linear', .* 'attention.queries'"),
        (lora(on="torch_attention", rank=2), "'torch_attention', which is a MultiheadAttention: .* bare weights"),
        (lora(on="cells", rank=2), "'cells', which is a LSTM"),
        (lora(on="depthwise", rank=2), "'depthwise', a convolution with 6 groups"),
        (lora(on="norm", rank=2), "matches no layer"),
        (lora(on="classifier", rank=4), "rank 4, but the weight of 'classifier' .* rank 3 at most; use rank=3"),
        (lora(on="tokens", rank=2, train=("head",)), r"train=...\) names 'head', .* 'classifier'"),
        (lora(on="classifier", rank=2, train=("classifier",)), "matches no layer"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_line(settings: Lora, found: str) -> None:
    with pytest.raises(ModelError, match=found) as error:
        with_adapters(Mixed(), settings)
    assert "\n" not in str(error.value)


def test_adapters_of_one_layer_and_of_adapters_are_refused() -> None:
    with pytest.raises(ModelError, match="itself one layer"):
        with_adapters(nn.Linear(3, 3), lora(rank=1))
    with pytest.raises(ModelError, match="has adapters already"):
        with_adapters(with_adapters(make_net(), lora(rank=1)), lora(rank=1))
    with pytest.raises(ModelError, match="max_norm"):
        with_adapters(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), lora(rank=1, on="0"))


# ---------------------------------------------------------------------- in a population


def test_a_setting_and_a_name_give_the_same_population() -> None:
    short, long = (
        Population(make_net(), canonical=lora(rank=2), k=4),
        Population(with_adapters(make_net(), lora(rank=2)), canonical="adapters.up", k=4),
    )
    assert repr(short) == repr(long) and short.collapses
    for name, value in short.initial_models(seed=0).items():
        assert torch.equal(value, long.initial_models(seed=0)[name])


def test_mixed_weights_of_both_factors_are_refused() -> None:
    adapted = with_adapters(make_net(), lora(rank=2))
    for canonical in ("all", "adapters"):
        with pytest.raises(ModelError, match="use canonical='adapters.up'"):
            Population(adapted, canonical=canonical, mix="weights", k=2)
    assert not Population(adapted, canonical="adapters", mix="outputs", k=2).collapses
    Population(adapted, canonical="all", mix="weights", k=1)  # nothing is mixed


def test_adapters_that_are_drawn_apart_hardly_change_the_network() -> None:
    net, x = make_net(), torch.randn(50, 4)
    population = Population(net, canonical=lora(rank=2), k=3)
    models = population.initial_models(seed=0, distinct=True)
    for k in range(3):
        network = {name: v[k] if name in population.canonical_names else v for name, v in models.items()}
        output = torch.func.functional_call(population.net, network, (x,))
        torch.testing.assert_close(output, net(x), atol=0.05, rtol=0)
    assert not torch.equal(models["0.up.weight"][1], models["0.up.weight"][2])


def test_layers_before_the_first_adapter_run_once() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    population = Population(nn.Sequential(body, nn.Linear(4, 3)), canonical=lora(rank=2, on="0.2"), k=2)
    assert frozen_start(population.architecture) == ("0.0",)
    population = Population(nn.Sequential(body, nn.Linear(4, 3)), canonical=lora(rank=2, on="1"), k=2)
    assert frozen_start(population.architecture) == ("0",)
