"""Dropout is a function of its key, and no layer of torch.nn draws or remembers anything unnoticed."""

import contextlib
import copy
import inspect
import itertools
import pickle
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from kit.networks import with_seed
from kit.refusals import ModelError, assert_refused
from ppfl.core import dropout
from ppfl.core.draws import hashed, name_key
from ppfl.core.dropout import KeyedModule, with_keyed_dropout

DIMENSIONS = {nn.Dropout: 2, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
LOOKS, REMEMBERS, ROWS = dropout.refuse_side_effects, dropout.refuse_running_statistics, torch.ones(3, 4)
every_layer = pytest.mark.parametrize("layer", DIMENSIONS)


def run(net, x, key):
    """The network with its dropout keyed, every layer with the same key, or with none."""
    keyed, names = with_keyed_dropout(net)
    keys = {} if key is None else dict.fromkeys(names, torch.as_tensor(key))
    return functional_call(keyed, keys, (x,))


def ones_for(layer, n=6, channels=5, size=4):
    return torch.ones(n, channels, *[size] * DIMENSIONS[layer])


@given(st.integers(-(2**63), 2**63 - 1), st.floats(0.01, 0.99))
def test_a_mask_is_the_hash_of_key_layer_sample_and_position(key, p):
    samples = hashed(key ^ name_key("1/0"), torch.arange(3))
    draws = hashed(samples[:, None] + (0x9E3779B97F4A7C15 - 2**64) * torch.arange(4))  # the steps of splitmix64
    y = run(nn.Sequential(nn.Identity(), nn.Dropout(p)), torch.ones(3, 4), key)
    assert (y != 0).tolist() == [[(draw + 2**63) / 2**64 >= p for draw in row] for row in draws.tolist()]
    for shape, dtype in (((7,), torch.float16), ((0, 3), torch.bfloat16), ((2, 3, 2, 2, 2, 2), torch.float64)):
        y = run(nn.Dropout(p), torch.ones(shape, dtype=dtype), key)
        assert y.shape == shape and y.dtype == dtype


@every_layer
def test_a_share_p_is_dropped_and_values_are_those_of_torch(layer):
    for p in (0.1, 0.5, 0.9):
        share = (run(layer(p), ones_for(layer, n=200, channels=50, size=2), key=3) == 0).double()
        assert abs(share.mean() - p) < 5 * (p * (1 - p) / (200 * 50)) ** 0.5
    for p, value in ((0.2, 1.0), (0.5, -2.0), (1.0, 1.0), (0.5, 0.0)):
        x = torch.full((40, 20, *ones_for(layer).shape[2:]), value)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            expected = layer(p)(x).unique()
        torch.testing.assert_close(run(layer(p), x, key=1).unique(), expected)
    mask = (run(layer(0.5), ones_for(layer), key=1) == 0).flatten(2)
    channels = layer is not nn.Dropout  # these are dropped as a whole
    assert bool((mask.all(dim=2) == mask.any(dim=2)).all()) == channels


@every_layer
def test_a_mask_depends_on_nothing_but_its_key_and_its_gradient_is_that_of_a_fixed_mask(layer):
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
    torch.testing.assert_close(y, slope * x)  # with the mask fixed the layer is linear
    assert (slope == 0).any() and (slope > 0).any()


def test_clients_together_are_clients_one_at_a_time_and_k_models_under_one_key_have_one_mask():
    layers = nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.2), nn.Dropout(0.5), nn.Linear(8, 2)
    net, names = with_keyed_dropout(with_seed(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), *layers)))
    x = torch.randn(3, 7, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys, theta = torch.tensor([5, 5, 6]), {name: p.detach() for name, p in net.named_parameters()}

    def loss(theta, key, x):
        return functional_call(net, {**theta, **dict.fromkeys(names, key)}, (x,)).square().mean()

    models = {name: torch.stack([p] * 3) for name, p in theta.items()}
    together = vmap(grad(loss))(models, keys, x)
    torch.testing.assert_close(vmap(grad(loss), in_dims=(None, 0, 0))(theta, keys, x), together)
    for i in range(3):
        torch.testing.assert_close({n: leaf[i] for n, leaf in together.items()}, grad(loss)(theta, keys[i], x[i]))
    of_models = vmap(loss, in_dims=(0, None, None))(models, keys[0], x[0])
    of_keys = vmap(loss, in_dims=(None, 0, None))(theta, keys, x[0])
    torch.testing.assert_close(of_models, of_keys[[0, 1, 0]])
    assert not torch.allclose(of_keys[2], of_keys[0])


def test_active_dropout_of_a_copy_is_keyed_once_and_the_rest_left_alone():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout1d(0.1))
    keyed, names = with_keyed_dropout(net)
    assert names == ("1.key", "4.key") == with_keyed_dropout(keyed)[1]
    assert [type(net[1]), *(type(keyed[i]) for i in (0, 2, 3))] == [nn.Dropout, nn.Linear, nn.Dropout, nn.Dropout]
    assert keyed[0].weight is not net[0].weight
    torch.testing.assert_close(keyed.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_a_layer_used_twice_has_a_mask_for_each_use_and_the_same_ones_in_every_pass():
    shared, x, keys = nn.Dropout(0.5), torch.ones(10, 200), {"0.key": torch.tensor(1)}
    keyed, names = with_keyed_dropout(nn.Sequential(shared, shared, nn.Unflatten(1, (2, 100))))
    assert names == ("0.key",)
    y = functional_call(keyed, keys, x)
    assert abs(float((y != 0).double().mean()) - 0.25) < 0.1  # one mask twice would keep one half
    with pytest.raises(RuntimeError, match="unflatten"):  # after both uses
        functional_call(keyed, keys, x[:, :150])
    for net in (keyed, copy.deepcopy(keyed), pickle.loads(pickle.dumps(keyed))):
        assert functional_call(net, keys, x).equal(y)
        first = functional_call(net[0], {"key": torch.tensor(1)}, x)  # a part by itself: always the first mask
        assert first.equal(run(nn.Sequential(nn.Dropout(0.5)), x, key=1))


class Noise(KeyedModule):  # what a user would write: uniform noise in training
    def forward(self, x):
        return x + self.random_bits(x.shape, x.device).to(x.dtype) * 2.0**-64 if self.is_random else x


def test_a_random_layer_of_ones_own_can_be_keyed():
    net = nn.Sequential(nn.Dropout(0.5), Noise())
    LOOKS(net, ROWS)
    keyed, names = with_keyed_dropout(net)
    assert names == ("0.key", "1.key")
    noise = functional_call(keyed, {"1.key": torch.tensor(1)}, torch.zeros(100, 100))
    assert -0.5 <= noise.min() < noise.max() <= 0.5 and abs(float(noise.var()) * 12 - 1) < 0.1


class Changed(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 1


class OwnGenerator(nn.Module):
    """Draws from a generator that nobody else knows, as a layer on another device does."""

    def __init__(self):
        super().__init__()
        self.drawn = np.random.default_rng(0)

    def forward(self, x):
        return x + torch.as_tensor(self.drawn.normal(size=x.shape), dtype=x.dtype)


Renamed, OwnRReLU = (type(base.__name__, (base,), {}) for base in (nn.Dropout, nn.RReLU))
PASS = partial(LOOKS, x=ROWS)
SPECTRAL = with_seed(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), dtype=torch.float32)
SPECTRAL.parametrizations.weight[0]._u.copy_(torch.eye(3)[0])  # as torch begins, on some machines the estimate is exact
REFUSED = {
    "a layer like one that draws, which here it does not": (PASS, nn.Sequential(OwnRReLU()), "'0' (RReLU)"),
    "dropout with a forward pass of its own": (PASS, Changed(0.5), "KeyedModule"),
    "dropout inside of a layer": (PASS, nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, 2, dropout=0.5)), "'1' (LSTM)"),
    "alpha dropout": (PASS, nn.AlphaDropout(0.5), "AlphaDropout", "use nn.Dropout"),
    "another generator": (PASS, nn.Sequential(nn.Linear(4, 4), OwnGenerator()), "the network draws", "KeyedModule"),
    "statistics of the batch": (REMEMBERS, nn.BatchNorm1d(4, track_running_stats=False).eval(), "padding"),
    "a norm that is estimated": (PASS, SPECTRAL, "changes its own"),
    "channels of no batch": (partial(run, x=ROWS, key=1), nn.Dropout2d(0.5), "nn.Dropout", "(N, C, ...)"),
    "several keys": (partial(run, x=ROWS, key=torch.arange(4)), nn.Dropout(0.5), "(4,)", "vmap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_draw_or_remember_are_refused_without_a_trace(case):
    refuse, net, *words = REFUSED[case]
    values, before = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    assert_refused(lambda: refuse(net), ModelError, *words)
    assert before.equal(torch.get_rng_state())
    torch.testing.assert_close(net.state_dict(), values, rtol=0, atol=0, equal_nan=True)


def test_layers_that_draw_and_remember_nothing_are_accepted():
    for net in (Renamed(0.5), Changed(0.5).eval(), Changed(0.0), nn.LSTM(4, 4, 2), copy.deepcopy(SPECTRAL).eval()):
        LOOKS(net, ROWS)
    net = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
    net.register_buffer("mask", torch.tensor([float("nan"), float("-inf")]))  # not equal to itself
    LOOKS(net, ROWS)
    assert with_keyed_dropout(Renamed(0.5))[1] == ("key",)


NO_LAYERS = {
    "Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "RNNBase", "RNNCellBase",  # abstract
    "DataParallel", "SyncBatchNorm",  # one runs another module, one runs on accelerators alone
}  # fmt: skip
MODULES = {name: cls for name, cls in vars(nn).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
LAYERS = {name: cls for name, cls in MODULES.items() if name not in NO_LAYERS and "Loss" not in name}
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
def layers_of_torch():
    """Every layer there is, with the first arguments and inputs that it takes."""
    found = {}
    for name, cls in LAYERS.items():
        parameters = inspect.signature(nn.RNNBase if name in ("RNN", "LSTM", "GRU") else cls).parameters
        named = {argument: NAMED[argument] for argument in parameters if argument in NAMED}
        rest = [argument for argument in parameters if argument not in (*named, "mode")]
        for others, inputs in itertools.product(OTHERS, INPUTS):
            if name not in found:
                with contextlib.suppress(Exception), torch.random.fork_rng():
                    layer = cls(**dict(zip(rest, others, strict=False)), **named)
                    layer(*inputs)
                    found[name] = layer, inputs
    return found


def effects(layer, inputs):
    """Whether a pass draws, and whether it changes what the layer holds."""
    one, before = copy.deepcopy(layer), torch.get_rng_state()
    with torch.random.fork_rng():
        one(*inputs)
        draws = not before.equal(torch.get_rng_state())
    return draws, any(not v.equal(layer.state_dict()[key]) for key, v in one.state_dict().items())


class WithInputs(nn.Module):
    """A layer that takes several inputs, of which only the first is passed in."""

    def __init__(self, layer, *others):
        super().__init__()
        self.layer, self.others = layer, others

    def forward(self, x):
        return self.layer(x, *self.others)


def is_refused(refuse, *given):
    with contextlib.suppress(ModelError):
        refuse(*given)
        return False
    return True


DRAWING = {
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "RReLU",
    "RNN", "LSTM", "GRU", "FractionalMaxPool2d", "FractionalMaxPool3d", "MultiheadAttention", "Transformer",
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_torch_that_draw_or_remember_are_keyed_or_refused_and_no_others(training):
    missing = set(LAYERS) - set(layers_of_torch())
    assert not missing, f"new in torch.nn: {missing}; add arguments for them"
    for name, (layer, inputs) in layers_of_torch().items():
        keyed, names = with_keyed_dropout(layer.train(training))
        (draws, remembers), (still_draws, _) = effects(layer, inputs), effects(keyed, inputs)
        assert bool(names) >= (draws and not still_draws) and draws >= bool(names), name
        first, *others = inputs
        assert is_refused(LOOKS, WithInputs(layer, *others), first) == (still_draws or remembers), name
        assert remembers == is_refused(REMEMBERS, layer), name
        if training:  # else the arguments above are not good enough
            assert draws >= (name in DRAWING) and remembers >= ("BatchNorm" in name), name
