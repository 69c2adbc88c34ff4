"""Dropout is a function of its key, and no layer of torch.nn draws or remembers anything unnoticed."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from ppfl.core.draws import name_key
from ppfl.core.errors import ModelError
from ppfl.core.randomness import (
    HIDDEN_RANDOMNESS,
    KeyedModule,
    refuse_hidden_randomness,
    refuse_running_statistics,
    refuse_side_effects,
    with_keyed_dropout,
)

ELEMENTS = (nn.Dropout, nn.AlphaDropout)
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
FAMILY = (*ELEMENTS, *CHANNELS)
INT64 = st.integers(-(2**63), 2**63 - 1)


def run(net: nn.Module, x: Tensor, key: int | Tensor | None) -> Tensor:
    """The network with its dropout keyed, every layer with the same key, or with none."""
    keyed, names = with_keyed_dropout(net)
    keys = {} if key is None else dict.fromkeys(names, torch.as_tensor(key))
    return functional_call(keyed, keys, (x,))


def batch_for(layer: type[nn.Module], n: int = 6, channels: int = 5, size: int = 4) -> Tensor:
    dims = {nn.Dropout1d: 1, nn.Dropout3d: 3}.get(layer, 2)
    return torch.ones(n, channels, *[size] * dims)


def dropped(layer: type[nn.Module], y: Tensor) -> Tensor:
    """Where a batch of ones was dropped: alpha dropout makes it negative."""
    return y < 0 if layer in ALPHA else y == 0


# ---- masks


@given(INT64, st.floats(0.01, 0.99))
def test_a_mask_is_splitmix64_of_key_layer_sample_and_position(key: int, p: float) -> None:
    low_64 = (1 << 64) - 1

    def splitmix(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) & low_64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & low_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & low_64
        return z ^ (z >> 31)

    def signed(z: int) -> int:
        return z - (1 << 64) if z >> 63 else z

    samples = [splitmix(splitmix((key ^ name_key("1/0")) & low_64) ^ n) for n in range(3)]
    draws = [[signed(splitmix(s + i * 0x9E3779B97F4A7C15)) for i in range(4)] for s in samples]
    expected = [[(draw + 2**63) / 2**64 >= p for draw in row] for row in draws]
    y = run(nn.Sequential(nn.Identity(), nn.Dropout(p)), torch.ones(3, 4), key)
    assert (y != 0).tolist() == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("layer", FAMILY)
def test_a_share_p_is_dropped(layer: type[nn.Module], p: float) -> None:
    x = batch_for(layer, n=200, channels=50, size=2)
    share = dropped(layer, run(layer(p), x, key=3)).double()
    spread = (p * (1 - p) / (200 * 50)) ** 0.5
    assert abs(share.mean() - p) < 5 * spread
    rows = share.flatten(1).mean(dim=1)  # no sample is favoured either
    assert (rows - p).abs().max() < 6 * (p * (1 - p) / 50) ** 0.5


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_the_mean_is_kept(layer: type[nn.Module]) -> None:
    y = run(layer(0.3), batch_for(layer, n=400, channels=50, size=2), key=5)
    assert abs(float(y.mean()) - 1) < 5 * (0.3 / 0.7 / (400 * 50)) ** 0.5


@pytest.mark.parametrize("layer", ALPHA)
def test_alpha_dropout_keeps_mean_and_variance_of_normal_input(layer: type[nn.Module]) -> None:
    x = torch.randn(1000, 200, generator=torch.Generator().manual_seed(0))
    y = run(layer(0.3), x, key=5)
    assert abs(float(y.mean())) < 0.03 and abs(float(y.var()) - 1) < 0.05


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
@pytest.mark.parametrize("p", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("layer", FAMILY)
def test_values_are_those_of_torch(layer: type[nn.Module], p: float, value: float) -> None:
    x = torch.full((40, 20, *batch_for(layer).shape[2:]), value)
    torch.testing.assert_close(run(layer(p), x, key=1).unique(), layer(p)(x).unique())


@pytest.mark.parametrize("layer", CHANNELS)
def test_channel_dropout_drops_whole_channels(layer: type[nn.Module]) -> None:
    mask = dropped(layer, run(layer(0.5), batch_for(layer), key=1)).flatten(2)
    assert (mask.all(dim=2) == mask.any(dim=2)).all()
    channels = mask[:, :, 0]
    assert channels.any() and not channels.all()
    assert (channels != channels[0]).any() and (channels != channels[:, :1]).any()


@pytest.mark.parametrize("layer", ELEMENTS)
def test_element_dropout_tells_positions_apart(layer: type[nn.Module]) -> None:
    mask = dropped(layer, run(layer(0.5), batch_for(layer), key=1)).flatten(2)
    assert (mask.all(dim=2) != mask.any(dim=2)).any()


@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_channel_dropout_refuses_what_torch_would_not_take_for_a_batch(layer: type[nn.Module]) -> None:
    net = nn.Sequential(layer(0.5))
    for x in (torch.ones(4, 3), torch.ones(2, 3, 4, 5, 6, 7)):
        with pytest.raises(ModelError, match=r"0 drops whole channels.*expects a batch \(N, C, ...\).*nn.Dropout"):
            run(net, x, key=1)


def test_other_keys_layers_and_samples_have_other_masks() -> None:
    x = torch.ones(4, 200)
    net = nn.Sequential(nn.Dropout(0.5))
    first = run(net, x, key=1)
    differences = [
        first != run(net, x, key=2),
        first != run(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), x, key=1),
        first[1:] != first[:-1],
    ]
    for differs in differences:  # independent masks with p = 1/2 differ at every second place
        assert abs(float(differs.double().mean()) - 0.5) < 0.15


@pytest.mark.parametrize("layer", FAMILY)
def test_a_padded_batch_has_the_same_masks(layer: type[nn.Module]) -> None:
    x = torch.rand(batch_for(layer, n=9).shape, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(layer(0.5))
    assert run(net, x, key=1)[:4].equal(run(net, x[:4], key=1))


@pytest.mark.parametrize("shape", [(7,), (0, 3), (2, 3, 4), (2, 3, 2, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_and_dtype_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for layer in ELEMENTS:
        y = run(layer(0.5), torch.ones(shape, dtype=dtype), key=1)
        assert y.shape == shape and y.dtype == dtype


def test_the_layout_in_memory_does_not_matter() -> None:
    x = torch.rand(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    for layer in (nn.Dropout, nn.Dropout2d):
        y = run(layer(0.5), x.contiguous(memory_format=torch.channels_last), key=1)
        assert y.equal(run(layer(0.5), x, key=1))


def test_dropout_in_place_leaves_its_input_alone() -> None:
    x = torch.ones(4, 5)
    y = run(nn.Dropout(0.5, inplace=True), x, key=1)
    assert x.equal(torch.ones(4, 5)) and not y.equal(x)


# ---- keys


@pytest.mark.parametrize("layer", FAMILY)
def test_without_a_key_dropout_is_off(layer: type[nn.Module]) -> None:
    x = batch_for(layer)
    assert run(layer(0.5), x, key=None) is x
    keyed, names = with_keyed_dropout(layer(0.5))
    assert functional_call(keyed.eval(), {names[0]: torch.tensor(1)}, (x,)) is x


def test_a_key_of_another_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"key of 1 has shape \(4,\).*shape \(\).*vmap"):
        run(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), torch.ones(4, 5), key=torch.arange(4))


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    net = nn.Sequential(*[nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)])
    x, found = torch.ones(4, 50), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(run(net, x, key=1))
        assert before.equal(torch.get_rng_state())
    assert found[0].equal(found[1])


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(64, 20),
        nn.AlphaDropout(0.2),
        nn.Linear(20, 8),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(8, 2),
    ).double()


@pytest.mark.parametrize("batched_parameters", [False, True])
def test_clients_together_are_clients_one_at_a_time(batched_parameters: bool) -> None:
    net, names = with_keyed_dropout(small_network())
    clients = 3
    keys, x = torch.tensor([5, 5, 6]), torch.randn(clients, 7, 1, 6, 6, dtype=torch.float64)
    x[1] = x[0]
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    if batched_parameters:
        parameters = {name: torch.stack([p] * clients) for name, p in parameters.items()}

    def loss(theta: dict[str, Tensor], key: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, {**theta, **dict.fromkeys(names, key)}, (x,)).square().mean()

    together = vmap(grad(loss), in_dims=(0 if batched_parameters else None, 0, 0))(parameters, keys, x)
    for i in range(clients):
        own = {name: p[i] for name, p in parameters.items()} if batched_parameters else parameters
        for name, found in grad(loss)(own, keys[i], x[i]).items():
            torch.testing.assert_close(together[name][i], found)
    assert together["0.weight"][0].equal(together["0.weight"][1])  # same key, same data
    assert not together["0.weight"][0].equal(together["0.weight"][2])


def test_models_stacked_under_one_key_have_one_mask() -> None:
    net, names = with_keyed_dropout(small_network())
    models = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in net.named_parameters()}
    keys, x = dict.fromkeys(names, torch.tensor(1)), torch.randn(3, 1, 6, 6, dtype=torch.float64)
    stacked = vmap(lambda theta: functional_call(net, {**theta, **keys}, (x,)))(models)
    for k in range(2):
        alone = functional_call(net, {**{name: p[k] for name, p in models.items()}, **keys}, (x,))
        torch.testing.assert_close(stacked[k], alone)


def test_a_batch_shared_by_clients_is_masked_by_each_key() -> None:
    net, (name,) = with_keyed_dropout(nn.Dropout(0.5))
    x = torch.ones(3, 50)
    found = vmap(lambda key: functional_call(net, {name: key}, (x,)))(torch.arange(4))
    assert all(found[i].equal(functional_call(net, {name: torch.tensor(i)}, (x,))) for i in range(4))


@pytest.mark.parametrize("layer", FAMILY)
def test_the_gradient_is_that_of_a_fixed_mask(layer: type[nn.Module]) -> None:
    x = torch.rand(batch_for(layer).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    slope = grad(lambda x: run(layer(0.5), x, key=1).sum())(x)
    # with the mask fixed the layer is affine: y = slope x + y(0)
    torch.testing.assert_close(run(layer(0.5), x, key=1), slope * x + run(layer(0.5), torch.zeros_like(x), key=1))
    assert (slope == 0).any() and (slope > 0).any()
    leaf = x.clone().requires_grad_()
    run(layer(0.5), leaf, key=1).sum().backward()
    torch.testing.assert_close(leaf.grad, slope)


# ---- replacing


def test_active_dropout_of_a_copy_is_keyed_and_the_rest_left_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout1d(0.1))
    before = copy.deepcopy(net)
    keyed, names = with_keyed_dropout(net)
    assert names == ("1.key", "4.key")
    assert [type(m) for m in net] == [type(m) for m in before]
    assert [type(keyed[i]) for i in (0, 2, 3)] == [nn.Linear, nn.Dropout, nn.Dropout]
    assert keyed.state_dict().keys() == net.state_dict().keys()
    assert keyed[0].weight is not net[0].weight and keyed[0].weight.equal(net[0].weight)


def test_a_network_without_dropout_has_no_keys() -> None:
    assert with_keyed_dropout(nn.Linear(2, 2))[1] == ()


def test_a_network_may_be_a_dropout_layer() -> None:
    keyed, names = with_keyed_dropout(nn.Dropout(0.5))
    assert names == ("key",) and not functional_call(keyed, {"key": torch.tensor(1)}, torch.ones(4, 9)).all()


def test_keying_twice_is_keying_once() -> None:
    net, names = with_keyed_dropout(small_network())
    again, again_names = with_keyed_dropout(net)
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    keys = dict.fromkeys(names, torch.tensor(1))
    assert names == again_names and functional_call(net, keys, (x,)).equal(functional_call(again, keys, (x,)))


class OneLayerTwice(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.dropout, self.fails = nn.Dropout(0.5), fails
        self.unregistered = [self.dropout]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.dropout(x), self.unregistered[0](x)
        if self.fails:
            raise RuntimeError("after two uses")
        return torch.stack([first, second])


def test_a_layer_used_twice_has_a_mask_for_each_use_and_the_same_ones_in_every_pass() -> None:
    x = torch.ones(4, 200)
    keyed, names = with_keyed_dropout(OneLayerTwice())
    assert names == ("dropout.key",)
    keys = {"dropout.key": torch.tensor(1)}
    first, second = functional_call(keyed, keys, (x,))
    assert abs(float((first != second).double().mean()) - 0.5) < 0.15
    for net in (keyed, copy.deepcopy(keyed), pickle.loads(pickle.dumps(keyed))):
        assert functional_call(net, keys, (x,)).equal(torch.stack([first, second]))
    keyed.fails = True
    with pytest.raises(RuntimeError, match="after two uses"):
        functional_call(keyed, keys, (x,))
    for _ in range(2):  # a part of the network by itself: always the first mask, whatever ran before
        assert functional_call(keyed.dropout, {"key": torch.tensor(1)}, (x,)).equal(first)


def test_a_layer_in_two_places_has_a_mask_for_each() -> None:
    shared = nn.Dropout(0.5)
    keyed, names = with_keyed_dropout(nn.Sequential(shared, nn.Identity(), shared))
    assert names == ("0.key",)
    kept = functional_call(keyed, {"0.key": torch.tensor(1)}, torch.ones(10, 200)) != 0
    assert abs(float(kept.double().mean()) - 0.25) < 0.1  # a mask twice would keep one half


class Noise(KeyedModule):
    """What a user would write: uniform noise that is added in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.random_bits(x.shape, x.device).to(x.dtype) * 2.0**-64 if self.is_random else x


def test_a_random_layer_of_ones_own_can_be_keyed() -> None:
    net = nn.Sequential(nn.Dropout(0.5), Noise())
    refuse_hidden_randomness(net)
    keyed, names = with_keyed_dropout(net)
    assert names == ("0.key", "1.key")
    noise = functional_call(keyed, {"1.key": torch.tensor(1)}, torch.zeros(100, 100))
    assert -0.5 <= noise.min() < noise.max() <= 0.5 and abs(float(noise.var()) * 12 - 1) < 0.1


# ---- refusing


def test_a_module_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Jitter(nn.Module):
        pass

    class FixedRReLU(nn.RReLU):
        pass

    net = nn.Sequential(nn.Linear(2, 2), Jitter())
    refuse_hidden_randomness(net)
    monkeypatch.setitem(HIDDEN_RANDOMNESS, Jitter, lambda m: "use nn.Identity" if m.training else None)
    with pytest.raises(ModelError, match=r"'1' \(Jitter\) draws random numbers.*use nn.Identity"):
        refuse_hidden_randomness(net)
    refuse_hidden_randomness(net.eval())
    with pytest.raises(ModelError, match=r"the network \(FixedRReLU\)"):
        refuse_hidden_randomness(FixedRReLU())
    monkeypatch.setitem(HIDDEN_RANDOMNESS, FixedRReLU, lambda m: None)
    refuse_hidden_randomness(FixedRReLU())


def test_dropout_with_a_forward_of_its_own_is_refused_and_without_one_is_keyed() -> None:
    class Renamed(nn.Dropout):
        pass

    class Changed(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    refuse_hidden_randomness(Renamed(0.5))
    assert with_keyed_dropout(Renamed(0.5))[1] == ("key",)
    with pytest.raises(ModelError, match="derive yours from KeyedModule"):
        refuse_hidden_randomness(Changed(0.5))
    refuse_hidden_randomness(Changed(0.0))
    refuse_hidden_randomness(Changed(0.5).eval())


def test_a_transformer_layer_is_keyed_once_its_attention_draws_nothing() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    with pytest.raises(ModelError, match=r"'self_attn' \(MultiheadAttention\).*set its dropout to 0"):
        refuse_hidden_randomness(layer)
    layer.self_attn.dropout = 0.0
    refuse_hidden_randomness(layer)
    x = torch.ones(2, 3, 4)
    refuse_side_effects(layer, x)
    assert not run(layer, x, key=1).equal(run(layer, x, key=2))


@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_draw_only_between_layers(layer: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match=rf"'0' \({layer.__name__}\).*nn.Dropout layer beside it"):
        refuse_hidden_randomness(nn.Sequential(layer(3, 4, num_layers=2, dropout=0.5)))
    refuse_hidden_randomness(layer(3, 4, num_layers=2))
    one = layer(3, 4)
    one.dropout = 0.5
    refuse_hidden_randomness(one)


def test_fractional_pooling_draws_in_evaluation_too_unless_its_samples_are_fixed() -> None:
    for pool, samples in ((nn.FractionalMaxPool2d, 2), (nn.FractionalMaxPool3d, 3)):
        with pytest.raises(ModelError, match=r"nn.MaxPool\dd"):
            refuse_hidden_randomness(pool(2, output_size=2).eval())
        refuse_hidden_randomness(pool(2, output_size=2, _random_samples=torch.rand(1, 4, samples)))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.InstanceNorm1d]
)
def test_running_statistics_are_refused_in_training_and_accepted_frozen(layer: type[nn.Module]) -> None:
    built = layer(4, track_running_stats=True) if "Lazy" not in layer.__name__ else layer()
    net = nn.Sequential(nn.Identity(), built)
    with pytest.raises(ModelError, match=rf"'1' \({layer.__name__}\) updates running.*nn.GroupNorm.*\.eval\(\)"):
        refuse_running_statistics(net)
    refuse_running_statistics(net.eval())


def test_statistics_of_the_batch_are_refused_in_both_modes() -> None:
    net = nn.BatchNorm1d(4, track_running_stats=False)
    for mode in (net.train(), net.eval()):
        with pytest.raises(ModelError, match="padding"):
            refuse_running_statistics(mode)
    refuse_running_statistics(nn.InstanceNorm1d(4))


class Forward(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f
        self.register_buffer("mask", torch.tensor([float("nan"), float("-inf")]))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


class Counting(nn.Module):
    """Replaces its buffer instead of changing it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


def test_side_effects_of_a_forward_pass_are_found_and_leave_no_trace() -> None:
    x = torch.ones(3, 4)
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"draws random numbers.*nn.Dropout instead of F.dropout"):
        refuse_side_effects(Forward(F.dropout), x)
    assert before.equal(torch.get_rng_state())
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    values = copy.deepcopy(spectral.state_dict())
    for net, inputs in ((spectral, x), (nn.Embedding(3, 4, max_norm=0.1), torch.arange(3)), (Counting(), x)):
        with pytest.raises(ModelError, match="changes its own"):
            refuse_side_effects(net, inputs)
    assert all(value.equal(values[name]) for name, value in spectral.state_dict().items())
    refuse_side_effects(spectral.eval(), x)
    refuse_side_effects(nn.Sequential(Forward(torch.tanh), nn.Dropout(0.5)), x)


# ---- all of torch.nn

CONTAINERS = {"Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}
NOT_LAYERS = {
    **dict.fromkeys(CONTAINERS, "holds other modules, which are looked at by themselves"),
    "RNNBase": "abstract",
    "RNNCellBase": "abstract",
    "DataParallel": "splits a batch over devices and runs the module it is given",
    "SyncBatchNorm": "runs on accelerators only; it has a test of its own above",
    **dict.fromkeys(
        """AdaptiveLogSoftmaxWithLoss BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss
        GaussianNLLLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss
        MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss
        SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss""".split(),  # noqa: SIM905
        "a loss: it compares outputs with labels, and is no part of a network",
    ),
}

_GENERATOR = torch.Generator().manual_seed(0)
ROWS, SEQUENCES, IMAGES, VOLUMES = (
    torch.randn(2, *shape, generator=_GENERATOR) for shape in ((8,), (4, 8), (4, 8, 8), (4, 8, 8, 8))
)
BY_DIMENSION = {"1d": SEQUENCES, "2d": IMAGES, "3d": VOLUMES}
ACTIVATIONS = """CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU
    RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink AlphaDropout Dropout
    FeatureAlphaDropout Flatten""".split()  # noqa: SIM905

# name -> arguments that make it draw if it can, inputs
LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]]] = {
    **{name: ((), {}, (ROWS,)) for name in ACTIVATIONS},
    **{name: ((), {"dim": 1}, (ROWS,)) for name in ("LogSoftmax", "Softmax", "Softmin")},
    **{f"Dropout{d}": ((), {}, (x,)) for d, x in BY_DIMENSION.items()},
    **{f"Adaptive{kind}Pool{d}": ((2,), {}, (x,)) for d, x in BY_DIMENSION.items() for kind in ("Avg", "Max")},
    **{f"{kind}Pool{d}": ((2,), {}, (x,)) for d, x in BY_DIMENSION.items() for kind in ("Avg", "Max")},
    **{f"LPPool{d}": ((2, 2), {}, (x,)) for d, x in BY_DIMENSION.items()},
    **{f"FractionalMaxPool{d}": ((2,), {"output_size": 5}, (BY_DIMENSION[d],)) for d in ("2d", "3d")},
    **{
        f"{lazy}{kind}{d}": ((3, 2) if lazy else (4, 3, 2), {}, (x,))
        for d, x in BY_DIMENSION.items()
        for kind in ("Conv", "ConvTranspose")
        for lazy in ("", "Lazy")
    },
    **{
        f"{lazy}{kind}{d}": (() if lazy else (4,), {"track_running_stats": True}, (x,))
        for d, x in BY_DIMENSION.items()
        for kind in ("BatchNorm", "InstanceNorm")
        for lazy in ("", "Lazy")
    },
    **{f"{kind}Pad{d}": ((1,), {}, (x,)) for d, x in BY_DIMENSION.items() for kind in ("Circular", "Reflection")},
    **{f"{kind}Pad{d}": ((1,), {}, (x,)) for d, x in BY_DIMENSION.items() for kind in ("Replication", "Zero")},
    **{f"ConstantPad{d}": ((1, 0.5), {}, (x,)) for d, x in BY_DIMENSION.items()},
    "MaxUnpool1d": ((2,), {}, F.max_pool1d(SEQUENCES, 2, return_indices=True)),
    "MaxUnpool2d": ((2,), {}, F.max_pool2d(IMAGES, 2, return_indices=True)),
    "MaxUnpool3d": ((2,), {}, F.max_pool3d(VOLUMES, 2, return_indices=True)),
    "Bilinear": ((8, 8, 3), {}, (ROWS, ROWS)),
    "ChannelShuffle": ((2,), {}, (IMAGES,)),
    "CosineSimilarity": ((), {}, (ROWS, ROWS)),
    "PairwiseDistance": ((), {}, (ROWS, ROWS)),
    "CrossMapLRN2d": ((2,), {}, (IMAGES,)),
    "LocalResponseNorm": ((2,), {}, (IMAGES,)),
    "Embedding": ((5, 3), {}, (torch.arange(5),)),
    "EmbeddingBag": ((5, 3), {}, (torch.arange(4)[None],)),
    "Fold": (((4, 4), 2), {}, (torch.rand(2, 16, 9),)),
    "Unfold": ((2,), {}, (IMAGES,)),
    "Unflatten": ((1, (2, 4)), {}, (ROWS,)),
    "GroupNorm": ((2, 4), {}, (IMAGES,)),
    "LayerNorm": ((8,), {}, (ROWS,)),
    "RMSNorm": ((8,), {}, (ROWS,)),
    "Linear": ((8, 3), {}, (ROWS,)),
    "LazyLinear": ((3,), {}, (ROWS,)),
    **{name: ((8, 3), {"num_layers": 2, "dropout": 0.5}, (SEQUENCES,)) for name in ("RNN", "LSTM", "GRU")},
    **{f"{name}Cell": ((8, 3), {}, (ROWS,)) for name in ("RNN", "LSTM", "GRU")},
    "MultiheadAttention": ((8, 2), {"dropout": 0.5}, (SEQUENCES,) * 3),
    "Transformer": ((8, 2, 1, 1, 8), {"dropout": 0.5, "batch_first": True}, (SEQUENCES,) * 2),
    "TransformerEncoderLayer": ((8, 2, 8), {"dropout": 0.5, "batch_first": True}, (SEQUENCES,)),
    "TransformerDecoderLayer": ((8, 2, 8), {"dropout": 0.5, "batch_first": True}, (SEQUENCES,) * 2),
    "TransformerEncoder": ((nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1), {}, (SEQUENCES,)),
    "TransformerDecoder": ((nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 1), {}, (SEQUENCES,) * 2),
    "PixelShuffle": ((2,), {}, (IMAGES,)),
    "PixelUnshuffle": ((2,), {}, (IMAGES,)),
    "Softmax2d": ((), {}, (IMAGES,)),
    "Threshold": ((0.5, 0.0), {}, (ROWS,)),
    "Upsample": ((), {"scale_factor": 2}, (IMAGES,)),
    "UpsamplingBilinear2d": ((), {"scale_factor": 2}, (IMAGES,)),
    "UpsamplingNearest2d": ((), {"scale_factor": 2}, (IMAGES,)),
}
EXPORTED = {name for name, cls in vars(nn).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}


def build(name: str) -> nn.Module:
    positional, named, inputs = LAYERS[name]
    layer: nn.Module = getattr(nn, name)(*positional, **named)
    if name.startswith("Lazy"):
        layer(*inputs)  # takes its shape from what it sees first
    return layer


def is_refused(refuse: Callable[[nn.Module], None], net: nn.Module) -> bool:
    try:
        refuse(net)
    except ModelError:
        return True
    return False


def outputs_of(layer: nn.Module, inputs: tuple[Tensor, ...], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    found = copy.deepcopy(layer)(*inputs)
    return list(found) if isinstance(found, tuple) else [found]


def draws(layer: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether two outputs with other states of the global generator differ, or the generator moves."""
    first, second = (outputs_of(layer, inputs, seed) for seed in (1, 2))
    moved = not torch.get_rng_state().equal(torch.Generator().manual_seed(2).get_state())
    flat = [t for out in (first, second) for o in out for t in (o if isinstance(o, tuple) else (o,)) if t is not None]
    half = len(flat) // 2
    return moved or any(not torch.equal(a, b) for a, b in zip(flat[:half], flat[half:], strict=True))


def test_every_layer_of_torch_is_in_the_table() -> None:
    missing = EXPORTED - set(LAYERS) - set(NOT_LAYERS)
    assert not missing, f"new in torch.nn: {missing}; add them to LAYERS, and to HIDDEN_RANDOMNESS if they draw"
    assert not set(LAYERS) & set(NOT_LAYERS)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(EXPORTED & set(LAYERS)))
def test_layers_of_torch_that_draw_are_keyed_or_refused_and_no_others(name: str, training: bool) -> None:
    layer, inputs = build(name).train(training), LAYERS[name][2]
    keyed, names = with_keyed_dropout(layer)
    if draws(layer, inputs):
        assert is_refused(refuse_hidden_randomness, layer) or (names and not draws(keyed, inputs))
    else:
        assert not is_refused(refuse_hidden_randomness, layer) and not names


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(EXPORTED & set(LAYERS)))
def test_layers_of_torch_that_remember_are_refused_and_no_others(name: str, training: bool) -> None:
    layer, inputs = build(name).train(training), LAYERS[name][2]
    before = copy.deepcopy(layer.state_dict())
    layer(*inputs)
    remembers = any(not value.equal(before[name]) for name, value in layer.state_dict().items())
    assert remembers == is_refused(refuse_running_statistics, layer)


def test_the_table_makes_every_known_random_layer_draw() -> None:
    known = {cls.__name__ for cls in HIDDEN_RANDOMNESS} - {"RNNBase"} | {"RNN", "LSTM", "GRU", "Transformer"}
    assert all(draws(build(name), LAYERS[name][2]) for name in known)
