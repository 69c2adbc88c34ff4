"""Fits with one membership per client: the paper's objective with a penalty on differences between similar clients,
Eq. (4), by the paper's own algorithm.

The rounds of `Training` find models and memberships. What they found becomes a `PopulationFit` whose posterior has one
point per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algorithms import PPFL
from ..core import affinity as affinities
from ..core.affinity import Affinity
from ..core.losses import Loss, loss_by_name
from ..core.population import Population
from ..data import Federation
from ..errors import AffinityError, SettingError
from ..networks.plain import PartlySharedLinear
from ..server import Training, Watch, connect
from ..sites import Stacked
from .families import MultinomialFamily
from .family import Family
from .likelihood import Layout, Parameters, log_concentration
from .population_fit import PopulationFit
from .posterior import Posterior
from .problem import LogLikelihood
from .regularization import Regularization
from .rows import ChoiceDesign, DenseDesign, RowLikelihood

if TYPE_CHECKING:
    from .base import PopulationGLM

_FLAT_ROUNDS = 10  # a change below the tolerance over this many rounds counts as convergence
_MEMBERSHIP_STEP = 0.5
_NOT_AVAILABLE = -1e6  # the utility of an alternative that cannot be chosen, in single precision


class PointFit(NamedTuple):
    """A fit with one membership per client, and the log-likelihood at these memberships."""

    fit: PopulationFit
    log_likelihood: LogLikelihood


def fit_penalized(model: PopulationGLM, rows: RowLikelihood, ids: Sequence[Any], seed: int) -> PointFit:
    """Runs the rounds.

    Args:
        model: An estimator with its settings.
        rows: Sorted by client.
        ids: Of the clients.
        seed: Of the start values and of everything that is drawn.
    """
    family, k = rows.family, int(model.k)
    if family.loss is None:
        raise SettingError(
            f"penalty is {model.penalty:g}, and fits with a penalty have no family {family.name!r}; use gaussian, "
            f"poisson or a classifier, or penalty = 0"
        )
    names = tuple(map(str, ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = GLMNetwork(rows.varying.columns, rows.shared.columns, rows.varying.outputs(family.outputs))
    population = Population(net, k=k, canonical="varying", mix=rows.mix, loss=WeightedLoss(family.loss))
    affinity = make_affinity(names, model.affinity, rows)
    pull = model.penalty * len(names) * float(affinity.degree.max())  # a longer step would overshoot the neighbours
    method = PPFL(penalty=model.penalty, membership_lr=min(_MEMBERSHIP_STEP, _MEMBERSHIP_STEP / max(pull, 1e-9)))
    training = Training(
        connect(_federation(rows, names), population, Stacked()), population, method, rounds=model.max_iter, seed=seed,
        affinity=affinity, watch=Watch(objective=True),
    ).begin()  # fmt: skip
    path = [float(end.record["objective"]) for end in training.rounds()]
    server = training.state.server
    coefficients, memberships = read_models(server.shared, server.memberships, rows.varying.outputs(family.outputs))
    nuisance = torch.zeros(len(family.nuisance), dtype=torch.float64)
    if len(nuisance):
        at = coefficients._replace(nuisance=nuisance)
        mean = Posterior.of_points(memberships).predict(rows, at, rows.client)
        nuisance = torch.tensor(family.initial_nuisance(mean, rows.y), dtype=torch.float64)
    coefficients = coefficients._replace(nuisance=nuisance)
    varying, shared = model._scaling.slopes()
    regularization = Regularization(float(model.ridge), varying, shared)
    fit = point_fit(
        family, rows.mix, coefficients, memberships, regularization, path, len(rows.y), rows.n_samples,
        converged=is_flat(path, model.tol),
    )  # fmt: skip
    logs = rows.at(fit.layout, fit.parameters).log_likelihoods(fit.posterior.mean[..., None])
    return PointFit(fit, LogLikelihood(float(logs.sum()), 0.0))


class GLMNetwork(PartlySharedLinear):
    """A linear model of rows (varying columns, shared columns, offset), or of alternatives with such columns each."""

    def forward(self, x: Tensor) -> Tensor:
        """The predictor (B, outputs), or (B, J) of J alternatives."""
        found = super().forward(x[..., :-1]) + x[..., -1:]
        return found[..., 0] if x.ndim == 3 else found


class WeightedLoss(Loss):
    """Another loss with a weight for each sample: targets are pairs (y, weight)."""

    def __init__(self, name: str) -> None:
        self.base = loss_by_name(name)
        self.name, self.metric_name, self.link = f"weighted {name}", f"weighted {name}", self.base.link

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """(B,)."""
        return target[:, 1] * self.base.per_sample(output, self._y(target))

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """(B,), of the mean prediction."""
        return target[:, 1] * self.base.mixed(outputs, c, self._y(target))

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """(B,), of means."""
        return target[:, 1] * self.base.score(prediction, self._y(target))

    def _y(self, target: Tensor) -> Tensor:
        return target[:, 0].long() if self.base.name in ("cross_entropy", "logistic") else target[:, 0]


def _federation(rows: RowLikelihood, names: tuple[str, ...]) -> Federation:
    """Weights of rows within each client have the mean 1, and clients weigh the sum of their rows."""
    added = torch.zeros(len(rows.y)) if rows.offset is None else rows.offset
    if isinstance(rows.varying, ChoiceDesign):
        added = torch.where(rows.varying.available, 0.0, _NOT_AVAILABLE)
    x = torch.cat([rows.varying.x, rows.shared.x, added[..., None]], -1)  # type: ignore[attr-defined]
    sums = torch.zeros(rows.n_clients, dtype=torch.float64).index_add(0, rows.client, rows.weight)
    sizes = torch.bincount(rows.client, minlength=rows.n_clients)
    weight = rows.weight * (sizes / sums.clamp_min(1e-300))[rows.client]
    return Federation.from_arrays(
        x.float(), torch.stack([rows.y, weight], 1).float(), [names[i] for i in rows.client.tolist()], test_fraction=0,
        ids=names, task="regression", weights=dict(zip(names, sums.tolist(), strict=True)),
    )  # fmt: skip


# ---------------------------------------------------------------------- models of a server as a fit


def read_models(models: Any, memberships: Tensor, outputs: int) -> tuple[Parameters, Tensor]:
    """What the server holds after the rounds: parameters without nuisance parameters, and memberships (M, K)."""
    c = memberships.double()
    canonical = models["varying.weight"].double().mT.contiguous()  # (K, q, m)
    none = torch.zeros(0, dtype=torch.float64)
    shared = models["shared.weight"].double().T if "shared.weight" in models else torch.zeros(0, outputs).double()
    return Parameters(canonical, shared, none, torch.zeros(0, canonical.shape[1]).double(), none), c / c.sum(
        1, keepdim=True
    )


def is_flat(path: Sequence[float], tol: float) -> bool:
    """Whether the objective has stopped to change."""
    last = path[-_FLAT_ROUNDS:]
    return len(path) > _FLAT_ROUNDS and max(last) - min(last) <= tol


def point_fit(
    family: Family, mix: str, at: Parameters, memberships: Tensor, regularization: Regularization,
    path: Sequence[float], n_rows: int, n_samples: float, *, converged: bool,
) -> PopulationFit:  # fmt: skip
    """With canonical models in the order of their share. Alpha follows from the moments of the memberships."""
    order = torch.argsort(memberships.mean(0), descending=True, stable=True)
    c, (k, q, m) = memberships[:, order], at.canonical.shape
    layout = Layout(k, q, len(at.shared), m, len(at.nuisance))
    log_alpha = log_concentration(alpha_of_moments(c)) if k > 1 else torch.zeros(0, dtype=torch.float64)
    vector = layout.pack(at._replace(canonical=at.canonical[order], log_alpha=log_alpha))
    return PopulationFit(
        family=family, mix=mix, layout=layout, vector=vector, posterior=Posterior.of_points(c),
        prior=Posterior.of_points(c.mean(0, keepdim=True)), regularization=regularization, order=order, n_rows=n_rows,
        n_samples=n_samples, objective=float(path[-1]) * n_samples, path=np.array(path) * n_samples, steps=len(path),
        gradient=float("nan"), gain=float("nan"), converged=converged,
    )  # fmt: skip


def alpha_of_moments(c: Tensor) -> Tensor:
    """The Dirichlet distribution with the mean and the total variance of memberships (M, K).

    >>> alpha_of_moments(torch.distributions.Dirichlet(torch.tensor([0.5, 1.0])).sample((100_000,))).round(decimals=1)
    tensor([0.5000, 1.0000])
    """
    mean, variance = c.mean(0).clamp_min(1e-3), c.var(0, correction=0).sum()
    total = ((mean * (1 - mean)).sum() / variance.clamp_min(1e-12) - 1).clamp(0.05, 9.0)
    return total * mean / mean.sum()


# ---------------------------------------------------------------------- affinities


def make_affinity(names: tuple[str, ...], setting: Any, rows: RowLikelihood) -> Affinity:
    """From a name, an Affinity, a matrix in the order of the sorted ids, a DataFrame, or edges."""
    if isinstance(setting, Affinity):
        return setting.check(names)
    if isinstance(setting, str):
        return _named_affinity(names, setting, rows)
    if hasattr(setting, "columns"):  # a DataFrame, with clients in any order
        order = [list(map(str, setting.index)), list(map(str, setting.columns))]
        if order[0] != order[1]:
            raise AffinityError("the affinity table has other columns than rows; give both the same client ids")
        matrix = torch.from_numpy(np.array(setting.to_numpy(), dtype=np.float64))
        return affinities.from_matrix(matrix, order[0]).check(names)
    if hasattr(setting, "toarray"):  # a sparse matrix
        setting = setting.toarray()
    if isinstance(setting, np.ndarray | Tensor):
        return affinities.from_matrix(torch.from_numpy(np.array(setting, dtype=np.float64)), names)
    if not isinstance(setting, list | tuple | set):
        raise AffinityError(f"affinity is a {type(setting).__name__}; use a name, a matrix, a DataFrame or edges")
    for edge in setting:
        if not isinstance(edge, list | tuple) or len(edge) not in (2, 3):
            raise AffinityError(f"affinity has the edge {edge!r}; expected (id, id) or (id, id, weight)")
    return affinities.from_graph([(str(edge[0]), str(edge[1]), *edge[2:]) for edge in setting], names)


def _named_affinity(names: tuple[str, ...], setting: str, rows: RowLikelihood) -> Affinity:
    if setting == "uniform":
        return affinities.uniform(names)
    if not isinstance(rows.varying, DenseDesign):
        raise AffinityError(
            f"affinity = {setting!r} needs one row per sample, and choices have several; use a matrix or edges"
        )
    if setting == "features":
        x, weight = rows.varying.x, rows.weight
        size = weight.new_zeros(rows.n_clients).index_add(0, rows.client, weight)
        sums = x.new_zeros(rows.n_clients, x.shape[1]).index_add(0, rows.client, x * weight[:, None])
        return affinities.from_features(sums / size[:, None], names)
    if not isinstance(rows.family, MultinomialFamily):
        raise AffinityError("affinity = 'labels' needs classes in y; use 'features' for regressions")
    label = rows.y.long()
    counts = rows.weight.new_zeros(rows.n_clients, int(label.max()) + 1)
    return affinities.from_labels(counts.index_put((rows.client, label), rows.weight, accumulate=True), names)
