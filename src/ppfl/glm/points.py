"""Points of normal scores for each client, drawn where its membership and residual effect are likely to be.

The marginal likelihood is an integral over the scores of a client: K - 1 for its membership by `stick_breaking`, and
those of its residual effect where there is no closed form. A client with many rows determines some scores to a
hundredth and others not at all, which no fixed grid can follow. So each client has its own normal distribution, fitted
to its scores given the data, and the integral is a weighted sum over points drawn from it (importance sampling). One
point in nine is drawn from the population instead, so that no weight can be large where the fit is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .point_sets import grid_points, grid_shifts, normal_points
from .stick_breaking import StickBreaking

_SHARE_OF_PRIOR = 8  # points of the fitted distributions for each point of the population
_LOG_SHARES = (math.log(0.999), math.log(0.001))  # of the two densities behind a regular grid
_FEWEST = 5  # points on one side of the population's grid
_FINE = 100  # points of a grid in two dimensions
_FARTHEST, _NARROWEST, _WIDER = 4.0, 0.1, 0.15  # squared distances and variances, for proposals of variance 1
_FINAL_SEED = 20  # of the points that are kept; those that fit the proposals are others
_ENOUGH, _USABLE = 0.2, 0.1  # the share of points that count: effective number of points / number of points
_MAX_STEPS = 12
_POWERS = 0.6 ** torch.arange(1, 29, dtype=torch.float64)  # to which weights are raised
_INFLATION = 1.3
_TO_ADAPT = {1: 32, 2: 64, 3: 64}  # points to fit the proposals, by dimension
_ADAPTING_SEED = 10
_MANY_CLIENTS = 2000


def points_each(dimensions: int, clients: int) -> int:
    """The number of points per client; with few clients the error of each counts more, and points are cheap."""
    if dimensions <= 1:
        return 48 if clients > _MANY_CLIENTS else 128
    return 128 if clients > _MANY_CLIENTS or (dimensions == 2 and clients > 200) else 256 if clients > 50 else 512


class Draw(NamedTuple):
    """Points of M clients."""

    scores: Tensor  # (M, d, G)
    log_weight: Tensor  # (M, G): log of the population's density, divided by that of the points, divided by G


class Proposals(NamedTuple):
    """One normal distribution of scores per client."""

    mean: Tensor  # (M, d)
    factor: Tensor  # (M, d, d), lower triangular; the covariance is factor factor'

    @classmethod
    def prior(cls, clients: int, dimensions: int) -> Self:
        """The population's distribution for every client."""
        eye = torch.eye(dimensions, dtype=torch.float64)
        return cls(eye.new_zeros(clients, dimensions), eye.expand(clients, -1, -1).clone())

    def draw(self, count: int, position: Tensor, seed: int) -> Draw:
        """About 9/8 of `count` points per client; the positions (M,) of the clients choose their sets of points."""
        d = self.mean.shape[1]
        own = torch.baddbmm(self.mean[..., None], self.factor, normal_points(d, count, seed)[position])
        few = max(1, count // _SHARE_OF_PRIOR)
        scores = torch.cat([own, normal_points(d, few, seed + 1)[position]], 2)
        total = count + few
        prior = -0.5 * scores.square().sum(1)
        density = torch.logaddexp(
            self._log_density(scores) + math.log(count / total), prior + math.log(few / total)
        )  # fmt: skip
        return Draw(scores, prior - density - math.log(total))

    def final_draw(self, count: int, position: Tensor, turn: int = 0) -> Draw:
        """The points to keep: a regular grid if it can be fine enough, the most accurate rule for smooth integrands.

        Points of another turn are independent of these.
        """
        d = self.mean.shape[1]
        if d == 0:
            return Draw(self.mean.new_zeros(len(self.mean), 0, 1), self.mean.new_zeros(len(self.mean), 1))
        if d == 1 or (d == 2 and count >= _FINE):
            return self.regular_grid(count, position)
        return self.draw(count, position, _FINAL_SEED + 2 * turn)

    def regular_grid(self, count: int, position: Tensor) -> Draw:
        """About `count` points of a grid of the normal distribution, and fewer of the population's grid.

        Each grid takes the part of the integral that its density has in the sum of both. Every client's grids are
        shifted by their own part of a cell, because with the same grid for all clients errors would not cancel.
        """
        d = self.mean.shape[1]
        side = round(count ** (1 / d))
        own, prior = grid_points(d, side), grid_points(d, max(_FEWEST, side // 2))
        shift = grid_shifts(d, position)  # (M, 2 d, 1)
        own_scores = torch.baddbmm(self.mean[..., None], self.factor, own.points + own.cell * shift[:, :d])
        scores = torch.cat([own_scores, prior.points + prior.cell * shift[:, d:]], 2)
        log_prior = -0.5 * scores.square().sum(1)
        parts = torch.stack([self._log_density(scores) + _LOG_SHARES[0], log_prior + _LOG_SHARES[1]])
        log_parts = torch.log_softmax(parts, 0)
        n = own.points.shape[1]
        log_size = self._log_size() + own.log_weight
        log_part = torch.cat([log_parts[0, :, :n] + log_size, log_parts[1, :, n:] + prior.log_weight], 1)
        return Draw(scores, log_prior.add_(log_part))

    def _log_density(self, scores: Tensor) -> Tensor:
        """Without the constant of the normal density, (M, G)."""
        standard = torch.linalg.solve_triangular(self.factor, scores - self.mean[..., None], upper=False)
        found: Tensor = -0.5 * standard.square().sum(1) - self._log_size()
        return found

    def _log_size(self) -> Tensor:
        return self.factor.diagonal(dim1=1, dim2=2).log().sum(1)[:, None]

    def where(self, keep: Tensor, other: Proposals) -> Proposals:
        """These for clients to keep (M,), and the others for the rest."""
        return Proposals(
            torch.where(keep[:, None], self.mean, other.mean),
            torch.where(keep[:, None, None], self.factor, other.factor),
        )

    def width(self, dimensions: int) -> Tensor:
        """The geometric mean (M,) of the standard deviations of the first scores; the population has 1."""
        return self.factor.diagonal(dim1=1, dim2=2)[:, :dimensions].log().mean(1).exp()

    def subset(self, clients: slice | Tensor) -> Proposals:
        return Proposals(self.mean[clients], self.factor[clients])

    def concat(self, other: Proposals) -> Proposals:
        return Proposals(torch.cat([self.mean, other.mean]), torch.cat([self.factor, other.factor]))


class ScoreMoments(NamedTuple):
    """Means and covariances of each client's scores."""

    mean: Tensor  # (M, d)
    covariance: Tensor  # (M, d, d)

    @classmethod
    def of(cls, scores: Tensor, weights: Tensor) -> Self:
        """Of points (M, d, G) with weights (M, G) that sum to 1."""
        mean = torch.bmm(scores, weights[..., None])
        centred = scores - mean
        return cls(mean[..., 0], torch.bmm(centred * weights[:, None], centred.mT))

    def proposals(self) -> Proposals:
        """A wider distribution wastes few points."""
        return Proposals(self.mean, _factor(_INFLATION * self.covariance))

    def follow(self, proposals: Proposals) -> Proposals:
        """Proposals half way to these moments, because the whole way may lead back and forth.

        Moments that are far away, or much more narrow, come from few points. These clients go the whole way, but the
        next points are spread more widely.
        """
        mean, factor = proposals
        both = torch.cat([(self.mean - mean)[..., None], _factor(self.covariance)], 2)
        relative = torch.linalg.solve_triangular(factor, both, upper=False)
        shift, width = relative[..., 0].square().sum(1), relative[..., 1:].square().sum(2).amin(1)
        fits = ((shift < _FARTHEST) & (width > _NARROWEST)).to(mean.dtype)[:, None]
        share = 0.5 * fits  # of the proposals
        before, after = torch.bmm(factor, factor.mT), _INFLATION * self.covariance
        covariance = share[..., None] * before + (1 - share[..., None]) * after
        covariance += (1 - fits[..., None]) * _WIDER * before
        return Proposals((1 - share) * self.mean + share * mean, _factor(covariance))


@dataclass(frozen=True)
class LatentPoints:
    """Points of some clients with their shares; sums over them with the weights are integrals over the population."""

    scores: Tensor  # (M, K - 1 + s, G)
    logs: Tensor  # (M, K, G), log memberships
    log_weight: Tensor  # (M, G), at `alpha`
    alpha: Tensor  # (K,), for which the points were drawn; (0,) with one canonical model

    @classmethod
    def of(cls, draw: Draw, breaking: StickBreaking) -> Self:
        logs = breaking.log_memberships(draw.scores[:, : breaking.k - 1])
        return cls(draw.scores, logs, draw.log_weight, breaking.alpha)

    @cached_property
    def shares(self) -> Tensor:
        """Memberships and residual scores, (M, K + s, G)."""
        memberships = memberships_of(self.logs)
        k = memberships.shape[1]
        return torch.cat([memberships, self.scores[:, k - 1 :]], 1) if self.scores.shape[1] > k - 1 else memberships

    def log_weights(self, alpha: Tensor) -> Tensor:
        """Log weights for another alpha, (M, G): the same points serve for all alpha nearby."""
        if not len(alpha):
            return self.log_weight
        change = log_beta(self.alpha) - log_beta(alpha)
        return torch.matmul(alpha - self.alpha, self.logs).add_(self.log_weight).add_(change)


def adapt(
    log_likelihoods: Callable[[Tensor], Tensor], breaking: StickBreaking, position: Tensor, dimensions: int,
    count: int, start: Proposals | None = None,
) -> Proposals:  # fmt: skip
    """One normal distribution for each client, from its log-likelihoods (M, G) at shares (M, K + s, G).

    The weights of the points are raised to a small power first, so that enough points count, and to larger powers as
    the points follow them. Positions (M,) choose the sets of points; `start` is from before, and `count` is the number
    of points that the proposals will have to serve.
    """

    def log_joint(proposals: Proposals) -> tuple[Draw, Tensor]:
        draw = proposals.draw(few, position, _ADAPTING_SEED)
        return draw, log_likelihoods(LatentPoints.of(draw, breaking).shares) + draw.log_weight

    few = _TO_ADAPT.get(dimensions, 128)
    if count > 2 * few:
        few = 1 << (count.bit_length() - 2)  # a power of 2, about half of them
    prior = Proposals.prior(len(position), dimensions)
    proposals, passes = prior, torch.full_like(position, 2)  # at full weight; the second as the first began far away
    if start is not None:
        fits = _effective_share(log_joint(start)[1]) >= _USABLE
        proposals = start.where(fits, prior)  # a narrow distribution cannot follow a client that has moved away
        passes -= fits.long()
    for _ in range(_MAX_STEPS):
        draw, logs = log_joint(proposals)
        power = _largest_power(logs)
        found = ScoreMoments.of(draw.scores, torch.softmax(power[:, None] * logs, 1)).proposals()
        proposals = found.where(passes > 0, proposals)  # what other clients still need makes no difference to a client
        passes -= (power == 1).long()
        if bool((passes <= 0).all()):
            break
    return proposals


def memberships_of(logs: Tensor) -> Tensor:
    """From log memberships (M, K, G), which are interpolated and sum to 1 within 1e-5 only."""
    c = logs.exp()
    return c.div_(c.sum(1, keepdim=True))


def log_beta(alpha: Tensor) -> Tensor:
    """The log of the normalising constant of a Dirichlet distribution."""
    return torch.lgamma(alpha).sum() - torch.lgamma(alpha.sum())


def _effective_share(logs: Tensor) -> Tensor:
    """Of the points in the last dimension."""
    weights = torch.softmax(logs, -1)
    return 1 / (weights.square().sum(-1) * logs.shape[-1])


def _largest_power(logs: Tensor) -> Tensor:
    """The largest power (M,), at most 1, to which the weights of a client's points can be raised so that enough count.

    It carries points from a distribution to another one far away in several steps.
    """
    power = torch.ones(len(logs), dtype=logs.dtype)
    far = (_effective_share(logs) < _USABLE).nonzero()[:, 0]
    if len(far):
        is_enough = _effective_share(_POWERS[:, None] * logs[far, None]) >= _ENOUGH  # (far, powers)
        power[far] = _POWERS[is_enough.int().argmax(1)] * is_enough.any(1)
    return power


def _factor(covariance: Tensor) -> Tensor:
    """Cholesky factors of covariances (..., d, d), each raised a little so that it exists."""
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype)
    found: Tensor = torch.linalg.cholesky(covariance + (1e-6 * size + 1e-12) * eye)
    return found
