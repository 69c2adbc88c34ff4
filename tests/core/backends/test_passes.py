"""Passes in bfloat16 and with checkpointed activations against those of the network as it is."""

import pytest
import torch
from torch import Tensor, nn

from kit.networks import with_seed
from kit.refusals import ModelError, SettingError, assert_refused
from ppfl import PPFL, Population, Watch, fit
from ppfl.core.backends import Autograd, Batch, Chained, Passes, make_backend, passes
from ppfl.data import digits_federation
from ppfl.sites import Loop, Stacked

CLIENTS, SAMPLES, WIDTH, CLASSES = 3, 8, 12, 4
ROUNDING = 2**-9  # of one number in bfloat16
MIXES = [("outputs", "all"), ("outputs", "first"), ("predictions", "head"), ("weights", "all")]
CHECKPOINTED = Passes(checkpoint_activations=True)


class Twice(nn.Module):
    """Its dropout layer draws two masks in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.two(self.dropout(self.one(x).tanh())).tanh())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Twice(), nn.ModuleList([Twice(), nn.Sequential(Twice(), nn.LayerNorm(WIDTH))])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest[1](self.rest[0](self.first(x))))


@pytest.fixture
def bfloat16(monkeypatch) -> Passes:
    """As on a processor that has it."""
    monkeypatch.setattr(passes, "_computes_bfloat16", lambda device: True)
    return Passes(precision="bfloat16")


def batch_of(keys: bool = False) -> Batch:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, SAMPLES, WIDTH, generator=drawn)
    y = torch.randint(CLASSES, (CLIENTS, SAMPLES), generator=drawn)
    share, rows = torch.full((CLIENTS, SAMPLES), 1 / SAMPLES), torch.arange(CLIENTS * SAMPLES).view(CLIENTS, SAMPLES)
    return Batch(x, y, share, torch.full((CLIENTS,), float(SAMPLES)), rows, torch.arange(CLIENTS) if keys else None)


def backends(other: Passes, mix: str = "outputs", canonical: str = "all") -> tuple[Autograd, Autograd]:
    """As usual, and with other passes."""
    population, batch = Population(with_seed(Blocks).float(), k=2, mix=mix, canonical=canonical), batch_of()
    like = population, batch.x[0], batch.y[0], CLASSES
    return make_backend(*like), make_backend(*like, other)


def gradients(backend: Autograd, batch: Batch) -> dict[str, Tensor]:
    """Of one network per client, of K models and of memberships."""
    population = backend.population
    networks = {name: torch.stack([p, 0.5 * p, 2 * p]) for name, p in population.initial_network().items()}
    velocity = {name: torch.empty_like(leaf) for name, leaf in networks.items()}
    models, c = population.initial_models(1, distinct=True), torch.tensor([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1]])
    with torch.no_grad():
        losses = backend.add_gradients(networks, velocity, 0.0, batch)
        of_models, model_losses = backend.model_gradients(models, c, batch)
        slopes, membership_losses = backend.membership_gradients(models, c, batch)
    named = {f"models.{name}": leaf for name, leaf in of_models.items()}
    values = {"losses": losses, "model losses": model_losses, "slopes": slopes, "in c": membership_losses}
    return velocity | named | values


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[float]:
    return [float((found[name] - value).norm() / value.norm()) for name, value in expected.items()]


@pytest.mark.parametrize(("mix", "canonical"), MIXES)
def test_gradients_in_bfloat16_are_those_of_float32_to_its_rounding(mix, canonical, bfloat16) -> None:
    usual, lower = backends(bfloat16, mix, canonical)
    plain, low = gradients(usual, batch_of()), gradients(lower, batch_of())
    assert {leaf.dtype for leaf in low.values()} == {torch.float32}
    assert 0 < max(errors(low, plain)) < 40 * ROUNDING  # a number goes through about ten layers, there and back
    _, both = backends(bfloat16._replace(checkpoint_activations=True), mix, canonical)
    assert max(errors(gradients(both, batch_of(True)), gradients(lower, batch_of(True)))) < 40 * ROUNDING


@pytest.mark.parametrize("keys", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(("mix", "canonical"), MIXES)
def test_gradients_are_the_same_with_checkpointed_activations(mix, canonical, keys) -> None:
    plain, checkpointed = (gradients(backend, batch_of(keys)) for backend in backends(CHECKPOINTED, mix, canonical))
    torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-7)


def test_training_in_bfloat16_learns_as_well_and_keeps_parameters_in_float32(bfloat16) -> None:
    federation, method = digits_federation(), PPFL(lr=0.1, batch_size=16)
    net = with_seed(lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), dtype=torch.float32)
    usual, low = (
        fit(Population(net, k=4), federation, method, rounds=5, engine=engine, watch=Watch(every=1))
        for engine in (Stacked(), Stacked(precision="bfloat16"))
    )
    assert low.history[-1]["loss"] < low.history[0]["loss"]
    assert low.history[-1]["accuracy"] == pytest.approx(usual.history[-1]["accuracy"], abs=0.05)
    assert low.history[-1]["loss"] != usual.history[-1]["loss"]
    personal = low.models(federation.ids)
    assert {leaf.dtype for leaf in (*personal.models.values(), personal.memberships)} == {torch.float32}


def test_less_is_kept_between_the_passes() -> None:
    kept = []
    for backend in backends(CHECKPOINTED):
        places: dict[int, int] = {}  # what is saved twice is kept once

        def count(tensor: Tensor, places=places) -> Tensor:
            places[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        x, at = batch_of().x[0].repeat(1000, 1), backend.population.initial_network()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = backend.run({name: leaf.requires_grad_() for name, leaf in at.items()}, x)
        weights = {leaf.data_ptr() for leaf in at.values()}
        activations = sum(size for place, size in places.items() if place not in weights)
        inputs = 3 * x.numel() * x.element_size() if kept else 0  # three checkpointed blocks keep theirs
        kept.append(activations + inputs)
        output.sum().backward()
    assert kept[1] < kept[0] / 2


def fit_digits(engine, dtype: torch.dtype = torch.float32) -> None:
    federation = digits_federation().to(dtype=dtype)
    fit(Population(nn.Linear(64, 10).to(dtype), k=1), federation, rounds=1, engine=engine(precision="bfloat16"))


@pytest.mark.parametrize("engine", [Loop, Stacked])
def test_passes_that_cannot_be_are_refused(engine, monkeypatch) -> None:
    assert_refused(lambda: engine(precision="half"), SettingError, "'half'", "'bfloat16'")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False}, raising=False)
    assert_refused(lambda: fit_digits(engine), SettingError, "processor", "'float32'")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert_refused(lambda: fit_digits(engine, torch.float64), ModelError, "torch.float64")
    batch, flat = batch_of(), Population(nn.Sequential(nn.Linear(WIDTH, CLASSES)), k=1)
    like = flat, batch.x[0], batch.y[0], CLASSES
    assert_refused(lambda: make_backend(*like, CHECKPOINTED), SettingError, "no blocks")
    assert type(make_backend(*like, engine().passes)) is Chained  # by default the fastest
