"""The rates of Section 3.2 beside what was measured: the mean of the stationarity measure over rounds, by horizon T.

With a constant step Eq. (10) draws every round with the same probability, so that the mean over rounds is the
expectation that Theorem 2 bounds, and the mean on the left of Theorem 3. A theorem is one case of the study where its
steps do not depend on T, and else one case for every T, with names that end in -T and the number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from ..algorithms import PPFL
from ..data import Federation
from ..runs.experiment import Experiment
from ..runs.folder import RunFolder
from ..runs.record import RunRecord
from .studies import Study

CaseRuns = Mapping[str, Sequence[RunRecord]]  # by method, one run per seed
_SHORTEST = 25  # rounds of a running mean that is drawn
_POINTS = 60


class Promise(NamedTuple):
    """What the paper says about the runs of a case."""

    theorem: str
    about: str
    exponent: float  # of T
    full_gradients: bool


PROMISES = {
    "corollary-o1": Promise("Corollary O1", "Algorithm 1 on full gradients", -1.0, True),
    "theorem-2": Promise("Theorem 2", "Algorithm 1 on batches with a constant step, down to a floor", 0.0, False),
    "corollary-1": Promise("Corollary 1", "Algorithm 1 on batches with the step 1/√T", -0.5, False),
    "theorem-3-full": Promise("Theorem 3", "Algorithm O1 on full gradients", -1.0, True),
    "theorem-3": Promise("Theorem 3", "Algorithm O1 on batches", -0.5, False),
}


class Constants(NamedTuple):
    """Upper bounds of the constants of Assumptions 1 to 3, and of Delta_F."""

    L_1: float
    L_2: float
    sigma_1: float  # squared
    sigma_2: float  # squared
    delta: float  # squared
    gap: float  # Delta_F = F(z^0) - F*
    clients: int


class Series(NamedTuple):
    """The runs of one method under one theorem, by horizon."""

    promise: Promise
    label: str
    means: dict[int, float]  # mean of the measure over all rounds, by T
    bounds: dict[int, float]  # the right side of the theorem, by T
    curve: tuple[tuple[float, float], ...]  # to draw
    eta: float  # at the longest horizon

    @property
    def slope(self) -> float:
        return fitted_slope(self.means)


def fitted_slope(values: Mapping[int, float]) -> float:
    """The exponent b of the least-squares line log(value) = a + b log(T); nan where there is only one T.

    >>> round(fitted_slope({100: 0.5, 200: 0.25, 400: 0.125}), 6)
    -1.0
    """
    if len(values) == 1:
        return math.nan
    return float(np.polyfit(np.log(list(values.keys())), np.log(list(values.values())), 1)[0])


def all_series(study: Study, runs: Mapping[str, CaseRuns]) -> list[Series]:
    """The series of all theorems, in the order of the study."""
    grouped: dict[tuple[str, str], list[tuple[Experiment, RunRecord]]] = {}
    for case in study.cases:
        for label, experiment in case.experiments.items():
            grouped.setdefault((case.name.split("-T")[0], label), []).append((experiment, runs[case.name][label][0]))
    return [
        (_by_horizon if any(f"{name}-T" in case.name for case in study.cases) else _running)(
            PROMISES[name], label, found
        )
        for (name, label), found in grouped.items()
    ]


def _running(promise: Promise, label: str, found: Sequence[tuple[Experiment, RunRecord]]) -> Series:
    """One run, whose step does not depend on T: its first rounds are the run of a shorter horizon."""
    ((experiment, run),) = found
    method, limits, last = _method(experiment), constants(experiment, run), experiment.rounds
    horizons = [last // part for part in (4, 2, 1)]
    ratio = (last / min(_SHORTEST, last)) ** (1 / _POINTS)
    drawn = sorted({round(last / ratio**i) for i in range(_POINTS + 1)})
    return Series(
        promise,
        label,
        {T: mean_measure(run, T) for T in horizons},
        {T: theorem_bound(method, limits, T) for T in horizons},
        tuple((float(T), mean_measure(run, T)) for T in drawn),
        method.membership_lr,
    )


def _by_horizon(promise: Promise, label: str, found: Sequence[tuple[Experiment, RunRecord]]) -> Series:
    """One run for every horizon, since the step depends on it."""
    means = {experiment.rounds: mean_measure(run, experiment.rounds) for experiment, run in found}
    bounds = {e.rounds: theorem_bound(_method(e), constants(e, run), e.rounds) for e, run in found}
    eta = _method(max(found, key=lambda pair: pair[0].rounds)[0]).membership_lr
    return Series(promise, label, means, bounds, tuple((float(T), mean) for T, mean in means.items()), eta)


def _method(experiment: Experiment) -> PPFL:
    assert isinstance(experiment.method, PPFL)
    return experiment.method


def mean_measure(run: RunRecord, rounds: int) -> float:
    """The mean of the stationarity measure over the first rounds, of those in which it was taken."""
    return fmean(row["stationarity"] for row in run.metrics if "stationarity" in row and row["round"] <= rounds)


def constants(experiment: Experiment, run: RunRecord) -> Constants:
    """Bounds for the logistic loss with mixed weights, w_i = sum_k c_ik theta_k, on the data of the experiment.

    |s - y| <= 1 for the residual s - y, and s (1 - s) <= 1/4. So a gradient for theta is at most |x| for one sample and
    sqrt(lambda_max(X'X / n)) for a client, and memberships see it through theta_k, of norm R at most at the end.
    F is not negative, so that Delta_F is at most the training loss of the first round.
    """
    method = _method(experiment)
    federation = experiment.build_data()
    largest = max(float(torch.linalg.eigvalsh(x.mT @ x / len(x))[-1]) for x in _inputs(federation))
    length = max(float(x.square().sum(1).mean()) for x in _inputs(federation))
    result = RunFolder(run.folder).read().result
    assert result is not None, "the run is finished"
    canonical = [leaf for name, leaf in result.state.server.items() if name.startswith("shared.")]
    R = max(float(torch.cat([v[k].flatten() for v in canonical]).norm()) for k in range(experiment.population.k))
    affinity = experiment.build_affinity(federation)
    degree = 0.0 if affinity is None else float(affinity.degree.max())
    size = max(len(x) for x in _inputs(federation))  # the bound grows with a client's data

    def variance(batch: int | None) -> float:  # of a mean of a batch drawn without replacement
        return 0.0 if batch is None or batch >= size else length * (size - batch) / (size - 1) / batch

    return Constants(
        L_1=largest / 4,
        L_2=float(federation.weights.max()) * largest / 4 * R**2 + 2 * method.penalty * degree,
        sigma_1=variance(method.local.batch_size),
        sigma_2=variance(method.membership_batch) * experiment.population.k * R**2,
        delta=0.0 if method.local_steps == 1 else largest,  # it stands for the drift between local steps
        gap=float(run.metrics[0]["loss"]),
        clients=federation.n_clients,
    )


def _inputs(federation: Federation) -> list[torch.Tensor]:
    return [federation.train.client(i).x.double() for i in range(federation.n_clients)]


def theorem_bound(method: PPFL, limits: Constants, T: int) -> float:
    """The right side of Theorem 2 for random blocks, and for alternating ones what the proof of Theorem 3 ends with."""
    eta, L_1, L_2, sigma_1, sigma_2, delta, gap, clients = (method.membership_lr, *limits)
    if method.order == "alternating":
        return 4 * gap / (eta * T) + 128 * (eta * L_1) ** 2 * delta + 4 * eta * L_1 * sigma_1
    rho_1 = method.block_probability
    rho_2 = 1 - rho_1
    noise = 2 * rho_2 * (clients + 1) * T * eta * sigma_2 + rho_1 * T * eta**2 * (sigma_1 + delta)
    return (2 * gap + noise) / (T * eta * min(rho_1 * (1 - 4 * eta * L_1), rho_2 * (1 - eta / 2 * L_2)))


def chart_lines(found: Sequence[Series], *, full_gradients: bool) -> dict[str, tuple[tuple[float, float], ...]]:
    """The curves to draw by label, and a line with the promised slope."""
    shown = [series for series in found if series.promise.full_gradients == full_gradients]
    lines = {f"{_short(series.promise.theorem)}, {series.label}": series.curve for series in shown}
    if shown:
        exponent = min(series.promise.exponent for series in shown)
        last = max(T for series in shown for T in series.means)
        first, end = min(shown[0].means), shown[0].means[min(shown[0].means)]
        lines[f"T^{exponent:g}"] = ((float(first), end), (float(last), end * (last / first) ** exponent))
    return lines


def _short(theorem: str) -> str:
    return theorem.replace("Theorem", "Thm.").replace("Corollary", "Cor.")
