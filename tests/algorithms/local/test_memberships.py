"""Gradients for memberships are those of a client's mean loss, by whichever short cut they are found."""

import functools

import pytest
import torch

from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.algorithms.local.memberships import MembershipSteps
from ppfl.core.backends import Autograd, Batch, make_backend
from ppfl.core.draws import name_keys
from ppfl.core.population import Population
from ppfl.core.workspace import Workspace
from support import make_federation, make_net

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


@pytest.mark.parametrize("block", [2048, 3], ids=["one-block", "several-blocks"])
@pytest.mark.parametrize("make", [Autograd, make_backend])
@pytest.mark.parametrize(
    ("mix", "canonical"), [("outputs", "all"), ("outputs", "0"), ("predictions", "2"), ("weights", "all")]
)
def test_full_gradients_are_those_of_all_data_of_clients_of_any_size(mix, canonical, make, block, monkeypatch) -> None:
    monkeypatch.setattr(LocalData, "everything", functools.partialmethod(LocalData.everything, block=block))
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
