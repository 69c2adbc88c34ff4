"""Low-rank adapters: which layers get one, what they compute, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from kit.networks import make_net, with_seed
from kit.refusals import ModelError, assert_refused
from ppfl.core import Population, lora, with_adapters
from ppfl.core.adapters import AdaptedLayer, adapted_layers, merge_adapters_
from ppfl.core.parts import first_frozen_layers


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), normal(3, 6)),
    "linear over positions": (lambda: nn.Linear(6, 5, bias=False), normal(3, 4, 6)),
    "convolution": (lambda: nn.Conv2d(3, 4, (3, 2), 2, 1, (1, 2), padding_mode="reflect"), normal(2, 3, 8, 9)),
    "convolution in one dimension": (lambda: nn.Conv1d(3, 4, 3, padding="same", bias=False), normal(2, 3, 8)),
    "embedding": (lambda: nn.Embedding(6, 4, padding_idx=0), torch.tensor([[1, 0, 5], [4, 4, 2]])),
}


def drawn(net, settings):
    """The network with adapters whose factor B is not zero."""
    adapted = with_adapters(net, settings)
    with torch.no_grad():
        for layer in adapted_layers(adapted).values():
            layer.up.weight.copy_(normal(*layer.up.weight.shape))
    return adapted


@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_the_layer_with_a_low_rank_change_of_its_weight_and_begins_without_one(kind):
    make, x = LAYERS[kind]
    net = with_seed(lambda: nn.Sequential(make()))
    first = with_adapters(net, lora(rank=2, on="0"))
    assert torch.equal(first(x), net(x))
    trained = {name: p for name, p in first.named_parameters() if p.requires_grad}
    assert set(trained) == {"0.down.weight", "0.up.weight"}
    assert bool(trained["0.down.weight"].any())  # else nothing would ever be learned
    adapted = drawn(net, lora(rank=2, alpha=3, on="0"))
    (layer,) = adapted_layers(adapted).values()
    down, up, changed = layer.down.weight, layer.up.weight.flatten(1), copy.deepcopy(net)
    # alpha / rank * B A; of an embedding A is (rank, tokens), and its weight (tokens, width)
    change = torch.einsum("or,nr->no" if kind == "embedding" else "or,r...->o...", up, down) * 3 / 2
    with torch.no_grad():
        changed[0].weight += change
        torch.testing.assert_close(adapted(x), changed(x), atol=1e-12, rtol=1e-10)
        assert not torch.allclose(adapted(x), net(x))
        merged = merge_adapters_(copy.deepcopy(adapted))
        torch.testing.assert_close(merged(x), adapted(x), atol=1e-12, rtol=1e-10)
    assert type(merged[0]) is type(net[0]) and merged.state_dict().keys() == net.state_dict().keys()


def test_draws_come_from_the_seed_and_the_given_network_is_left_alone():
    net, values, before = make_net(), make_net().state_dict(), torch.get_rng_state()
    a, b, other = (with_adapters(net, lora(rank=2), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert a[0].down.weight.equal(b[0].down.weight) and not a[0].down.weight.equal(other[0].down.weight)
    assert all(p.requires_grad for p in net.parameters())
    torch.testing.assert_close(net.state_dict(), values, rtol=0, atol=0)


def test_shared_layers_have_one_adapter_and_tied_weights_are_merged_where_they_are_adapted():
    layer, tied, x = nn.Linear(4, 4), nn.Linear(4, 4), normal(3, 4, dtype=torch.float32)
    adapted = drawn(nn.Sequential(layer, nn.ReLU(), layer), lora(rank=2))
    assert adapted[0] is adapted[2] and isinstance(adapted[0], AdaptedLayer)
    tied.weight = layer.weight
    adapted = drawn(nn.Sequential(layer, nn.ReLU(), tied), lora(rank=2, on="0"))
    torch.testing.assert_close(merge_adapters_(copy.deepcopy(adapted))(x), adapted(x))


def test_a_transformer_layer_of_torch_uses_its_adapters_in_evaluation_mode_too():
    net = with_seed(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    adapted, x = drawn(net, lora(rank=2, on="linear")), normal(2, 3, 8)
    with torch.no_grad():
        expected = adapted.train()(x)
        torch.testing.assert_close(adapted.eval()(x), expected)
        assert not torch.allclose(expected, net.eval()(x), atol=1e-3)


class Mixed(nn.Module):
    """One layer of every kind."""

    def __init__(self):
        super().__init__()
        self.tokens, self.cells = nn.Embedding(12, 6), nn.LSTM(6, 6)
        self.attention = nn.ModuleDict({"queries": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "out": nn.Linear(6, 6)})
        self.depthwise, self.filters = nn.Conv1d(6, 6, 3, groups=6), nn.Conv1d(6, 8, 3)
        self.classifier = nn.Linear(8, 3)


def test_layers_are_chosen_by_name_part_of_a_name_or_kind():
    chosen = {
        "attention": {"attention.queries", "attention.out"},  # a module: its layers
        "queri": {"attention.queries"},  # a part of names
        "linear": {"attention.queries", "attention.out", "classifier"},
        ("tokens", "convolution"): {"tokens", "filters"},
    }
    for on, expected in chosen.items():
        assert adapted_layers(with_adapters(Mixed(), lora(rank=2, on=on))).keys() == expected, on


def test_in_a_population_one_factor_is_common_and_one_canonical_and_what_train_names_is_trained_as_a_whole():
    short = Population(make_net(), canonical=lora(rank=2), k=4)
    long = Population(ADAPTED, canonical="adapters.up", k=4)
    assert repr(short) == repr(long) and short.collapses
    torch.testing.assert_close(short.initial_models(seed=0), long.initial_models(seed=0), rtol=0, atol=0)
    population = Population(make_net(), canonical=lora(rank=2, on="linear", train=("2",)), k=3)
    assert population.canonical_names == {"0.up.weight"}
    assert population.common_names == {"0.down.weight", "2.weight", "2.bias"}
    fixed = Population(make_net(), canonical=lora(rank=2, train_down=False), k=3)
    assert fixed.common_names == set() and fixed.canonical_names == {"0.up.weight", "2.up.weight"}
    assert not Population(ADAPTED, canonical="adapters", mix="outputs", k=2).collapses


def test_adapters_drawn_apart_hardly_change_the_network_and_layers_before_the_first_run_once():
    net, x = make_net(), normal(50, 4, dtype=torch.float32)
    population = Population(net, canonical=lora(rank=2), k=3)
    models = population.initial_models(seed=0, distinct=True)
    for k in range(3):
        network = {name: v[k] if name in population.canonical_names else v for name, v in models.items()}
        output = torch.func.functional_call(population.net, network, (x,))
        torch.testing.assert_close(output, net(x), atol=0.05, rtol=0)
    assert not torch.equal(models["0.up.weight"][1], models["0.up.weight"][2])
    deep = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 3))
    for on, start in (("0.2", ("0.0",)), ("1", ("0",))):
        assert first_frozen_layers(Population(deep, canonical=lora(rank=2, on=on), k=2).architecture) == start


ADAPTED = with_adapters(make_net(), lora(rank=2))
REFUSED = {
    "unknown layer": (lambda: with_adapters(Mixed(), lora(on="heads", rank=2)), "'heads'", "'attention.queries'"),
    "recurrent": (lambda: with_adapters(Mixed(), lora(on="cells", rank=2)), "'cells'", "LSTM"),
    "groups": (lambda: with_adapters(Mixed(), lora(on="depthwise", rank=2)), "'depthwise'", "6 groups"),
    "one bare layer": (lambda: with_adapters(nn.Linear(2, 2), lora(rank=1)), "nn.Sequential(layer)"),
    "a part without parameters": (lambda: with_adapters(make_net(), lora(rank=1, train=("1",))), "'1'", "'0', '2'"),
    "max_norm": (lambda: with_adapters(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), lora(on="0")), "max_norm"),
    "rank": (lambda: with_adapters(Mixed(), lora(on="classifier", rank=4)), "'classifier'", "rank=3"),
    "twice": (lambda: with_adapters(ADAPTED, lora(rank=1)), "already"),
    "both factors": (lambda: Population(ADAPTED, canonical="adapters", mix="weights", k=2), "'adapters.up'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_refused(case):
    call, *words = REFUSED[case]
    assert_refused(call, ModelError, *words)
