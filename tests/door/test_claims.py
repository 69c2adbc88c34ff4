"""Small versions of the experiments in results/: the same claims at a size that is fast enough for a test."""

import pytest
import torch
from torch import nn

from kit.networks import with_seed
from ppfl import PPFL, Federation, Population, Watch, fit
from ppfl.core import simplex
from ppfl.data import digits_federation, synthetic_classification

EVALUATE_AT_THE_END = Watch(every=10_000)


def perceptron(inputs: int, seed: int) -> nn.Module:
    return with_seed(lambda: nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 10)), seed, torch.float32)


def assert_in_true_groups(memberships, truth):
    matched = memberships[:, simplex.match(truth, memberships)]
    assert torch.equal(matched.argmax(1), truth.argmax(1))


@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_all_clients_with_grouped_digits_find_their_group(mix):
    federation = digits_federation()
    for seed in range(3):
        population = Population(perceptron(64, seed), k=4, mix=mix)
        fitted = fit(population, federation, PPFL(lr=0.1, batch_size=16), rounds=15, seed=seed)
        assert_in_true_groups(fitted.memberships, federation.truth.memberships)


def oracle_memberships(federation: Federation) -> torch.Tensor:
    """Maximum likelihood memberships for known sources, a limit for methods that must learn the sources."""
    truth, rows = federation.truth, []
    for client in federation.ids:
        own = federation.client(client)["train"]
        side = (2 * own.y - 1)[:, None] * (own.x @ truth.sources.T) / truth.noise
        likelihood = torch.distributions.Normal(0, 1).cdf(side).clamp_min(1e-12)  # (n, K)
        c = simplex.uniform(1, likelihood.shape[1])[0]
        for _ in range(500):
            slope = -(likelihood / (likelihood @ c)[:, None]).mean(0)
            c = simplex.raise_to_floor(simplex.mirror_step(c, slope, 0.5))
        rows.append(c)
    return torch.stack(rows)


def test_mixtures_are_recovered_almost_as_well_as_with_known_sources():
    federation = synthetic_classification(n_clients=100, dim=20, test_points=20, seed=0)
    truth, net = federation.truth.memberships, nn.Linear(20, 1)
    nn.init.zeros_(net.weight)
    population = Population(net, k=3, mix="predictions", loss="logistic")
    fitted = fit(population, federation, rounds=60, watch=EVALUATE_AT_THE_END)
    found = fitted.memberships[:, simplex.match(truth, fitted.memberships)]
    ours = float(simplex.total_variation(found, truth).mean())
    known = float(simplex.total_variation(oracle_memberships(federation), truth).mean())
    assert ours < known + 0.02
