"""The rows of a fit, and the objective that answers a search from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .likelihood import (
    Ask,
    HeldOutAsk,
    HeldOutSums,
    Layout,
    Likelihood,
    LikelihoodSums,
    Matrix,
    Subset,
)
from .marginal import (
    Evaluated,
    Marginal,
    choose_sets,
    dimensions_of,
    prior_of,
    weigh,
)
from .moments import fastest_form, has_moments
from .points import points_each
from .population_fit import PopulationFit
from .posterior import Posterior
from .regularization import Regularization, concentration_derivatives
from .rows import DenseDesign, RowLikelihood
from .search import Facts, Fit

_MANY_CLIENTS = 2000
_TIED = 1e-9  # variation within clients of a standardised column that is constant within each of them


@dataclass(frozen=True)
class Problem:
    """The rows of all clients, with what the fit of any model needs. The surface makes it by `Problem.of`."""

    rows: RowLikelihood  # sorted by client
    facts: Facts
    folds: Tensor | None = field(default=None, compare=False)  # (n,), the fold of every row

    @classmethod
    def of(
        cls, rows: RowLikelihood, ridge: float, slopes: Tensor, shared_slopes: Tensor, centres: Sequence[float] = (),
        intercept: int = -1,
    ) -> Problem:  # fmt: skip
        """
        Args:
            rows: With family, mix, weights and offset, sorted by client.
            ridge: Shrinks slopes to 0.
            slopes: (q,), 1 for varying columns that are slopes, 0 for the intercept.
            shared_slopes: (f,), the same for shared columns.
            centres: mean / scale of the varying columns, 0 for the intercept and where columns are not centred or
                constant. The residual effect "diagonal" is one of the original columns by them.
            intercept: The position of the intercept among the varying columns, -1 without.
        """
        family = rows.family
        tied, constant = _columns_within_clients(rows)
        effects = tuple(i for i in range(rows.varying.columns) if i == intercept or i not in (*tied, *constant))
        layout = Layout(
            1, rows.varying.columns, rows.shared.columns, rows.varying.outputs(family.outputs), len(family.nuisance),
            effects=effects, centres=tuple(centres), intercept=intercept,
        )  # fmt: skip
        samples = rows.n_samples * family.has_dispersion
        penalty = family.nuisance_penalty if family.nuisance else None
        regularization = Regularization(ridge, slopes, shared_slopes, samples, penalty)
        tied = tuple(i for i in tied if i != intercept)
        facts = Facts(
            layout, regularization, rows.n_clients, rows.n_samples, _first_nuisance(rows, layout),
            has_moments(rows), tied,
        )  # fmt: skip
        return cls(rows, facts)

    @cached_property
    def data(self) -> Likelihood:
        """In the form that is fastest to evaluate."""
        return fastest_form(self.rows)

    @property
    def has_residual(self) -> bool:
        """Whether there can be a residual effect."""
        is_mixed = self.rows.mix == "weights" or self.facts.closed_form
        return is_mixed and self.facts.layout.outputs == 1 and bool(self.facts.layout.effects)


def _first_nuisance(rows: RowLikelihood, layout: Layout) -> Any:
    """The nuisance parameters that suit coefficients of 0."""
    if not rows.family.nuisance:
        return np.zeros(0)
    zero = layout.unpack(np.zeros(layout.size))
    ones = torch.ones(len(rows.y), 1, 1, dtype=torch.float64)
    mean = rows.family.mean(rows.mean_parameters(zero, ones), zero.nuisance)[:, 0]
    return np.array(rows.family.initial_nuisance(mean, rows.y))


def _columns_within_clients(rows: RowLikelihood) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Varying columns that are constant within every client, and those that are constant in all rows."""
    if not isinstance(rows.varying, DenseDesign):
        return (), ()
    x, size = rows.varying.x, torch.bincount(rows.client, minlength=rows.n_clients).clamp_min(1)
    mean = x.new_zeros(rows.n_clients, x.shape[1]).index_add(0, rows.client, x) / size[:, None]
    within = (x - mean[rows.client]).abs().amax(0)
    overall = (x - x[:1]).abs().amax(0)
    tied = tuple(torch.nonzero((within < _TIED) & (overall >= _TIED))[:, 0].tolist())
    return tied, tuple(torch.nonzero(overall < _TIED)[:, 0].tolist())


class _State(NamedTuple):
    marginal: Marginal
    evaluated: Evaluated


class Evaluator:
    """Answers what a search asks, for the rows of one process or site."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._data: dict[Subset, tuple[Likelihood, Tensor]] = {}
        self._states: dict[str, tuple[_State | None, _State | None]] = {}

    def evaluate(self, asks: Sequence[Ask]) -> list[LikelihoodSums]:
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask) -> LikelihoodSums:
        in_use, last = self._states.get(ask.task, (None, None))
        in_use = last if ask.accept and last is not None else in_use
        if ask.points == "fresh" or in_use is None:
            in_use = None
            self._forget(ask)
            marginal = self.marginal(ask.subset, ask.layout, ask.points_each).adapted(ask.vector)
        elif ask.points == "adapt":
            marginal = in_use.marginal.adapted(ask.vector)
        elif ask.points == "move":
            marginal = in_use.marginal.moved(ask.vector, in_use.evaluated.moments)
        else:
            marginal = in_use.marginal
        evaluated = marginal.evaluate(ask.vector)
        if not ask.once:
            self._states[ask.task] = in_use, _State(marginal, evaluated)
        return evaluated.sums

    def _forget(self, ask: Ask) -> None:
        """Many clients have many points: those of one search of all clients of a fold are kept, the last one."""
        if ask.subset.share < 1 or ask.once or self.problem.rows.n_clients <= _MANY_CLIENTS:
            return
        fold = ask.subset.fold
        for task, (_, last) in list(self._states.items()):
            if (
                last is not None
                and task.startswith(f"fold {fold} ")
                and last.marginal.data is self._part(Subset(fold))[0]
            ):
                del self._states[task]

    def state(self, task: str) -> Marginal | None:
        """The points of the last answer."""
        last = self._states.get(task, (None, None))[1]
        return None if last is None else last.marginal

    def marginal(self, subset: Subset, layout: Layout, points: int) -> Marginal:
        """Some of the rows, without points."""
        data, position = self._part(subset)
        return Marginal.of(data, layout, points, position)

    def _part(self, subset: Subset) -> tuple[Likelihood, Tensor]:
        """The data, and the numbers that choose the clients' points."""
        if subset not in self._data:
            self._data[subset] = self._make_part(subset)
        return self._data[subset]

    def _make_part(self, subset: Subset) -> tuple[Likelihood, Tensor]:
        if subset.share < 1:
            data, position = self._part(Subset(subset.fold))
            _, whole = self._part(Subset())  # the same clients in every fold
            chosen = torch.nonzero(_mixed(whole) < subset.share)[:, 0]
            return data.subset(chosen), position[chosen]
        data = self.problem.data if subset.fold < 0 else self._without(subset.fold)
        return data, choose_sets(data, self.problem.facts.layout)

    def _without(self, fold: int) -> Likelihood:
        rows = self.problem.rows
        assert self.problem.folds is not None
        return fastest_form(rows._replace(weight=rows.weight * (self.problem.folds != fold)))

    def held_out(self, asks: Sequence[HeldOutAsk]) -> HeldOutSums:
        rows, folds = self.problem.rows, self.problem.folds
        assert folds is not None
        found = torch.zeros(sum(len(ask.wider) for ask in asks), rows.n_clients, dtype=torch.float64)
        for fold in range(len(asks[0].vectors)):
            test, place = fastest_form(rows._replace(weight=rows.weight * (folds == fold))), 0
            for ask in asks:
                marginal = self.marginal(Subset(fold), ask.layout, ask.points_each).adapted(ask.vectors[fold])
                end = place + len(ask.wider)
                found[place:end] += marginal.held_out(ask.vectors[fold], test, ask.wider)
                place = end
        return HeldOutSums(found.sum(1).numpy(), (found @ found.T).numpy(), float(rows.n_clients))


def _mixed(position: Tensor) -> Tensor:
    """Numbers between 0 and 1 that look random, from those of the clients."""
    return ((position * 2654435761) % (1 << 32)).double() / (1 << 32)


# ---------------------------------------------------------------------- after a search


def population_fit(problem: Problem, fit: Fit, points: Marginal | None = None) -> PopulationFit:
    """What an estimator keeps: canonical models by their share, and the posterior of every client.

    Many clients keep the `points` of their search.
    """
    facts, solution, layout = problem.facts, fit.solution, fit.layout
    count = points_each(facts.dimensions(layout), problem.rows.n_clients)
    if points is None or problem.rows.n_clients <= _MANY_CLIENTS:
        # from the beginning, so that equal clients get equal memberships
        points = Marginal.of(problem.data, layout, count).adapted(solution.vector)
    posterior = points.posterior(solution.vector)
    order = torch.argsort(posterior.mean.mean(0), descending=True, stable=True)
    prior = prior_of(layout, solution.vector, count, closed_form=facts.closed_form)
    return PopulationFit(
        problem.rows.family, problem.rows.mix, layout, layout.reordered(solution.vector, order),
        posterior.reorder(order), prior.reorder(order), facts.regularization, order, len(problem.rows.y), facts.samples,
        solution.found.value, np.array(solution.path), solution.steps, solution.gradient, solution.gain,
        solution.converged,
    )  # fmt: skip


def find_posterior(fit: PopulationFit, data: Likelihood) -> Posterior:
    """Of new clients: everything else stays as fitted. With one point per client, its mean."""
    if fit.posterior.memberships is not None:
        count = points_each(dimensions_of(data, fit.layout), data.n_clients)
        return Posterior.of_points(Marginal.of(data, fit.layout, count).adapted(fit.vector).posterior(fit.vector).mean)
    vector = fit.layout.reordered(fit.vector, torch.argsort(fit.order))
    found = Marginal.of(data, fit.layout, fit.posterior.count).adapted(vector)
    return found.posterior(vector).reorder(fit.order)


def curvature(fit: PopulationFit, data: Likelihood) -> Matrix:
    """The Hessian (P, P) of the penalised objective in nats, jointly in B, shared, nuisance, L and log alpha."""
    dimensions = dimensions_of(data, fit.layout)
    points = Marginal.of(data, fit.layout, points_each(dimensions, data.n_clients)).adapted(fit.vector)
    _, _, penalty = fit.regularization.derivatives(fit.layout, fit.vector)
    return points.evaluate(fit.vector).sums.hessian + penalty


def membership_deviations(fit: PopulationFit, data: Likelihood, covariance: Matrix) -> Matrix:
    """How much the mean memberships (M, K) move with the parameters, which have this covariance (P, P).

    By the delta method: the derivative of a posterior mean is the covariance of memberships and scores.
    """
    layout, at, k = fit.layout, fit.parameters, fit.k
    points = Marginal.of(data, layout, points_each(dimensions_of(data, layout), data.n_clients)).adapted(fit.vector)
    alpha, chain, _ = concentration_derivatives(at.log_alpha)
    spread, found = torch.from_numpy(covariance), torch.zeros(data.n_clients, k, dtype=torch.float64)
    for part in points.parts if k > 1 else ():
        assert part.points is not None
        likelihood, shares = part.data.at(layout, at), part.points.shares
        weights, _ = weigh(part, likelihood, alpha, derivatives=True)
        of_alpha = part.points.logs[:, :k] * chain[:, None]
        mean, scores = (shares[:, :k] * weights[:, None]).sum(2), likelihood.score_sums(shares, weights, of_alpha).mean
        for i in range(k):
            tilted = weights * shares[:, i] / mean[:, i, None].clamp_min(1e-300)  # their scores are E[c s] / E[c]
            slopes = mean[:, i, None] * (likelihood.score_sums(shares, tilted, of_alpha).mean - scores)
            found[part.clients, i] = ((slopes @ spread) * slopes).sum(1).clamp_min(0.0).sqrt()
    return found.numpy()


class LogLikelihood(NamedTuple):
    value: float
    error: float  # the standard error of the value, from the points


_FIRST, _LAST = {1: (64, 96), 2: (961, 1681)}, 32768
_TOLERANCE = 0.003  # of the log integral of one client
_MAX_WORK = 2e8  # points x rows of one pass


def precise_log_likelihood(fit: PopulationFit, data: Likelihood) -> LogLikelihood:
    """The marginal log-likelihood to a known precision, for comparisons between models.

    A fit uses few points per client, because an error that is the same along the way does no harm. Here clients whose
    two estimates differ are repeated with four times as many points.
    """
    layout, vector = fit.layout, fit.vector
    d = dimensions_of(data, layout)
    value = torch.empty(data.n_clients, dtype=torch.float64)
    error = torch.zeros_like(value)
    if d == 0:
        value = Marginal.of(data, layout, 1).adapted(vector).log_integrals(vector)
        return LogLikelihood(float(value.sum()), 0.0)
    # the likelihoods of many clients differ by more between models, so each of them may have a larger error
    tolerance = _TOLERANCE * math.sqrt(max(1.0, data.n_clients / 100))
    remaining, (few, many) = torch.arange(data.n_clients), _FIRST.get(d, (512, 1024))
    per_client = data.n_samples / data.n_clients
    while len(remaining):
        some = data if len(remaining) == data.n_clients else data.subset(remaining)
        first = Marginal.of(some, layout, few).adapted(vector)
        second = first.with_count(many, vector)
        logs = second.log_integrals(vector)
        value[remaining], error[remaining] = logs, (logs - first.log_integrals(vector)).abs()
        few, many = 4 * few, 4 * many
        remaining = remaining[error[remaining] > tolerance]
        if many > _LAST or len(remaining) * per_client * many > _MAX_WORK:
            break
    return LogLikelihood(float(value.sum()), float(error.square().sum().sqrt()))
