"""Dropout is a function of its key, and no layer of torch.nn draws or remembers anything unnoticed."""

import contextlib
import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from kit.networks import with_seed
from kit.refusals import ModelError, assert_refused
from ppfl.core import randomness
from ppfl.core.draws import name_key
from ppfl.core.randomness import HIDDEN_RANDOMNESS, KeyedModule, with_keyed_dropout

ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
DIMENSIONS = {nn.Dropout: 2, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3} | dict.fromkeys(ALPHA, 2)
ROWS = torch.ones(3, 4)
DRAWS, REMEMBERS = randomness.refuse_hidden_randomness, randomness.refuse_running_statistics
every_layer = pytest.mark.parametrize("layer", DIMENSIONS)


def run(net: nn.Module, x: Tensor, key: int | Tensor | None) -> Tensor:
    """The network with its dropout keyed, every layer with the same key, or with none."""
    keyed, names = with_keyed_dropout(net)
    keys = {} if key is None else dict.fromkeys(names, torch.as_tensor(key))
    return functional_call(keyed, keys, (x,))


def ones_for(layer: type[nn.Module], n: int = 6, channels: int = 5, size: int = 4) -> Tensor:
    return torch.ones(n, channels, *[size] * DIMENSIONS[layer])


def dropped(layer: type[nn.Module], y: Tensor) -> Tensor:
    """Where a batch of ones was dropped: alpha dropout makes it negative."""
    return y < 0 if layer in ALPHA else y == 0


@given(st.integers(-(2**63), 2**63 - 1), st.floats(0.01, 0.99))
def test_a_mask_is_splitmix64_of_key_layer_sample_and_position(key: int, p: float) -> None:
    low_64, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def splitmix(state: int) -> int:
        z = (state + golden) & low_64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & low_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & low_64
        return z ^ (z >> 31)

    samples = [splitmix(splitmix((key ^ name_key("1/0")) & low_64) ^ n) for n in range(3)]
    draws = [[splitmix(s + i * golden) ^ (1 << 63) for i in range(4)] for s in samples]  # from signed to unsigned
    y = run(nn.Sequential(nn.Identity(), nn.Dropout(p)), torch.ones(3, 4), key)
    assert (y != 0).tolist() == [[draw / 2**64 >= p for draw in row] for row in draws]


@every_layer
def test_a_share_p_is_dropped_and_values_are_those_of_torch(layer: type[nn.Module]) -> None:
    for p in (0.1, 0.5, 0.9):
        share = dropped(layer, run(layer(p), ones_for(layer, n=200, channels=50, size=2), key=3)).double()
        assert abs(share.mean() - p) < 5 * (p * (1 - p) / (200 * 50)) ** 0.5
        rows = share.flatten(1).mean(dim=1)  # no sample is favoured either
        assert (rows - p).abs().max() < 6 * (p * (1 - p) / 50) ** 0.5
    for p, value in ((0.2, 1.0), (0.5, -2.0), (1.0, 1.0), (0.5, 0.0)):
        x = torch.full((40, 20, *ones_for(layer).shape[2:]), value)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            expected = layer(p)(x).unique()
        torch.testing.assert_close(run(layer(p), x, key=1).unique(), expected)
    mask = dropped(layer, run(layer(0.5), ones_for(layer), key=1)).flatten(2)
    channels = layer not in (nn.Dropout, nn.AlphaDropout)  # these are dropped as a whole
    assert bool((mask.all(dim=2) == mask.any(dim=2)).all()) == channels
    first = mask[:, :, 0]
    assert first.any() and not first.all() and (first != first[0]).any() and (first != first[:, :1]).any()


@every_layer
def test_a_mask_depends_on_nothing_but_its_key_and_its_gradient_is_that_of_a_fixed_mask(layer: type[nn.Module]) -> None:
    x = torch.rand(ones_for(layer).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    net, before, state = nn.Sequential(layer(0.5)), x.clone(), torch.get_rng_state()
    y = run(net, x, key=1)
    assert torch.get_rng_state().equal(state)
    assert y[:4].equal(run(net, x[:4], key=1))
    assert x.dim() != 4 or run(net, x.contiguous(memory_format=torch.channels_last), key=1).equal(y)
    assert run(nn.Sequential(layer(0.5, inplace=True)), x, key=1).equal(y) and x.equal(before)
    assert run(net, x, key=None) is x is run(net.eval(), x, key=1)
    net.train()
    slope = grad(lambda x: run(net, x, key=1).sum())(x)
    # with the mask fixed the layer is affine: y = slope x + y(0)
    torch.testing.assert_close(y, slope * x + run(net, torch.zeros_like(x), key=1))
    assert (slope == 0).any() and (slope > 0).any()
    leaf = x.clone().requires_grad_()
    run(net, leaf, key=1).sum().backward()
    torch.testing.assert_close(leaf.grad, slope)


def test_other_keys_layers_and_samples_have_other_masks_and_any_shape_has_one() -> None:
    x, net = torch.ones(4, 200), nn.Sequential(nn.Dropout(0.5))
    first = run(net, x, key=1)
    others = run(net, x, key=2), run(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), x, key=1), first.roll(1, 0)
    for other in others:  # independent masks with p = 1/2 differ at every second place
        assert abs(float((first != other).double().mean()) - 0.5) < 0.15
    for shape, dtype in (((7,), torch.float16), ((0, 3), torch.bfloat16), ((2, 3, 2, 2, 2, 2), torch.float64)):
        for layer in (nn.Dropout, nn.AlphaDropout):
            y = run(layer(0.5), torch.ones(shape, dtype=dtype), key=1)
            assert y.shape == shape and y.dtype == dtype


def test_clients_together_are_clients_one_at_a_time() -> None:
    layers = nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 8), nn.AlphaDropout(0.2), nn.Dropout(0.5), nn.Linear(8, 2)
    net, names = with_keyed_dropout(with_seed(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), *layers)))
    x = torch.randn(3, 7, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([5, 5, 6])
    theta = {name: p.detach() for name, p in net.named_parameters()}

    def loss(theta: dict[str, Tensor], key: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, {**theta, **dict.fromkeys(names, key)}, (x,)).square().mean()

    shared = vmap(grad(loss), in_dims=(None, 0, 0))(theta, keys, x)
    together = vmap(grad(loss))({name: torch.stack([p] * 3) for name, p in theta.items()}, keys, x)
    torch.testing.assert_close(shared, together)
    for i in range(3):
        torch.testing.assert_close({n: leaf[i] for n, leaf in together.items()}, grad(loss)(theta, keys[i], x[i]))
    models = {name: torch.stack([p, p, p]) for name, p in theta.items()}  # K models under one key have one mask
    of_models = vmap(loss, in_dims=(0, None, None))(models, keys[0], x[0])
    torch.testing.assert_close(of_models, of_models[:1].expand(3))
    of_keys = vmap(loss, in_dims=(None, 0, None))(theta, keys, x[0])
    torch.testing.assert_close(of_keys[:2], of_models[:2])
    assert not torch.allclose(of_keys[2], of_keys[0])


def test_active_dropout_of_a_copy_is_keyed_once_and_the_rest_left_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout1d(0.1))
    kinds = [type(module) for module in net]
    keyed, names = with_keyed_dropout(net)
    assert names == ("1.key", "4.key") == with_keyed_dropout(keyed)[1]
    assert [type(module) for module in net] == kinds
    assert [type(keyed[i]) for i in (0, 2, 3)] == [nn.Linear, nn.Dropout, nn.Dropout]
    assert keyed.state_dict().keys() == net.state_dict().keys()
    assert keyed[0].weight is not net[0].weight and keyed[0].weight.equal(net[0].weight)
    assert with_keyed_dropout(nn.Linear(2, 2))[1] == () and with_keyed_dropout(nn.Dropout(0.5))[1] == ("key",)


class OneLayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.fails = nn.Dropout(0.5), False
        self.unregistered = [self.dropout]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.dropout(x), self.unregistered[0](x)
        if self.fails:
            raise RuntimeError("after two uses")
        return torch.stack([first, second])


def test_a_layer_used_twice_has_a_mask_for_each_use_and_the_same_ones_in_every_pass() -> None:
    x, keys = torch.ones(4, 200), {"dropout.key": torch.tensor(1)}
    keyed, names = with_keyed_dropout(OneLayerTwice())
    assert names == ("dropout.key",)
    first, second = functional_call(keyed, keys, (x,))
    assert abs(float((first != second).double().mean()) - 0.5) < 0.15
    for net in (keyed, copy.deepcopy(keyed), pickle.loads(pickle.dumps(keyed))):
        assert functional_call(net, keys, (x,)).equal(torch.stack([first, second]))
    keyed.fails = True
    with pytest.raises(RuntimeError, match="after two uses"):
        functional_call(keyed, keys, (x,))
    for _ in range(2):  # a part of the network by itself: always the first mask, whatever ran before
        assert functional_call(keyed.dropout, {"key": torch.tensor(1)}, (x,)).equal(first)
    shared = nn.Dropout(0.5)
    kept = run(nn.Sequential(shared, nn.Identity(), shared), torch.ones(10, 200), key=1) != 0
    assert abs(float(kept.double().mean()) - 0.25) < 0.1  # a mask twice would keep one half


class Noise(KeyedModule):
    """What a user would write: uniform noise that is added in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.random_bits(x.shape, x.device).to(x.dtype) * 2.0**-64 if self.is_random else x


def test_a_random_layer_of_ones_own_can_be_keyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Dropout(0.5), Noise())
    DRAWS(net)
    keyed, names = with_keyed_dropout(net)
    assert names == ("0.key", "1.key")
    noise = functional_call(keyed, {"1.key": torch.tensor(1)}, torch.zeros(100, 100))
    assert -0.5 <= noise.min() < noise.max() <= 0.5 and abs(float(noise.var()) * 12 - 1) < 0.1
    monkeypatch.setitem(HIDDEN_RANDOMNESS, nn.Identity, lambda m: "use Noise" if m.training else None)
    net = nn.Sequential(Noise(), nn.Identity())
    assert_refused(lambda: DRAWS(net), ModelError, "'1' (Identity)", "use Noise")
    DRAWS(net.eval())


Renamed, OwnRReLU = (type(base.__name__, (base,), {}) for base in (nn.Dropout, nn.RReLU))


class Changed(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Forward(nn.Module):
    """Any function, beside buffers that are not equal to themselves or no numbers."""

    def __init__(self, f: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f
        self.register_buffer("mask", torch.tensor([float("nan"), float("-inf")]))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def replace_buffer(net: nn.Module, x: Tensor) -> Tensor:
    net.flags = ~net.flags
    return x


def attention(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    layer.self_attn.dropout = dropout
    return layer


def looks(net: nn.Module, x: Tensor = ROWS) -> None:
    randomness.refuse_side_effects(net, x)


SPECTRAL = with_seed(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), dtype=torch.float32)
REFUSED = {
    "a layer like one that draws": (DRAWS, OwnRReLU(), "RReLU"),
    "dropout with a forward pass of its own": (DRAWS, Changed(0.5), "KeyedModule"),
    "attention": (DRAWS, attention(0.5), "'self_attn'", "dropout to 0"),
    "lstm": (DRAWS, nn.LSTM(3, 4, 2, dropout=0.5), "LSTM", "nn.Dropout"),
    "pooling at random": (DRAWS, nn.FractionalMaxPool2d(2, output_size=2).eval(), "nn.MaxPool2d"),
    "statistics": (REMEMBERS, nn.Sequential(nn.BatchNorm1d(4)), "'0'", "nn.GroupNorm", ".eval()"),
    "statistics of many devices": (REMEMBERS, nn.SyncBatchNorm(4), "SyncBatchNorm"),
    "statistics of the batch": (REMEMBERS, nn.BatchNorm1d(4, track_running_stats=False).eval(), "padding"),
    "functional dropout": (looks, Forward(lambda _, x: F.dropout(x)), "nn.Dropout"),
    "a norm that is estimated": (looks, SPECTRAL, "changes its own"),
    "a buffer that is replaced": (looks, Forward(replace_buffer), "changes its own"),
    "rescaled": (partial(looks, x=torch.arange(3)), nn.Embedding(3, 4, max_norm=0.1), "changes its own"),
    "channels of no batch": (partial(run, x=ROWS, key=1), nn.Dropout2d(0.5), "nn.Dropout", "(N, C, ...)"),
    "channels of too much": (partial(run, x=torch.ones(2, 3, 4, 5, 6, 7), key=1), nn.Dropout3d(0.5), "batch"),
    "several keys": (partial(run, x=ROWS, key=torch.arange(4)), nn.Dropout(0.5), "(4,)", "vmap"),
}
ACCEPTED = [
    (DRAWS, Renamed(0.5)),
    (DRAWS, nn.Sequential(Changed(0.5).eval(), Changed(0.0))),
    (DRAWS, attention(0.0)),
    (DRAWS, nn.FractionalMaxPool2d(2, output_size=2, _random_samples=ROWS)),
    (looks, copy.deepcopy(SPECTRAL).eval()),
    (looks, nn.Sequential(Forward(lambda _, x: x.tanh()), nn.Dropout(0.5))),
    (partial(looks, x=torch.ones(2, 3, 4)), attention(0.0)),
]


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_draw_or_remember_are_refused_without_a_trace(case: str) -> None:
    refuse, net, *words = REFUSED[case]
    values, before = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    assert_refused(lambda: refuse(net), ModelError, *words)
    assert before.equal(torch.get_rng_state())
    torch.testing.assert_close(net.state_dict(), values, rtol=0, atol=0, equal_nan=True)


def test_layers_that_draw_and_remember_nothing_are_accepted() -> None:
    for accept, net in ACCEPTED:
        accept(net)
    assert with_keyed_dropout(Renamed(0.5))[1] == ("key",)


# ---------------------------------------------------------------------- all of torch.nn

NO_LAYERS = {
    "Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "RNNBase", "RNNCellBase",  # abstract
    "DataParallel",  # runs the module that it is given
    "SyncBatchNorm",  # runs on accelerators alone
}  # fmt: skip
MODULES = {name: cls for name, cls in vars(nn).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
NAMED = {  # arguments with which a layer is small, and draws or remembers if it can
    "dropout": 0.5, "track_running_stats": True, "num_layers": 2, "batch_first": True, "dim": 1, "scale_factor": 2,
    "output_size": 5, "d_model": 8, "nhead": 2, "dim_feedforward": 8, "num_encoder_layers": 1, "num_decoder_layers": 1,
    "encoder_layer": nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
    "decoder_layer": nn.TransformerDecoderLayer(8, 2, 8, batch_first=True),
}  # fmt: skip
OTHERS = [(), (2,), (4,), (8,), ((2, 2),), (3, 2), (8, 2), (8, 3), (2, 4), (4, 3, 2), (8, 8, 3)]
VOLUMES, IMAGES, SEQUENCES, TABLE, PATCHES = (
    torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    for shape in ((4, 8, 8, 8), (4, 8, 8), (4, 8), (8,), (4, 16))
)
POOLS = (F.max_pool3d, VOLUMES), (F.max_pool2d, IMAGES), (F.max_pool1d, SEQUENCES)
INPUTS = [(VOLUMES,), (IMAGES,), (SEQUENCES,), (TABLE,), (PATCHES,), (torch.arange(5),), (torch.arange(4)[None],)]
INPUTS += [*(pool(x, 2, return_indices=True) for pool, x in POOLS), (TABLE,) * 2, (SEQUENCES,) * 2, (SEQUENCES,) * 3]


@cache
def layers_of_torch() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Every layer there is, with the first arguments and inputs that it takes."""
    found = {}
    for name, cls in MODULES.items():
        parameters = inspect.signature(nn.RNNBase if name in ("RNN", "LSTM", "GRU") else cls).parameters
        named = {argument: NAMED[argument] for argument in parameters if argument in NAMED}
        rest = [argument for argument in parameters if argument not in (*named, "mode")]
        for others, inputs in itertools.product(OTHERS, INPUTS):
            if name in NO_LAYERS or "Loss" in name or name in found:
                break
            with contextlib.suppress(Exception), torch.random.fork_rng():
                layer = cls(**dict(zip(rest, others, strict=False)), **named)
                layer(*inputs)
                found[name] = layer, inputs
    return found


def draws(layer: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        copy.deepcopy(layer)(*inputs)
        return not before.equal(torch.get_rng_state())


def is_refused(refuse: Callable[[nn.Module], None], net: nn.Module) -> bool:
    with contextlib.suppress(ModelError):
        refuse(net)
        return False
    return True


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_torch_that_draw_or_remember_are_keyed_or_refused_and_no_others(training: bool) -> None:
    missing = {name for name in MODULES if "Loss" not in name} - NO_LAYERS - set(layers_of_torch())
    assert not missing, f"new in torch.nn: {missing}; add arguments for them, and to HIDDEN_RANDOMNESS if they draw"
    known = {cls.__name__ for cls in HIDDEN_RANDOMNESS} - {"RNNBase"} | {"RNN", "LSTM", "GRU", "Transformer"}
    for name, (layer, inputs) in layers_of_torch().items():
        keyed, names = with_keyed_dropout(layer.train(training))
        random, refused = draws(layer, inputs), is_refused(DRAWS, layer)
        assert refused or (names and not draws(keyed, inputs)) if random else not refused and not names, name
        one = copy.deepcopy(layer)
        one(*inputs)
        remembers = any(not v.equal(layer.state_dict()[key]) for key, v in one.state_dict().items())
        assert remembers == is_refused(REMEMBERS, layer), name
        if training:  # else the arguments above are not good enough
            assert random >= (name in known) and remembers >= ("BatchNorm" in name), name
