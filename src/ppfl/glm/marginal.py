"""The marginal likelihood: memberships and residual effects are integrated out over points of every client.

F = - sum_i log sum_g w_ig exp(l_i(theta, p_ig))

where l_i is the client's log-likelihood. The points p_i1, ..., p_iG are memberships and residual scores, and w_ig are
their weights: with them the sum approximates the integral over Dirichlet(alpha) and N(0, I).

The marginal likelihood also determines the canonical models. Any larger simplex around the clients' coefficients fits
as well, but it spreads the same clients over a larger volume, where each is less likely. So the likelihood prefers the
smallest simplex that contains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .likelihood import Layout, Likelihood, LikelihoodAt, LikelihoodSums, Parameters, Vector
from .moments import MomentLikelihood, ResidualGiven, given_other_rows, residual_given
from .points import LatentPoints, Proposals, ScoreMoments, adapt
from .posterior import Posterior
from .regularization import concentration_derivatives
from .stick_breaking import StickBreaking

_TURNS = 4  # sets of points that are used one after the other
_NARROW = 0.05  # the width of a membership that a client's data determine well
_NEGLIGIBLE = 1e-20  # smaller weights are raised to this, because subnormal numbers are slow


class Part(NamedTuple):
    """Some clients with their data and points."""

    clients: Tensor
    position: Tensor  # (M,), of the clients' sets of points
    data: Likelihood
    proposals: Proposals | None  # None before they are adapted for the first time
    points: LatentPoints | None


class Evaluated(NamedTuple):
    sums: LikelihoodSums
    moments: list[ScoreMoments]  # of each part: where the clients are, given their data


@dataclass(frozen=True)
class Marginal:
    """Minus the log marginal likelihood of some clients, with points that `adapted` and `moved` put in place."""

    data: Likelihood
    layout: Layout
    count: int  # of points per client
    parts: tuple[Part, ...]
    turn: int = 0  # which of several sets of points these are

    @classmethod
    def of(cls, data: Likelihood, layout: Layout, count: int, position: Tensor | None = None) -> Marginal:
        """Without points. The positions (M,) choose the sets of points of the clients."""
        position = choose_sets(data, layout) if position is None else position
        chunks = data.chunks(count if dimensions_of(data, layout) else 1)
        parts = (Part(chunk.clients, position[chunk.clients], chunk.data, None, None) for chunk in chunks)
        return cls(data, layout, count, tuple(parts))

    @property
    def dimensions(self) -> int:
        return dimensions_of(self.data, self.layout)

    def adapted(self, vector: Vector) -> Marginal:
        """With points that follow each client's scores for these parameters."""
        at = self.layout.unpack(vector)
        breaking = StickBreaking.of(at.alpha)
        parts = []
        for part in self.parts:
            if self.dimensions:
                likelihood = part.data.at(self.layout, at)
                own = adapt(
                    likelihood.log_likelihoods, breaking, part.position, self.dimensions, self.count, part.proposals
                )  # fmt: skip
            else:
                own = Proposals.prior(len(part.clients), 0)
            parts.append(self._with_points(part, own, breaking, 0))
        return replace(self, parts=tuple(parts), turn=0)

    def moved(self, vector: Vector, moments: Sequence[ScoreMoments]) -> Marginal:
        """With points drawn where an evaluation, for parameters nearby, found the clients.

        They are other points than before, because points that fit themselves become more and more narrow.
        """
        if not self.dimensions:
            return self
        turn, breaking = (self.turn + 1) % _TURNS, StickBreaking.of(self.layout.unpack(vector).alpha)
        parts = []
        for part, found in zip(self.parts, moments, strict=True):
            assert part.proposals is not None
            parts.append(self._with_points(part, found.follow(part.proposals), breaking, turn))
        return replace(self, parts=tuple(parts), turn=turn)

    def with_count(self, count: int, vector: Vector) -> Marginal:
        """With another number of points, for the proposals that these have."""
        breaking = StickBreaking.of(self.layout.unpack(vector).alpha)
        more = replace(self, count=count)
        parts = (more._with_points(part, _proposals(part), breaking, 1) for part in self.parts)
        return replace(more, parts=tuple(parts), turn=1)

    def _with_points(self, part: Part, proposals: Proposals, breaking: StickBreaking, turn: int) -> Part:
        draw = proposals.final_draw(self.count, part.position, turn)
        return part._replace(proposals=proposals, points=LatentPoints.of(draw, breaking))

    def evaluate(self, vector: Vector) -> Evaluated:
        """Value, gradient and Hessian, by Louis' formula.

        The Hessian of a client's log integral is the mean of the Hessians over its points plus the covariance of the
        gradients.
        """
        layout, at = self.layout, self.layout.unpack(vector)
        own, coefficients = layout.size - layout.n_alpha, layout.n_coefficients
        alpha, chain, bend = concentration_derivatives(at.log_alpha)
        value, squared_error, moments = 0.0, 0.0, []
        gradient = torch.zeros(layout.size, dtype=torch.float64)
        hessian, splitting = torch.zeros(layout.size, layout.size).double(), torch.zeros(coefficients, coefficients)
        splitting = splitting.double()
        for part in self.parts:
            assert part.points is not None
            likelihood = part.data.at(layout, at)
            weights, log_integrals = weigh(part, likelihood, alpha, derivatives=True)
            value -= float(log_integrals.sum())
            squared_error += _squared_error(weights)
            moments.append(ScoreMoments.of(part.points.scores, weights))
            of_alpha = part.points.logs[:, : layout.n_alpha]
            if layout.n_alpha:
                expected_log = torch.digamma(alpha) - torch.digamma(alpha.sum())
                of_alpha = (of_alpha - expected_log[:, None]) * chain[:, None]
            mean, products, information = likelihood.score_sums(part.points.shares, weights, of_alpha)
            gradient -= mean.sum(0)
            splitting += (information - products[:own, :own])[:coefficients, :coefficients]
            hessian[:own, :own] += information
            hessian -= products - mean.T @ mean
            if layout.n_alpha:
                slope = mean[:, own:].sum(0) / chain
                trigamma = torch.polygamma(1, alpha).diag() - torch.polygamma(1, alpha.sum())
                hessian[own:, own:] += len(mean) * chain[:, None] * trigamma * chain - (slope * bend).diag()
        found = (gradient.numpy(), hessian.numpy(), splitting.numpy())
        clients, samples = float(self.data.n_clients), self.data.n_samples
        return Evaluated(LikelihoodSums(value, *found, clients, samples, self._narrow(), squared_error), moments)

    def _narrow(self) -> float:
        """How many clients determine their membership well: far better than the population does."""
        d = self.layout.k - 1
        widths = [part.proposals.width(d) for part in self.parts if part.proposals is not None] if d else []
        return float(sum((width < _NARROW).sum() for width in widths))

    def value(self, vector: Vector) -> float:
        """Minus the log marginal likelihood."""
        return -float(self.log_integrals(vector).sum())

    def log_integrals(self, vector: Vector) -> Tensor:
        """The log marginal likelihood of every client, (M,)."""
        at = self.layout.unpack(vector)
        found = torch.zeros(self.data.n_clients, dtype=torch.float64)
        for part in self.parts:
            found[part.clients] = weigh(part, part.data.at(self.layout, at), at.alpha)[1]
        return found

    def held_out(self, vector: Vector, test: Likelihood, wider: Sequence[float] = (0.0,)) -> Tensor:
        """The log-likelihood (W, M) of each client's rows in other data, given its rows in these data.

        `wider` are added to the log dispersion for the other data.
        """
        at = self.layout.unpack(vector)
        found = torch.zeros(len(wider), self.data.n_clients, dtype=torch.float64)
        for part in self.parts:
            assert part.points is not None
            weights, _ = weigh(part, part.data.at(self.layout, at), at.alpha)
            order = torch.argsort(part.clients)  # the chunks of the two data sets differ where their rows do
            own, shares = test.subset(part.clients[order]), part.points.shares[order]
            for i, more in enumerate(wider):
                model = _for_other_rows(own, part.data.subset(order), self.layout, at, more)
                logs = weights[order].log() + model.log_likelihoods(shares)
                found[i, part.clients[order]] = torch.logsumexp(logs, 1)
        return found

    def posterior(self, vector: Vector) -> Posterior:
        """Of all clients, with the proposals that these points have."""
        at = self.layout.unpack(vector)
        breaking = StickBreaking.of(at.alpha)
        again = [self._with_points(part, _proposals(part), breaking, 0) for part in self.parts]
        weights = [weigh(part, part.data.at(self.layout, at), at.alpha)[0] for part in again]
        order = torch.argsort(torch.cat([part.clients for part in again]))
        proposals = Proposals(*(torch.cat(each)[order] for each in zip(*map(_proposals, again), strict=True)))
        position = torch.cat([part.position for part in again])[order]
        residual = None
        if self.layout.n_residual and isinstance(self.data, MomentLikelihood):
            residual = residual_given(self.data, at)
        return Posterior(torch.cat(weights)[order], self.count, position, proposals, breaking, residual=residual)


def prior_of(layout: Layout, vector: Vector, count: int, *, closed_form: bool) -> Posterior:
    """The distribution in the population, for one client without data."""
    at, d = layout.unpack(vector), layout.k - 1 + (0 if closed_form else layout.n_effects)
    breaking, proposals, position = StickBreaking.of(at.alpha), Proposals.prior(1, d), torch.zeros(1).long()
    weights = proposals.final_draw(count, position).log_weight.softmax(1)
    residual = None
    if closed_form and layout.n_residual:
        eye = torch.eye(layout.n_effects, dtype=torch.float64)[None]
        residual = ResidualGiven(eye.new_zeros(1, layout.n_effects, layout.k), eye)
    return Posterior(weights, count, position, proposals, breaking, residual=residual)


def dimensions_of(data: Likelihood, layout: Layout) -> int:
    """The number of normal scores that points have to cover."""
    return layout.k - 1 + (0 if data.integrates_residual else layout.n_effects)


def choose_sets(data: Likelihood, layout: Layout) -> Tensor:
    """A number (M,) for each client that only its data determine, so that names and order have no effect on its points.

    The log-likelihood of an arbitrary model is such a number; its last digits are as good as random.
    """
    one = layout._replace(k=1, residual="none")
    any_model = torch.cos(torch.arange(layout.varying * layout.outputs, dtype=torch.float64))
    at = one.unpack(np.zeros(one.size))
    at = at._replace(canonical=any_model.view(1, layout.varying, layout.outputs))
    logs = data.at(one, at).log_likelihoods(torch.ones(1, 1, 1, dtype=torch.float64))[:, 0]
    return (logs.nan_to_num().abs() * 1e6).remainder(1e9).long()


def weigh(
    part: Part, likelihood: LikelihoodAt, alpha: Tensor, *, derivatives: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights (M, G) of the points given the data, and the log integrals (M,)."""
    assert part.points is not None
    joint = likelihood.log_likelihoods(part.points.shares, derivatives) + part.points.log_weights(alpha)
    top = joint.amax(1, keepdim=True)
    relative = joint.sub_(top).exp_().clamp_(min=_NEGLIGIBLE)
    total = relative.sum(1, keepdim=True)
    return relative.div_(total), (top + total.log())[:, 0]


def _squared_error(weights: Tensor) -> float:
    """The sum over clients of the squared errors of their log integrals, from every other point."""
    if weights.shape[1] == 1:
        return 0.0
    half = weights[:, ::2].sum(1).clamp(1e-3, 1 - 1e-3)
    return float((0.5 * torch.log(half / (1 - half))).square().sum())


def _proposals(part: Part) -> Proposals:
    assert part.proposals is not None
    return part.proposals


def _for_other_rows(
    test: Likelihood, given: Likelihood, layout: Layout, at: Parameters, wider: float
) -> LikelihoodAt:  # fmt: skip
    """Rows are independent given c and z, unless z has been integrated out."""
    if layout.n_residual and isinstance(test, MomentLikelihood) and isinstance(given, MomentLikelihood):
        return given_other_rows(test, given, layout, at, wider)
    nuisance = at.nuisance.clone()
    nuisance[:1] += wider
    return test.at(layout, at._replace(nuisance=nuisance))
