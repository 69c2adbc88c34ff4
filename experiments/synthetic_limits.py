"""The best possible results on Synthetic: the Bayes rule, and maximum likelihood memberships with known sources.

python experiments/synthetic_limits.py [data seed ...]
"""

import sys

import torch

from ppfl.core.simplex import mirror_step, raise_to_floor, total_variation, uniform
from ppfl.data import Federation, Samples, synthetic_classification
from ppfl.errors import DataError

NORMAL = torch.distributions.Normal(0, 1)


def bayes_accuracy(federation: Federation) -> float:
    """Pooled test accuracy of the Bayes rule, P(y = 1 | x) = sum_k alpha_ik Phi(x . theta_k / noise).

    It knows the sources and the proportions of each client, so no method can be better except by chance.

    >>> bayes_accuracy(synthetic_classification(n_clients=3, dim=5, sources=1, noise=0, test_points=50))
    1.0
    """
    truth, test = federation.truth, federation.split("test")
    if truth is None or truth.sources is None or truth.noise is None or federation.n_classes != 2:
        raise DataError(f"{federation.name} has no true sources and noise; use synthetic_classification()")
    score = test.x @ truth.sources.T
    each = torch.special.ndtr(score / truth.noise) if truth.noise else (score > 0).float()
    positive = (truth.memberships[test.client_of()] * each).sum(1)
    return float(((positive > 0.5).long() == test.y).double().mean())


def source_probabilities(federation: Federation, samples: Samples) -> torch.Tensor:
    """(n, K): P(y = 1 | x) under each true source."""
    truth = federation.truth
    assert truth is not None
    assert truth.sources is not None
    assert truth.noise is not None
    return NORMAL.cdf(samples.x @ truth.sources.T / truth.noise)


def maximum_likelihood_memberships(federation: Federation) -> torch.Tensor:
    """(M, K): each client's maximum likelihood membership, with known sources."""
    ones = source_probabilities(federation, federation.train)
    likelihood = torch.where(federation.train.y[:, None] == 1, ones, 1 - ones).clamp_min(1e-12)
    rows = []
    for first, last in zip(federation.train.offsets[:-1], federation.train.offsets[1:], strict=True):
        own, c = likelihood[first:last], uniform(1, likelihood.shape[1])[0]
        for _ in range(1000):
            c = raise_to_floor(mirror_step(c, -(own / (own @ c)[:, None]).mean(0), 0.5))
        rows.append(c)
    return torch.stack(rows)


def main(seeds: list[int]) -> None:
    for seed in seeds:
        federation = synthetic_classification(seed=seed)
        assert federation.test is not None
        assert federation.truth is not None
        c = maximum_likelihood_memberships(federation)
        mixed = (source_probabilities(federation, federation.test) * c[federation.test.client_of()]).sum(1)
        accuracy = float(((mixed > 0.5) == (federation.test.y == 1)).double().mean())
        error = float(total_variation(c, federation.truth.memberships).mean())
        print(
            f"data seed {seed}: Bayes {bayes_accuracy(federation):.2%}, "
            f"known sources {accuracy:.2%}, membership error {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0])
