"""Passes in bfloat16 and with checkpointed activations against those of the network as it is."""

import pytest
import torch
from torch import Tensor, nn

from ppfl import PPFL, Population, Watch, fit
from ppfl.core.backends import Autograd, Batch, Chained, Passes, make_backend, passes
from ppfl.core.backends.passes import CheckpointedBlock, blocks_of
from ppfl.core.errors import ModelError, SettingError
from ppfl.data import digits_federation
from ppfl.sites import Loop, Stacked

CLIENTS, SAMPLES, WIDTH, CLASSES, K = 3, 8, 12, 4, 2
ROUNDING = 2**-9  # of one number in bfloat16
MIXES = [("outputs", "all"), ("outputs", "first"), ("predictions", "head"), ("weights", "all")]


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
        x = self.first(x)
        for block in self.rest:
            x = block(x)
        return self.head(x)


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
    torch.manual_seed(0)
    population, batch = Population(Blocks(), k=K, mix=mix, canonical=canonical), batch_of()
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


# ---------------------------------------------------------------------- bfloat16


@pytest.mark.parametrize(("mix", "canonical"), MIXES)
def test_gradients_in_bfloat16_are_those_of_float32_to_its_rounding(mix, canonical, bfloat16) -> None:
    plain, low = (gradients(backend, batch_of()) for backend in backends(bfloat16, mix, canonical))
    for name, expected in plain.items():
        assert low[name].dtype == torch.float32
        error = (low[name] - expected).norm() / expected.norm()
        assert error < 40 * ROUNDING, name  # a number goes through about ten layers, there and back
    assert any(not low[name].equal(expected) for name, expected in plain.items())


def test_training_in_bfloat16_learns_as_well_and_keeps_parameters_in_float32(bfloat16) -> None:
    federation, method = digits_federation(), PPFL(lr=0.1, batch_size=16)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    usual, low = (
        fit(Population(net, k=4), federation, method, rounds=5, engine=engine, watch=Watch(every=1))
        for engine in (Stacked(), Stacked(precision="bfloat16"))
    )
    assert low.history[-1]["loss"] < low.history[0]["loss"]
    assert low.history[-1]["accuracy"] == pytest.approx(usual.history[-1]["accuracy"], abs=0.05)
    assert low.history[-1]["loss"] != usual.history[-1]["loss"]
    personal = low.models(federation.ids)
    assert {leaf.dtype for leaf in (*personal.models.values(), personal.memberships)} == {torch.float32}


def test_the_default_is_the_network_as_it_is_and_the_fastest_backend() -> None:
    net, batch = nn.Sequential(nn.Linear(WIDTH, CLASSES)), batch_of()
    like = Population(net, k=1), batch.x[0], batch.y[0], CLASSES
    assert type(make_backend(*like)) is type(make_backend(*like, Stacked().passes)) is Chained
    backend = Autograd(*like, Loop().passes)
    assert backend.run({}, batch.x[0]).equal(net(batch.x[0]))


@pytest.mark.parametrize("engine", [Loop, Stacked])
def test_bfloat16_is_refused_where_it_cannot_be_computed(engine, monkeypatch) -> None:
    with pytest.raises(SettingError, match=r"precision is 'half'; it must be one of 'float32', 'bfloat16'"):
        engine(precision="half")
    federation, population = digits_federation(), Population(nn.Linear(64, 10), k=1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False}, raising=False)
    with pytest.raises(SettingError, match=r"this processor has no instructions for it .* use precision = 'float32'"):
        fit(population, federation, rounds=1, engine=engine(precision="bfloat16"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    doubles = Population(nn.Linear(64, 10).double(), k=1)
    with pytest.raises(ModelError, match=r"for networks of float32 .* are torch.float64"):
        fit(doubles, federation.to(dtype=torch.float64), rounds=1, engine=engine(precision="bfloat16"))


# ---------------------------------------------------------------------- checkpointed activations


def test_blocks_are_the_parts_at_the_top_that_have_layers_of_their_own() -> None:
    assert blocks_of(Blocks()) == ["first", "rest.0", "rest.1"]


@pytest.mark.parametrize("keys", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(("mix", "canonical"), MIXES)
def test_gradients_are_the_same_with_checkpointed_activations(mix, canonical, keys) -> None:
    pair = backends(Passes(checkpoint_activations=True), mix, canonical)
    plain, checkpointed = (gradients(backend, batch_of(keys)) for backend in pair)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-7)


def test_both_settings_together_give_what_bfloat16_gives(bfloat16) -> None:
    _, low = backends(bfloat16)
    _, both = backends(bfloat16._replace(checkpoint_activations=True))
    expected = gradients(low, batch_of(keys=True))
    for name, found in gradients(both, batch_of(keys=True)).items():
        assert (found - expected[name]).norm() < 40 * ROUNDING * expected[name].norm(), name


def test_less_is_kept_between_the_passes(monkeypatch) -> None:
    inputs: list[int] = []
    forward = CheckpointedBlock.forward

    def watched(block, x: Tensor) -> Tensor:
        inputs.append(x.numel() * x.element_size())
        return forward(block, x)

    monkeypatch.setattr(CheckpointedBlock, "forward", watched)
    kept = []
    for backend in backends(Passes(checkpoint_activations=True)):
        saved: dict[int, int] = {}  # by place in memory: what is saved twice is kept once

        def count(tensor: Tensor, saved=saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        batch, network = batch_of(), backend.population.initial_network()
        inputs.clear()
        at = {name: leaf.requires_grad_() for name, leaf in network.items()}
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = backend.run(at, batch.x[0].repeat(1000, 1))
        weights = {leaf.data_ptr() for leaf in at.values()}
        activations = sum(size for place, size in saved.items() if place not in weights)
        kept.append(activations + sum(inputs))
        output.sum().backward()
    assert kept[1] < kept[0] / 2


def test_a_network_without_blocks_is_refused() -> None:
    batch = batch_of()
    flat = Population(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)), k=1)
    with pytest.raises(SettingError, match="the network has no blocks to run again; group its layers"):
        make_backend(flat, batch.x[0], batch.y[0], CLASSES, Passes(checkpoint_activations=True))
