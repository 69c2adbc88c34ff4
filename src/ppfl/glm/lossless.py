"""The same fit from rows that stay at several sites, as from one table.

A search asks for sums over clients (`LikelihoodSums`) and for nothing else. Every site answers with the sums over its
own clients, and a transport adds them. Folds and candidates go side by side in one exchange. Only sums over clients
leave a site; memberships stay there, and `GLMSite.estimator` has them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algorithms.contract import Rows
from ..errors import DataError, SettingError
from ..io.codec import message
from ..server.transports import Transport
from ..sites.messages import Describe, Reply
from . import inference
from .base import constant_within
from .choose_k import Search, automatic, choose, draw_folds, number_of_folds, table_of
from .columns import ColumnScaling, TargetUnits, encode_ids
from .estimators import PopulationClassifier, PopulationRegressor
from .families import GaussianFamily
from .likelihood import Ask, HeldOutAsk, HeldOutSums, Layout, LikelihoodSums, Subset
from .marginal import Marginal, prior_of
from .points import points_each
from .population_fit import PopulationFit
from .posterior import Posterior
from .problem import Evaluator, LogLikelihood, Problem, find_posterior, precise_log_likelihood
from .regularization import Regularization
from .search import Facts, Fit

for _kind in (Layout, Subset, Ask, HeldOutAsk):
    message(_kind)


@message
class MeasureColumns(NamedTuple):
    """Sums of columns and targets, and of their squares, around these means."""

    mean: Tensor  # (d + 1,), of the columns and of the target


@message
class PrepareEstimator(NamedTuple):
    """Standardise the rows by columns and units that all sites share."""

    estimator: str
    settings: dict[str, Any]
    classes: list[str]
    columns: tuple[Any, ...]  # of ColumnScaling
    units: tuple[float, float]
    folds: int  # into which the rows of every client are divided; 0 for none
    seed: int


@message
class LikelihoodAsks(NamedTuple):
    """Evaluations of a search, side by side."""

    asks: list[Any]  # of Ask, with vectors as tensors


@message
class HeldOutAsks(NamedTuple):
    """Predictions of the rows of every fold from the others."""

    asks: list[Any]  # of HeldOutAsk, with vectors as tensors


@message
class FinalAsk(NamedTuple):
    """What is known of a fit besides: the sum of mean memberships, and the precise log-likelihood."""

    layout: Any
    vector: Tensor


def _sums(**numbers: Any) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in numbers.items()}


# ---------------------------------------------------------------------- at a site


class GLMSite:
    """Rows that stay at their site. Only sums over its clients leave it.

    Args:
        name: Of the site.
        X: (n, d), a DataFrame or an array, with the same columns at all sites.
        y: (n,).
        clients: (n,), the client of every row. No client is at two sites.
        sample_weight: (n,), frequencies.
        offset: (n,).

    Example:
        >>> site = GLMSite("north", [[0.0], [1.0], [2.0]], [1.0, 2.0, 2.5], ["a", "a", "b"])
        >>> site.answer(Describe()).rows.ids
        ('a', 'b')
    """

    device = torch.device("cpu")

    def __init__(self, name: str, X: Any, y: Any, clients: Any, sample_weight: Any = None, offset: Any = None) -> None:
        self.name, self._given = name, (X, y, clients, sample_weight, offset)
        self.ids, self._codes = encode_ids("client", clients, len(X))
        self._evaluator: Evaluator | None = None
        self._answers: dict[type, Callable[[Any], Reply]] = {
            Describe: self._describe, MeasureColumns: self._measure, PrepareEstimator: self._prepare,
            LikelihoodAsks: self._evaluate, HeldOutAsks: self._held_out, FinalAsk: self._final,
        }  # fmt: skip

    def answer(self, request: Any) -> Reply:
        """Does what a request asks for."""
        return self._answers[type(request)](request)

    def estimator(self, fitted: Any) -> Any:
        """The estimator that `fit_over_sites` returned, with the memberships of the site's own clients.

        It predicts for them and has intervals of their memberships.
        """
        found, data = copy.copy(fitted), self.problem.data
        fit = replace(fitted.fit_, posterior=find_posterior(fitted.fit_, data))
        with warnings.catch_warnings(action="ignore"):
            found._keep(fit, data, self.ids, None, n_clients=fitted._n_clients)
        found._covariance, found._log_likelihood = fitted._covariance, fitted._log_likelihood
        found.selection_ = fitted.selection_
        return found

    @property
    def problem(self) -> Problem:
        """The standardised rows, once a fit has begun."""
        if self._evaluator is None:
            raise SettingError(f"site {self.name!r} has not taken part in a fit; call fit_over_sites first")
        return self._evaluator.problem

    def _describe(self, request: Describe) -> Reply:
        x = self._given[0]
        names = [str(name) for name in getattr(x, "columns", [f"x{i}" for i in range(np.asarray(x).shape[1])])]
        facts = {"columns": names, "offset": self._given[4] is not None, "named": hasattr(x, "columns")}
        return Reply(rows=Rows(tuple(map(str, self.ids)), {}), facts=facts)

    def _measure(self, request: MeasureColumns) -> Reply:
        x, y, _, weight, _ = self._given
        x, y = np.asarray(x, dtype=np.float64), np.asarray(y)
        target = y.astype(np.float64) if y.dtype.kind in "biuf" else np.zeros(len(x))
        around = torch.from_numpy(np.c_[x, target]) - request.mean
        weights = torch.ones(len(x)).double() if weight is None else torch.from_numpy(np.array(weight, dtype=float))
        return Reply(
            metrics=_sums(rows=len(x), weight=weights.sum(), sum=weights @ around, squares=weights @ around.square())
        )

    def _prepare(self, request: PrepareEstimator) -> Reply:
        kinds = {"PopulationRegressor": PopulationRegressor, "PopulationClassifier": PopulationClassifier}
        model: Any = kinds[request.estimator](**request.settings)
        table = model._read(*self._given, reset=True)
        if request.classes and [str(each) for each in model.classes_] != request.classes:
            raise DataError(
                f"site {self.name!r} has the classes {model.classes_.tolist()}, and {request.classes} are fitted; "
                f"every site needs a row of each class"
            )
        names, mean, scale, *rest = request.columns
        model._scaling = scaling = ColumnScaling(tuple(names), mean.numpy(), scale.numpy(), *map(tuple, rest))
        model._units, model._has_clients = TargetUnits(*request.units), True
        rows = model._rows(table, self._codes, len(self.ids))
        problem = Problem.of(rows, float(model.ridge), *scaling.slopes(), scaling.centres(), scaling.intercept_at)
        if request.folds:
            folds = draw_folds(rows, request.folds, np.random.default_rng(request.seed))
            problem = replace(problem, folds=folds)
        self._evaluator = Evaluator(problem)
        facts, d = problem.facts, len(names)
        within = set(constant_within(table.x, self._codes))
        metrics = _sums(
            clients=facts.clients, samples=facts.samples,
            differs=[float(i not in facts.tied) for i in range(facts.layout.varying)],
            within=[float(i not in within) for i in range(d)], nuisance=len(rows.y) * np.exp(facts.nuisance),
        )  # fmt: skip
        return Reply(metrics=metrics, facts={"closed_form": facts.closed_form, "outputs": facts.layout.outputs})

    def _evaluate(self, request: LikelihoodAsks) -> Reply:
        assert self._evaluator is not None
        found = self._evaluator.evaluate([ask._replace(vector=ask.vector.numpy()) for ask in request.asks])
        parts = {f"{i} {name}": value for i, sums in enumerate(found) for name, value in sums._asdict().items()}
        return Reply(metrics=_sums(**parts))

    def _held_out(self, request: HeldOutAsks) -> Reply:
        assert self._evaluator is not None
        asks = [ask._replace(vectors=[vector.numpy() for vector in ask.vectors]) for ask in request.asks]
        return Reply(metrics=_sums(**self._evaluator.held_out(asks)._asdict()))

    def _final(self, request: FinalAsk) -> Reply:
        problem, vector, layout = self.problem, request.vector.numpy(), request.layout
        count = points_each(problem.facts.dimensions(layout), problem.rows.n_clients)
        posterior = Marginal.of(problem.data, layout, count).adapted(vector).posterior(vector)
        fit = _fit_of(problem.rows.family, problem.rows.mix, problem.facts, layout, vector, posterior)
        log = precise_log_likelihood(fit, problem.data)
        return Reply(metrics=_sums(shares=posterior.mean.sum(0), value=log.value, squared_error=log.error**2))


# ---------------------------------------------------------------------- at the server


def _with(ask: Any, **tensors: Any) -> Any:
    """The same with tensors instead of arrays, as messages hold them."""
    return ask._replace(**tensors)


class SiteObjective:
    """Minus the log marginal likelihood of the clients of all sites: an `Objective` over a transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.exchanges = transport, 0

    def ask(self, request: Any) -> Reply:
        """One exchange with all sites."""
        self.exchanges += 1
        (reply,) = self.transport.ask([request])
        return reply

    def evaluate(self, asks: Sequence[Ask]) -> list[LikelihoodSums]:
        """The sums over all sites, of all asks in one exchange."""
        sent: list[Any] = [_with(ask, vector=torch.from_numpy(np.array(ask.vector))) for ask in asks]
        metrics, found = self.ask(LikelihoodAsks(sent)).metrics, []
        for i in range(len(asks)):
            parts: Any = (metrics[f"{i} {name}"].numpy() for name in LikelihoodSums._fields)
            values: list[Any] = [part if part.ndim else float(part) for part in parts]
            found.append(LikelihoodSums(*values))
        return found

    def held_out(self, asks: Sequence[HeldOutAsk]) -> HeldOutSums:
        """Held-out log-likelihoods of all candidates in one exchange."""
        sent: list[Any] = [_with(ask, vectors=[torch.from_numpy(np.array(v)) for v in ask.vectors]) for ask in asks]
        metrics = self.ask(HeldOutAsks(sent)).metrics
        return HeldOutSums(metrics["total"].numpy(), metrics["products"].numpy(), float(metrics["clients"]))


class _Known(NamedTuple):
    """What `automatic` asks of a problem."""

    facts: Facts
    has_residual: bool


def fit_over_sites(model: Any, transport: Transport, classes: Sequence[Any] = ()) -> Any:
    """Fits a regressor or a classifier to the rows of all sites, without taking them.

    The estimates, their standard errors and the choice of K and of the residual effect are those of one table with all
    rows. The memberships of clients stay at their sites (`GLMSite.estimator`).

    Args:
        model: With its settings, without `penalty`.
        transport: To sites that answer as `GLMSite` does.
        classes: Of a classifier, sorted.

    Returns:
        The fitted model. `exchanges_` counts the messages to every site.

    Example:
        >>> from ppfl.server import InProcess
        >>> random = np.random.default_rng(0)
        >>> clients, x = np.repeat(np.arange(12), 10), random.normal(size=(120, 1))
        >>> y = np.where(clients % 2, 2.0, -2.0) * x[:, 0] + random.normal(size=120)
        >>> parts = {"north": clients < 5, "south": clients >= 5}
        >>> sites = [GLMSite(name, x[some], y[some], clients[some]) for name, some in parts.items()]
        >>> found = fit_over_sites(PopulationRegressor(k=2, random_state=0), InProcess(*sites))
        >>> sorted(found.canonical_coef_.round().ravel().tolist())
        [-2.0, 2.0]
        >>> sites[0].estimator(found).memberships_.shape
        (5, 2)
    """
    if model.penalty > 0:
        raise SettingError(f"penalty is {model.penalty:g}; a fit over sites that loses nothing needs penalty = 0")
    objective = SiteObjective(transport)
    n_clients = len(transport.roster.ids)
    described = objective.ask(Describe())
    rows = _set_columns(model, objective, described, classes)
    model._check_settings()
    ks = model._numbers_to_try(n_clients)
    seed = int(np.random.default_rng(model.random_state).integers(2**31 - 1))
    folds = number_of_folds(rows) if len(ks) > 1 and model.choose != "bic" else 0
    facts = _prepare(model, objective, rows, folds, seed)
    layout = facts.layout
    has_residual = (model.mix == "weights" or facts.closed_form) and layout.outputs == 1 and bool(layout.effects)
    residual = "none" if model.residual is None or (model.residual == "auto" and len(ks) == 1) else model.residual
    known: Any = _Known(facts, has_residual)
    candidates = automatic(known, ks, residual)
    search = Search(model.n_init, model.tol, model.max_iter, seed, model.choose)
    choice = choose(objective, facts, candidates, search, folds, lambda fit: _Final.of(objective, fit).log.value)
    final = _Final.of(objective, choice.fits[choice.best])
    fit = final.fit(model, facts, choice.fits[choice.best], rows, n_clients)
    with_points = points_each(facts.dimensions(fit.layout), n_clients)
    ask = Ask("curvature", fit.layout, Subset(), with_points, fit.vector, "fresh")
    (sums,) = objective.evaluate([ask])
    model._keep(fit, None, (), table_of(facts, choice), n_clients=n_clients)
    information = sums.hessian + fit.regularization.derivatives(fit.layout, fit.vector)[2]
    model._covariance = inference.invert(model, information)
    model._log_likelihood, model.exchanges_ = final.log, objective.exchanges
    return model


def _set_columns(model: Any, objective: SiteObjective, described: Reply, classes: Sequence[Any]) -> int:
    """Means and scales in two exchanges, as `ColumnScaling.fit` has them for one table. Returns the number of rows."""
    names, d = described.facts["columns"], len(described.facts["columns"])
    first = objective.ask(MeasureColumns(torch.zeros(d + 1, dtype=torch.float64))).metrics
    center = first["sum"] / first["weight"]
    second = objective.ask(MeasureColumns(center)).metrics
    mean = (center + second["sum"] / second["weight"]).numpy()
    square = (second["squares"] / second["weight"]).numpy() - (second["sum"] / second["weight"]).square().numpy()
    plain = (first["squares"] / first["weight"]).numpy()
    deviation = np.sqrt(np.maximum(square if model.fit_intercept else plain, 0.0))
    is_constant = deviation <= 8 * np.spacing(np.abs(mean) + deviation)
    scale = np.where(is_constant, np.inf, deviation)
    model._scaling = ColumnScaling.of_sums(names, mean[:d], scale[:d], model.shared, intercept=model.fit_intercept)
    model.n_features_in_ = d
    if described.facts["named"]:
        model.feature_names_in_ = np.array(names, dtype=object)
    model._has_offset, model._has_clients, model.formula_ = bool(described.facts["offset"]), True, None
    model._set_family(classes)
    model._units = TargetUnits()
    if isinstance(model._family, GaussianFamily):
        shift, unit = float(mean[d]) if model.fit_intercept else 0.0, float(deviation[d])
        model._units = TargetUnits(shift, 1.0 if is_constant[d] else unit)
    return int(first["rows"])


def _prepare(model: Any, objective: SiteObjective, rows: int, folds: int, seed: int) -> Facts:
    scaling, family = model._scaling, model._family
    columns = tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in scaling)
    classes = [str(each) for each in getattr(model, "classes_", ())]
    reply = objective.ask(
        PrepareEstimator(type(model).__name__, _plain(model), classes, columns, tuple(model._units), folds, seed)
    )
    sums = reply.metrics
    model._between = tuple(i for i in range(len(scaling.names)) if not float(sums["within"][i]))
    d, at, every = len(scaling.names), scaling.intercept_at, range(len(scaling.varying))
    constant = [i for i in every if (column := scaling.varying[i]) < d and np.isinf(scaling.scale[column])]
    tied = tuple(i for i in every if not float(sums["differs"][i]) and i != at and i not in constant)
    effects = tuple(i for i in every if i == at or i not in (*tied, *constant))
    outputs = int(reply.facts["outputs"])
    layout = Layout(1, len(every), len(scaling.shared), outputs, len(family.nuisance), effects=effects,
                    centres=scaling.centres(), intercept=at)  # fmt: skip
    samples = float(sums["samples"])
    penalty = family.nuisance_penalty if family.nuisance else None
    slopes, shared = scaling.slopes()
    regularization = Regularization(float(model.ridge), slopes, shared, samples * family.has_dispersion, penalty)
    nuisance = np.log((sums["nuisance"] / rows).numpy())
    closed = bool(reply.facts["closed_form"])
    return Facts(layout, regularization, float(sums["clients"]), samples, nuisance, closed, tied)


def _plain(model: Any) -> dict[str, Any]:
    """Settings as values that a message can hold."""
    shared = model.shared
    shared = shared if shared is None or isinstance(shared, str) else [
        each if isinstance(each, str) else int(each) for each in np.atleast_1d(np.array(shared, dtype=object))
    ]  # fmt: skip
    return {**model.get_params(), "shared": shared, "random_state": None, "affinity": "uniform", "k": 1}


class _Final(NamedTuple):
    """The share of each canonical model in the population, and the precise log-likelihood."""

    shares: Tensor
    log: LogLikelihood

    @classmethod
    def of(cls, objective: SiteObjective, fit: Fit) -> _Final:
        sums = objective.ask(FinalAsk(fit.layout, torch.from_numpy(fit.solution.vector))).metrics
        return cls(sums["shares"], LogLikelihood(float(sums["value"]), float(sums["squared_error"]) ** 0.5))

    def fit(self, model: Any, facts: Facts, found: Fit, rows: int, n_clients: int) -> PopulationFit:
        """With canonical models in the order of their share, and without clients."""
        layout, solution = found.layout, found.solution
        order = torch.argsort(self.shares, descending=True, stable=True)
        count = points_each(facts.dimensions(layout), n_clients)
        prior = prior_of(layout, solution.vector, count, closed_form=facts.closed_form).reorder(order)
        vector = layout.reordered(solution.vector, order)
        fit = _fit_of(model._family, model.mix, facts, layout, vector, prior.first(0))
        return replace(
            fit, prior=prior, order=order, n_rows=rows, n_samples=facts.samples, objective=solution.found.value,
            path=np.array(solution.path), steps=solution.steps, gradient=solution.gradient, gain=solution.gain,
            converged=solution.converged,
        )  # fmt: skip


def _fit_of(family: Any, mix: str, facts: Facts, layout: Layout, vector: Any, posterior: Posterior) -> PopulationFit:
    order = torch.arange(layout.k)
    return PopulationFit(
        family=family, mix=mix, layout=layout, vector=vector, posterior=posterior, prior=posterior,
        regularization=facts.regularization, order=order, n_rows=0, n_samples=facts.samples, objective=0.0,
        path=np.zeros(1), steps=0, gradient=0.0, gain=0.0, converged=True,
    )  # fmt: skip
