"""Passes in bfloat16 and with checkpointed activations against those of the network as it is."""

import pytest
import torch
from torch import nn

from kit.networks import with_seed
from kit.refusals import ModelError, SettingError, assert_refused
from ppfl import Population, fit
from ppfl.core.backends import Batch, Chained, Passes, make_backend, passes
from ppfl.core.models import Mixture
from ppfl.data import digits_federation
from ppfl.sites import Loop, Stacked

CLIENTS, SAMPLES, WIDTH, CLASSES = 3, 8, 12, 4
CHECKPOINTED = Passes(checkpoint_activations=True)


class Twice(nn.Module):
    """Its dropout layer draws two masks in a forward pass."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.two(self.dropout(self.one(x).tanh())).tanh())


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = Twice(), nn.ModuleList([Twice(), nn.Sequential(Twice(), nn.LayerNorm(WIDTH))])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.rest[1](self.rest[0](self.first(x))))


@pytest.fixture
def bfloat16(monkeypatch):
    """As on a processor that has it."""
    monkeypatch.setattr(passes, "_computes_bfloat16", lambda device: True)
    return Passes(precision="bfloat16")


def batch_of(keys=False):
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, SAMPLES, WIDTH, generator=drawn)
    y = torch.randint(CLASSES, (CLIENTS, SAMPLES), generator=drawn)
    share, rows = torch.full((CLIENTS, SAMPLES), 1 / SAMPLES), torch.arange(CLIENTS * SAMPLES).view(CLIENTS, SAMPLES)
    return Batch(x, y, share, torch.full((CLIENTS,), float(SAMPLES)), rows, torch.arange(CLIENTS) if keys else None)


def backend_with(*passes, net=None, **settings):
    population = Population(with_seed(Blocks).float() if net is None else net, **{"k": 2, **settings})
    return make_backend(population, batch_of().x[0], batch_of().y[0], CLASSES, *passes)


def gradients(backend, keys):
    """Of one network per client, of K models and of memberships, with their losses; and predictions."""
    population, batch = backend.population, batch_of(keys)
    networks = {name: torch.stack([p, 0.5 * p, 2 * p]) for name, p in population.initial_network().items()}
    velocity = {name: torch.empty_like(leaf) for name, leaf in networks.items()}
    models, c = population.initial_models(1, distinct=True), torch.tensor([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1]])
    with torch.no_grad():
        losses = backend.add_gradients(networks, velocity, 0.0, batch)
        of_models, model_losses = backend.model_gradients(models, c, batch)
        slopes, membership_losses = backend.membership_gradients(models, c, batch)
        evaluated = backend.evaluate(Mixture(models, c), batch.x, batch.y)
    return [*velocity.values(), losses, *of_models.values(), model_losses, slopes, membership_losses, *evaluated]


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("canonical", ["all", "first"])
def test_gradients_are_the_same_if_checkpointed_and_near_to_rounding_in_bfloat16(mix, canonical, bfloat16):
    ways = Passes(), CHECKPOINTED, bfloat16, bfloat16._replace(checkpoint_activations=True)
    backends = [backend_with(way, mix=mix, canonical=canonical) for way in ways]
    for keys in (False, True):  # without dropout, and with it
        usual, checkpointed, low, both = (gradients(backend, keys) for backend in backends)
        torch.testing.assert_close(checkpointed, usual, rtol=1e-5, atol=1e-7)
        assert {leaf.dtype for leaf in low} == {torch.float32}
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(low + both, usual + low, strict=True)]
        assert errors[0] > 0 and max(errors) < 40 * 2**-9  # one rounding; about ten layers, there and back


def test_less_is_kept_between_the_passes():
    kept = []
    for backend in (backend_with(), backend_with(CHECKPOINTED)):
        places = {}  # what is saved twice is kept once
        x, at = batch_of().x[0].repeat(1000, 1), backend.population.initial_network()

        def count(tensor, places=places):
            places[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = backend.run({name: leaf.requires_grad_() for name, leaf in at.items()}, x)
        weights = {leaf.data_ptr() for leaf in at.values()}
        kept.append(sum(size for place, size in places.items() if place not in weights))
        output.sum().backward()
    inputs = 3 * x.numel() * x.element_size()  # three checkpointed blocks keep theirs
    assert kept[1] + inputs < kept[0] / 2


@pytest.mark.parametrize("engine", [Loop, Stacked])
def test_passes_that_cannot_be_are_refused(engine, monkeypatch):
    def fit_digits(dtype):
        federation = digits_federation().to(dtype=dtype)
        fit(Population(nn.Linear(64, 10).to(dtype), k=1), federation, rounds=1, engine=engine(precision="bfloat16"))

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False}, raising=False)
    assert_refused(lambda: fit_digits(torch.float32), SettingError, "processor", "'float32'")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert_refused(lambda: fit_digits(torch.float64), ModelError, "torch.float64")
    flat = nn.Sequential(nn.Linear(WIDTH, CLASSES))
    assert_refused(lambda: backend_with(CHECKPOINTED, net=flat), SettingError, "no blocks")
    assert type(backend_with(engine().passes, net=flat)) is Chained  # by default the fastest
