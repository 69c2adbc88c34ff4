"""The marginal likelihood: memberships are random effects with a Dirichlet distribution, and are integrated out.

F = - sum_i log sum_g w_ig exp(l_i(theta, p_ig)) / n + ridge

where l_i is the client's log-likelihood. The points p_i1, ..., p_iG are memberships, and w_ig are their weights: with
them the sum approximates the integral over Dirichlet(alpha). Mixed models do the same with normal random effects.

The marginal likelihood also determines the canonical models. With mixed weights, any larger simplex around the clients'
coefficients fits as well, but it spreads the same clients over a larger volume, where each is less likely. So the
likelihood prefers the smallest simplex that contains them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..client_memberships import SampledMemberships
from ..gaussian_moments import NO_CLIENTS
from ..likelihoods import Coefficients, Likelihood
from ..proposals import Proposals, ScoreMoments, log_beta
from ..stick_breaking import StickBreaking
from .adaptation import INFLATION, adapt_proposals, draw_sample, sample_size
from .client_points import ClientPoints, points_of_population
from .newton import membership_deviations
from .parameters import (
    ParameterShape,
    Regularization,
    Vector,
    block_diagonal,
    concentration,
    concentration_derivatives,
)

_TURNS = 4  # sets of points that are used one after the other
_MANY_CLIENTS = 2000
_NARROW = 0.05  # the width of a membership that a client's data determine well
_MAX_NEWTON = 300  # parameters
_ALPHA_PRECISION = 1.0  # log alpha ~ N(0, 1), because a few clients say little about it


class Evaluated(NamedTuple):
    """The objective at one point."""

    value: float
    gradient: Vector
    hessian: Vector | None
    moments: list[ScoreMoments | None]  # of each part
    apart: Vector | None = None  # second derivatives of the coefficients for copies of canonical models that move apart


class Marginal:
    """The objective per sample, with its gradient, for fixed points. `adapted` moves the points.

    `client_weight` (M,) reduces the weight of clients whose memberships a few common points would miss; starts use it.
    """

    def __init__(
        self,
        data: Likelihood,
        shape: ParameterShape,
        regularization: Regularization,
        count: int,
        parts: list[ClientPoints],
        client_weight: Tensor | None = None,
        turn: int = 0,  # which of several sets of points these are
    ) -> None:
        self.data, self.shape, self.regularization, self.count = data, shape, regularization, count
        self.parts, self.client_weight, self.turn = parts, client_weight, turn
        self._n_samples = data.n_samples

    @classmethod
    def of(cls, data: Likelihood, shape: ParameterShape, regularization: Regularization, count: int = 0) -> Self:
        """The same points for all clients, those of the population with alpha = 0.3."""
        count = count or sample_size(shape.k, data.n_clients)
        return cls(data, shape, regularization, count, points_of_population(data, shape, count))

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        found = self.evaluate(vector)
        return found.value, found.gradient

    def evaluate(self, vector: Vector) -> Evaluated:
        """Value and gradient per sample, by automatic differentiation, for all likelihoods."""
        at = torch.from_numpy(vector).clone().requires_grad_()
        coefficients, log_alpha = self.shape.unpack(at)
        penalty = self.regularization.value(coefficients) + 0.5 * _ALPHA_PRECISION * log_alpha.square().sum()
        torch.autograd.backward(penalty)
        value, moments = penalty.item(), []
        for part in self.parts:
            coefficients, log_alpha = self.shape.unpack(at)
            alpha = concentration(log_alpha)
            found = part.data.evaluate(coefficients, part.sample.memberships)
            weights, log_integral, tempering = part.weigh(found.logs, alpha.detach(), self.client_weight)
            value -= log_integral
            moments.append(part.moments(weights))
            expected = found.expectation(weights if tempering is None else weights * tempering)
            if self.shape.k > 1:
                expected = expected + torch.dot(part.sample.mean_logs(weights), alpha) - len(weights) * log_beta(alpha)
            torch.autograd.backward(-expected)
        assert at.grad is not None
        return Evaluated(value / self._n_samples, at.grad.numpy() / self._n_samples, None, moments)

    @property
    def has_hessian(self) -> bool:
        is_small = self.shape.size <= _MAX_NEWTON
        return is_small and all(part.data.has_scores for part in self.parts)

    def value(self, vector: Vector) -> float:
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        penalty = self.regularization.value(coefficients) + 0.5 * _ALPHA_PRECISION * log_alpha.square().sum()
        return (float(penalty) - self.log_likelihood(vector)) / self._n_samples

    def with_hessian(self, vector: Vector) -> Evaluated:
        """Value, gradient and Hessian, by Louis' formula.

        The Hessian of a client's log integral is the mean of the Hessians over its memberships plus the covariance of
        the gradients.
        """
        at = torch.from_numpy(vector)
        coefficients, log_alpha = self.shape.unpack(at)
        alpha, chain, bend = concentration_derivatives(log_alpha)
        k = self.shape.k
        gradient, hessian = self.regularization.derivatives(coefficients)
        if k > 1:  # without memberships there is no alpha
            gradient = torch.cat([gradient, _ALPHA_PRECISION * log_alpha])
            hessian = block_diagonal(hessian, _ALPHA_PRECISION * torch.eye(k, dtype=torch.float64))
        value = float(self.regularization.value(coefficients) + 0.5 * _ALPHA_PRECISION * log_alpha.square().sum())
        expected_log = torch.digamma(alpha) - torch.digamma(alpha.sum())
        moments, apart = [], torch.zeros(self.shape.size - k, self.shape.size - k, dtype=torch.float64)
        trigamma = torch.polygamma(1, alpha).diag() - torch.polygamma(1, alpha.sum())
        for part in self.parts:
            c = part.sample.memberships
            found = part.data.scores(coefficients, c)
            weights, log_integral, tempering = part.weigh(found.logs, alpha, self.client_weight)
            value -= log_integral
            moments.append(part.moments(weights))
            of_alpha = (part.sample.logs - expected_log[:, None]) * chain[:, None] if k > 1 else c[:, :0]
            mean, products, information = found.sums(weights, of_alpha, tempering)
            m = len(mean)
            gradient -= mean.sum(0)
            size = len(information)
            apart += information - products[:size, :size]
            hessian[:size, :size] += information
            hessian -= products - mean.T @ mean
            if k > 1:
                slope = mean[:, size:].sum(0) / chain
                hessian[size:, size:] += m * chain[:, None] * trigamma * chain - (slope * bend).diag()
        n = self._n_samples
        return Evaluated(value / n, gradient.numpy() / n, hessian.numpy() / n, moments, apart.numpy() / n)

    def adapted(self, vector: Vector) -> Marginal:
        """The same objective, with points that follow each client's membership for these parameters."""
        return self._with_proposals(vector, [None for _ in self.parts], 0)

    def moved(self, vector: Vector, evaluated: Evaluated) -> Marginal:
        """The same with points drawn where an evaluation, for parameters nearby, found the memberships.

        They are other points than before, because points that fit themselves become more and more narrow.
        """
        proposals = [
            None if found is None or part.proposals is None else found.follow(part.proposals, INFLATION)
            for part, found in zip(self.parts, evaluated.moments, strict=True)
        ]
        return self._with_proposals(vector, proposals, (self.turn + 1) % _TURNS)

    def _with_proposals(self, vector: Vector, proposals: Sequence[Proposals | None], turn: int) -> Marginal:
        if self.shape.k == 1:
            return self
        coefficients, breaking = self._at(vector)
        parts = []
        for part, given in zip(self.parts, proposals, strict=True):
            own = given or adapt_proposals(part.data, coefficients, breaking, part.position, part.proposals)
            sample = draw_sample(own, breaking, part.position, self.count, turn)
            parts.append(part._replace(proposals=own, sample=sample))
        return Marginal(self.data, self.shape, self.regularization, self.count, parts, turn=turn)

    def narrow_share(self) -> float:
        """The share of clients that determine their membership well: far better than the population does."""
        widths = [part.proposals.width() for part in self.parts if part.proposals is not None]
        return float((torch.cat(widths) < _NARROW).double().mean()) if widths else 0.0

    def with_client_weight(self, client_weight: Tensor) -> Marginal:
        return Marginal(self.data, self.shape, self.regularization, self.count, self.parts, client_weight)

    def subset(self, count: int) -> Marginal:
        """The objective of at most `count` clients, the same ones every time."""
        if self.data.n_clients <= count:
            return self
        some = torch.linspace(0, self.data.n_clients - 1, count, dtype=torch.float64).long()
        regularization = self.regularization.scaled(count / self.data.n_clients)
        parts = [own for part in self.parts for own in part.subset(some)]
        return Marginal(self.data.subset(some), self.shape, regularization, self.count, parts)

    def weights_for_common_points(self, vector: Vector) -> Tensor:
        """Client weights (M,) with which no client determines its membership more finely than the points do."""
        k, count = self.shape.k, self.count
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        uniform = torch.full((self.data.n_clients, k), 1 / k, dtype=torch.float64)
        deviation = membership_deviations(coefficients, self.data, uniform).amin(1)
        return (deviation * math.pow(count, 1 / (k - 1))).square().clamp(max=1.0)

    def log_likelihood(self, vector: Vector) -> float:
        """With memberships integrated out over these points, and without regularization."""
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        alpha = concentration(log_alpha)
        return sum(
            float(torch.logsumexp(part.log_joint(coefficients, alpha, self.client_weight), 1).sum())
            for part in self.parts
        )

    def predictive_log_likelihoods(self, vector: Vector, test: Likelihood, wider: float = 0.0) -> Tensor:
        """The log-likelihood (M,) of each client's rows in other data, given its rows in these data.

        `wider` is added to the first nuisance parameter for the other data.
        """
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        alpha = concentration(log_alpha)
        nuisance = coefficients.nuisance.clone()
        nuisance[:1] += wider
        for_test = coefficients._replace(nuisance=nuisance)
        found = torch.zeros(self.data.n_clients, dtype=torch.float64)
        for part in self.parts:
            log_weights = torch.log_softmax(part.log_joint(coefficients, alpha, self.client_weight), 1)
            # the chunks of the two data sets differ where their rows do
            order = torch.argsort(part.clients)
            logs = log_weights.new_empty(log_weights.shape)
            c = part.sample.memberships.expand(len(part.clients), -1, -1)
            own, given = test.subset(part.clients[order]), part.data.subset(order)
            logs[order] = own.conditional_log_likelihoods(for_test, c[order], given)
            found[part.clients] = torch.logsumexp(log_weights + logs, 1)
        return found

    def find_memberships(self, vector: Vector, data: Likelihood) -> SampledMemberships:
        """The distribution of each client's membership, given its data."""
        objective = self
        if data is not self.data or data.n_clients <= _MANY_CLIENTS or self.parts[0].proposals is None:
            # from the beginning, so that equal clients get equal memberships; many clients keep the points they have
            objective = Marginal.of(data, self.shape, self.regularization, self.count).adapted(vector)
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        alpha = concentration(log_alpha)
        weights = [
            torch.softmax(part.log_joint(coefficients, alpha, self.client_weight), 1) for part in objective.parts
        ]
        order = torch.argsort(torch.cat([part.clients for part in objective.parts]))
        position = torch.cat([part.position for part in objective.parts])[order]
        proposals = Proposals.prior(data.n_clients, self.shape.k)
        if self.shape.k > 1:
            own = [part.proposals for part in objective.parts if part.proposals is not None]
            proposals = Proposals(*(torch.cat(parts)[order] for parts in zip(*own, strict=True)))
        drawn_at = objective.parts[0].sample.alpha  # the points stay where they were drawn, and have other weights
        return SampledMemberships(
            proposals, StickBreaking.of(drawn_at), self.count, position, torch.cat(weights)[order]
        )

    def without_data(self) -> Marginal:
        return Marginal(NO_CLIENTS, self.shape, self.regularization, self.count, [])

    def prior(self, vector: Vector) -> SampledMemberships:
        """The distribution of memberships in the population, for one client without data."""
        _, breaking = self._at(vector)
        proposals, position = Proposals.prior(1, self.shape.k), torch.zeros(1, dtype=torch.long)
        weights = draw_sample(proposals, breaking, position, self.count).log_weight.exp()
        return SampledMemberships(proposals, breaking, self.count, position, weights)

    def _at(self, vector: Vector) -> tuple[Coefficients, StickBreaking]:
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        return coefficients, StickBreaking.of(concentration(log_alpha))
