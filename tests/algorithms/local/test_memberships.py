"""Gradients for memberships are those of a client's mean loss, by whichever short cut they are found."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.problems import make_federation, make_net
from ppfl.algorithms.local import memberships
from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.algorithms.local.memberships import MembershipSteps
from ppfl.algorithms.local.model_losses import losses_of_models
from ppfl.algorithms.local.start import gradient_sketch
from ppfl.algorithms.local.stationarity import Stationarity, stationarity_upload
from ppfl.core.backends import Autograd, Batch, autograd, make_backend
from ppfl.core.draws import name_keys
from ppfl.core.population import Population
from ppfl.core.workspace import Workspace
from ppfl.data import Federation

FEDERATION = make_federation((20, 12, 7, 5, 1), dtype=torch.float64)
NET = make_net(dtype=torch.float64)


def local_data() -> LocalData:
    at = torch.arange(5)
    weights = FEDERATION.weights.double()
    return LocalData(FEDERATION.train, weights, name_keys(FEDERATION.ids), at, Draws(0, 0), Workspace())


def slope_and_loss(backend, models, c, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one client's mean loss over these samples, by the backend's plain gradient."""
    n = len(samples.y)
    even = torch.full((1, n), 1 / n, dtype=torch.float64)
    batch = Batch(samples.x[None], samples.y[None], even, torch.tensor([n]), torch.arange(n)[None], None)
    slopes, losses = backend.membership_gradients(models, c[None], batch)
    return slopes[0], losses[0]


# bytes of a block of outputs, and of all outputs that are kept
BUDGETS = {"one-block": (2**30, 2**30), "all-kept": (600, 2**30), "some-kept": (600, 1500), "none-kept": (600, 0)}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("make", [Autograd, make_backend])
@pytest.mark.parametrize(
    ("mix", "canonical"), [("outputs", "all"), ("outputs", "0"), ("predictions", "2"), ("weights", "all")]
)
def test_full_gradients_are_those_of_all_data_of_clients_of_any_size(mix, canonical, make, budget, monkeypatch) -> None:
    monkeypatch.setattr(autograd, "BLOCK_OUTPUTS", BUDGETS[budget][0])
    monkeypatch.setattr(memberships, "KEPT_OUTPUTS", BUDGETS[budget][1])
    population = Population(NET, k=3, mix=mix, canonical=canonical)
    backend = make(population, FEDERATION.train.x[:2], FEDERATION.train.y, 3)
    models = population.initial_models(1, distinct=True)
    c = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    c = c / c.sum(1, keepdim=True)
    gradients = list(MembershipSteps(backend, models, local_data(), batch_size=None).steps(2))
    for gradient in gradients:
        slopes, losses = gradient(c)
        for i in range(5):
            expected = slope_and_loss(backend, models, c[i], FEDERATION.train.client(i))
            torch.testing.assert_close((slopes[i], losses[i]), expected)
        c = c.flip(0)  # the same outputs serve other memberships


def test_gradients_on_batches_are_those_of_other_batches_than_the_models_see() -> None:
    population = Population(NET, k=3, mix="predictions")
    backend = make_backend(population, FEDERATION.train.x[:2], FEDERATION.train.y, 3)
    models, c = population.initial_models(1, distinct=True), torch.full((5, 3), 1 / 3, dtype=torch.float64)
    batches = [batch.rows.clone() for batch in local_data().steps(4, steps=2, purpose="memberships")]
    found = [g(c) for g in MembershipSteps(backend, models, local_data(), batch_size=4).steps(2)]
    for rows, (slopes, losses) in zip(batches, found, strict=True):
        own = FEDERATION.train.where(torch.isin(torch.arange(45), rows[0]))
        torch.testing.assert_close((slopes[0], losses[0]), slope_and_loss(backend, models, c[0], own))
    of_models = next(iter(local_data().steps(4, steps=2))).rows[0]
    assert sorted(of_models.tolist()) != sorted(batches[0][0].tolist())


# ---------------------------------------------------------------------- clients with many outputs

K, WORDS, SAMPLES = 3, 200, 300
SMALL_BLOCK, SMALL_KEPT = 2**16, 2**20  # bytes; a client's outputs of K models are 1.4 MB


class LargestTensor(TorchDispatchMode):
    """Watches what operations give."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return result


def next_words(*shape: int) -> Federation:
    """Two clients; a target has that many words, or is one."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(2 * SAMPLES, *shape, 4, generator=drawn, dtype=torch.float64)
    y = torch.randint(WORDS, (2 * SAMPLES, *shape), generator=drawn)
    if shape:
        y[:, -1] = torch.where(x[:, 0, 0] > 0, y[:, -1], -100)
    clients = ["a"] * SAMPLES + ["b"] * SAMPLES
    return Federation.from_arrays(x, y, clients, test_fraction=0).to(dtype=torch.float64)


def of_two_clients(mix: str, *shape: int, net: nn.Module | None = None):
    """A backend, models, memberships, and the data of the two clients."""
    torch.manual_seed(0)
    federation, population = next_words(*shape), Population(net or nn.Linear(4, WORDS).double(), k=K, mix=mix)
    backend = make_backend(population, federation.train.x[:2], federation.train.y[:2], WORDS)
    weights, names = federation.weights.double(), name_keys(federation.ids)
    data = LocalData(federation.train, weights, names, torch.arange(2), Draws(0, 0), Workspace())
    c = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], dtype=torch.float64)
    return backend, population.initial_models(1, distinct=True), c, data


def full_steps(backend, models, c, data) -> None:
    for gradient in MembershipSteps(backend, models, data, batch_size=None).steps(2):
        gradient(c)


PASSES: dict[str, Callable[..., object]] = {
    "steps": full_steps,
    "best": lambda backend, models, c, data: MembershipSteps(backend, models, data, None).best(c, 2),
    "losses of models": lambda backend, models, c, data: list(losses_of_models(backend, models, data)),
    "sketch": lambda backend, models, c, data: gradient_sketch(backend, models, data, 0),
    "stationarity": lambda backend, models, c, data: stationarity_upload(
        backend, Stationarity(0.1), models, {}, c, data, 0.0
    ),
}


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("name", PASSES)
def test_passes_over_all_data_never_hold_more_outputs_than_a_block_has(name: str, mix: str, monkeypatch) -> None:
    monkeypatch.setattr(autograd, "BLOCK_OUTPUTS", SMALL_BLOCK)
    monkeypatch.setattr(memberships, "KEPT_OUTPUTS", 0)
    setting = of_two_clients(mix)
    with torch.no_grad(), LargestTensor() as seen:
        PASSES[name](*setting)
    assert SMALL_BLOCK // 4 < seen.bytes <= SMALL_BLOCK


def test_no_more_outputs_are_kept_than_the_budget_allows(monkeypatch) -> None:
    monkeypatch.setattr(autograd, "BLOCK_OUTPUTS", SMALL_BLOCK)
    monkeypatch.setattr(memberships, "KEPT_OUTPUTS", SMALL_KEPT)
    backend, models, c, data = of_two_clients("outputs")
    made: list[int] = []

    def outputs(models, x):
        found = type(backend).outputs(backend, models, x)
        made.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(backend, "outputs", outputs)
    everything = 2 * SAMPLES * K * WORDS * 8
    first, second = MembershipSteps(backend, models, data, None).steps(2)
    kept = sum(made)
    assert SMALL_KEPT - SMALL_BLOCK <= kept <= SMALL_KEPT
    for gradient in (first, second):
        made.clear()
        gradient(c)
        assert sum(made) == everything - kept  # the rest runs again


@pytest.mark.parametrize("shape", [(), (3,)], ids=["one word", "several words"])
def test_mixed_predictions_of_labels_keep_likelihoods_alone(shape: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(memberships, "KEPT_OUTPUTS", 0)
    backend, models, c, data = of_two_clients("predictions", *shape)
    gradient, _ = MembershipSteps(backend, models, data, None).steps(2)
    monkeypatch.setattr(backend, "outputs", None)  # what was kept is enough
    slopes, losses = gradient(c)
    for i in range(2):
        expected = slope_and_loss(backend, models, c[i], data.samples.client(i))
        torch.testing.assert_close((slopes[i], losses[i]), expected)
