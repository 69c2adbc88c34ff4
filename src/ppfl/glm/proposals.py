"""Samples of memberships for each client, drawn where its membership is likely to be.

The marginal likelihood is an integral over the simplex, one per client. A client with many rows determines its
membership to a hundredth in some directions and not at all in others, which no fixed grid can follow. So each client
has its own normal distributions of the scores of `stick_breaking`, fitted to its membership given the data, and the
integral is a weighted sum over points drawn from them (importance sampling). One point in nine is drawn from the
population instead, so that no weight can be large where the fitted distribution is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .point_sets import grid_points, grid_shifts, normal_points
from .stick_breaking import StickBreaking

_SHARE_OF_PRIOR = 8  # points of the fitted distributions for each point of the population
_LOG_SHARES = (math.log(0.99), math.log(0.01))  # of the two densities behind a regular grid
_FEWEST = 5  # points on one side of the population's grid
_FINE = 100  # points of a grid in two dimensions
_FARTHEST, _NARROWEST, _WIDER = 4.0, 0.1, 0.15  # squared distances and variances, for proposals of variance 1
_FINAL_SEED = 20  # of the points that are kept; those that fit the proposals are others


class Draw(NamedTuple):
    """Points of M clients."""

    scores: Tensor  # (M, K - 1, G)
    log_weight: Tensor  # (M, G): log of the population's density, divided by that of the points, divided by G


class Proposals(NamedTuple):
    """A mixture of J normal distributions of scores per client, with equal shares."""

    mean: Tensor  # (M, J, d)
    factor: Tensor  # (M, J, d, d), lower triangular; the covariance is factor factor'

    @classmethod
    def prior(cls, clients: int, k: int) -> Self:
        """The population's distribution for every client."""
        d = k - 1
        eye = torch.eye(d, dtype=torch.float64)
        return cls(eye.new_zeros(clients, 1, d), eye.expand(clients, 1, d, d).clone())

    @classmethod
    def fitted(cls, scores: Tensor, weights: Tensor, inflation: float) -> Proposals:
        """One normal distribution per client with the moments of weighted points; a wider one wastes few points."""
        return ScoreMoments.of(scores, weights).proposals(inflation)

    def draw(self, count: int, position: Tensor, seed: int) -> Draw:
        """About 9/8 of `count` points per client; the positions (M,) of the clients choose their sets of points."""
        _, j, d = self.mean.shape
        points = [normal_points(d, count // j, seed + i)[position] for i in range(j)]
        parts = [torch.baddbmm(self.mean[:, i, :, None], self.factor[:, i], points[i]) for i in range(j)]
        few = max(1, count // _SHARE_OF_PRIOR)
        scores = torch.cat([*parts, normal_points(d, few, seed + j)[position]], 2)
        total = count // j * j + few
        prior = -0.5 * scores.square().sum(1)
        logs = [self._log_density(scores, i) + math.log(count // j / total) for i in range(j)]
        density = prior + math.log(few / total)
        for log in logs:
            density = torch.logaddexp(density, log)
        return Draw(scores, prior - density - math.log(total))

    def final_draw(self, count: int, position: Tensor, turn: int = 0) -> Draw:
        """The points to keep: a regular grid if it can be fine enough, the most accurate rule for smooth integrands.

        Points of another turn are independent of these.
        """
        if self.mean.shape[2] == 1 or (self.mean.shape[2] == 2 and count >= _FINE):
            return self.regular_grid(count, position)
        return self.draw(count, position, _FINAL_SEED + 2 * turn)

    def regular_grid(self, count: int, position: Tensor) -> Draw:
        """About `count` points of a grid of the first normal distribution, and fewer of the population's grid.

        Each grid takes the part of the integral that its density has in the sum of both. Every client's grids are
        shifted by their own part of a cell, because with the same grid for all clients errors would not cancel.
        """
        d = self.mean.shape[2]
        side = round(count ** (1 / d))
        own, prior = grid_points(d, side), grid_points(d, max(_FEWEST, side // 2))
        shift = grid_shifts(d, position)  # (M, 2 d, 1)
        factor = self.factor[:, 0]
        own_scores = torch.baddbmm(self.mean[:, 0, :, None], factor, own.points + own.cell * shift[:, :d])
        scores = torch.cat([own_scores, prior.points + prior.cell * shift[:, d:]], 2)
        log_prior = -0.5 * scores.square().sum(1)
        parts = torch.stack([self._log_density(scores, 0) + _LOG_SHARES[0], log_prior + _LOG_SHARES[1]])
        log_parts = torch.log_softmax(parts, 0)
        n = own.points.shape[1]
        log_size = factor.diagonal(dim1=1, dim2=2).log().sum(1)[:, None] + own.log_weight
        log_part = torch.cat([log_parts[0, :, :n] + log_size, log_parts[1, :, n:] + prior.log_weight], 1)
        return Draw(scores, log_prior.add_(log_part))

    def _log_density(self, scores: Tensor, component: int) -> Tensor:
        """Without the constant of the normal density, (M, G)."""
        factor = self.factor[:, component]
        standard = torch.linalg.solve_triangular(factor, scores - self.mean[:, component, :, None], upper=False)
        found: Tensor = -0.5 * standard.square().sum(1) - factor.diagonal(dim1=1, dim2=2).log().sum(1)[:, None]
        return found

    @classmethod
    def split(cls, scores: Tensor, weights: Tensor, components: int, inflation: float, sweeps: int = 4) -> Proposals:
        """A mixture fitted to weighted points by expectation maximisation.

        It starts from one normal distribution, and halves all of them along their longest axes.
        """
        mean, covariance = (part[:, None] for part in ScoreMoments.of(scores, weights))
        while mean.shape[1] < components:
            size, axes = torch.linalg.eigh(covariance)
            step = 0.8 * axes[..., -1] * size[..., -1:].sqrt()
            mean = torch.cat([mean + step, mean - step], 1)
            covariance = (covariance - step[..., :, None] * step[..., None, :]).repeat(1, 2, 1, 1)
            for _ in range(sweeps):
                current = Proposals(mean, _factor(covariance))
                logs = torch.stack([current._log_density(scores, i) for i in range(mean.shape[1])], 1)  # (M, J, G)
                parts = torch.softmax(logs, 1) * weights[:, None]
                parts = parts / parts.sum(-1, keepdim=True).clamp_min(1e-300)
                found = [ScoreMoments.of(scores, parts[:, i]) for i in range(mean.shape[1])]
                mean = torch.stack([each[0] for each in found], 1)
                covariance = 0.9 * torch.stack([each[1] for each in found], 1) + 0.1 * covariance
        return Proposals(mean, _factor(inflation * covariance))

    def where(self, keep: Tensor, other: Proposals) -> Proposals:
        """These for clients to keep (M,), and the others for the rest."""
        return Proposals(
            torch.where(keep[:, None, None], self.mean, other.mean),
            torch.where(keep[:, None, None, None], self.factor, other.factor),
        )

    def width(self) -> Tensor:
        """The geometric mean (M,) of the standard deviations of the first normal distribution; the population has 1."""
        return self.factor[:, 0].diagonal(dim1=1, dim2=2).log().mean(1).exp()

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

    def proposals(self, inflation: float) -> Proposals:
        return Proposals(self.mean[:, None], _factor(inflation * self.covariance)[:, None])

    def follow(self, proposals: Proposals, inflation: float) -> Proposals:
        """Proposals half way to these moments, because the whole way may lead back and forth.

        Moments that are far away, or much more narrow, come from few points. These clients go the whole way, but the
        next points are spread more widely.
        """
        factor, mean = proposals.factor[:, 0], proposals.mean[:, 0]
        both = torch.cat([(self.mean - mean)[..., None], _factor(self.covariance)], 2)
        relative = torch.linalg.solve_triangular(factor, both, upper=False)
        shift, width = relative[..., 0].square().sum(1), relative[..., 1:].square().sum(2).amin(1)
        fits = ((shift < _FARTHEST) & (width > _NARROWEST)).to(mean.dtype)[:, None]
        share = 0.5 * fits  # of the proposals
        before, after = torch.bmm(factor, factor.mT), inflation * self.covariance
        covariance = share[..., None] * before + (1 - share[..., None]) * after
        covariance += (1 - fits[..., None]) * _WIDER * before
        return Proposals(((1 - share) * self.mean + share * mean)[:, None], _factor(covariance)[:, None])


@dataclass(frozen=True)
class MembershipSample:
    """Points with their memberships; sums over them with the weights are integrals over the population."""

    scores: Tensor  # (M, K - 1, G)
    logs: Tensor  # (M, K, G), log memberships
    log_weight: Tensor  # (M, G), at `alpha`
    alpha: Tensor  # (K,), for which the points were drawn

    @classmethod
    def of(cls, draw: Draw, breaking: StickBreaking) -> Self:
        return cls(draw.scores, breaking.log_memberships(draw.scores), draw.log_weight, breaking.alpha)

    @cached_property
    def memberships(self) -> Tensor:
        return memberships_of(self.logs)

    def log_weights(self, alpha: Tensor) -> Tensor:
        """Log weights for another alpha, (M, G): the same points serve for all alpha nearby."""
        change = log_beta(self.alpha) - log_beta(alpha)
        return torch.matmul(alpha - self.alpha, self.logs).add_(self.log_weight).add_(change)

    def mean_logs(self, weights: Tensor) -> Tensor:
        """The weighted sum of all log memberships, (K,)."""
        if len(self.logs) == 1:
            return self.logs[0] @ weights.sum(0)
        return torch.bmm(self.logs, weights[..., None]).sum((0, 2))

    def subset(self, clients: Tensor) -> MembershipSample:
        return MembershipSample(self.scores[clients], self.logs[clients], self.log_weight[clients], self.alpha)


def memberships_of(logs: Tensor) -> Tensor:
    """From log memberships (M, K, G), which are interpolated and sum to 1 within 1e-5 only."""
    c = logs.exp()
    return c.div_(c.sum(1, keepdim=True))


def log_beta(alpha: Tensor) -> Tensor:
    """The log of the normalising constant of a Dirichlet distribution."""
    return torch.lgamma(alpha).sum() - torch.lgamma(alpha.sum())


def _factor(covariance: Tensor) -> Tensor:
    """Cholesky factors of covariances (..., d, d), each raised a little so that it exists."""
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype)
    found: Tensor = torch.linalg.cholesky(covariance + (1e-6 * size + 1e-12) * eye)
    return found
