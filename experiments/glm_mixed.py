"""The mixed models of statsmodels, fitted in a separate process with a time limit."""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import scipy.special
from glm_data import Array, Table

INVERSE_LINKS: dict[str, Callable[[Array], Array]] = {
    "gaussian": lambda eta: eta,
    "bernoulli": scipy.special.expit,
    "poisson": np.exp,
}


class Effects(NamedTuple):
    """Fixed and random effects of an intercept and the columns after it."""

    fixed: Array  # (1 + d,)
    random: Array  # (clients, len(which))
    which: list[int]  # positions with random effects, 0 for the intercept
    converged: bool

    def predictor(self, x: Array, row: Array) -> Array:
        return x @ self.fixed + (x[:, self.which] * self.random[row]).sum(1)


class MixedResult(NamedTuple):
    mean: Array | None  # predictions for the test rows; None if the fit failed
    seconds: float
    effects: str  # "slopes" or "intercept"
    note: str = ""
    slopes: float | None = None  # seconds for random slopes, converged or not


def mixed_model(train: Table, test: Table, limit: float, *, slopes: bool) -> MixedResult:
    """With random slopes for all columns that vary within clients, or with random intercepts if these fail."""
    if slopes and train.slopes:
        result = _fit_with_limit(train, test, train.slopes, limit)
        if result.mean is None or result.note:
            result = _fit_with_limit(train, test, [], limit)._replace(
                note=f"slopes: {result.note}", slopes=result.seconds
            )
        return result._replace(slopes=result.slopes or result.seconds)
    return _fit_with_limit(train, test, [], limit)


def _fit_with_limit(train: Table, test: Table, slopes: list[int], limit: float) -> MixedResult:
    kind = "slopes" if slopes else "intercept"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(sender, train, test, slopes, limit))
    child.start()
    sender.close()
    try:
        mean, seconds, note = receiver.recv()
    except EOFError:  # stopped by the time limit
        mean, seconds, note = None, limit, f"not done in {limit:g} s"
    child.join()
    return MixedResult(mean, seconds, kind, note)


def _run_child(pipe: Connection, train: Table, test: Table, slopes: list[int], limit: float) -> None:
    import statsmodels.api  # noqa: F401  the import does not count as fitting time

    warnings.simplefilter("ignore")
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (round(start + limit),) * 2)
    try:
        mean, converged = _fit_and_predict(train, test, slopes)
        pipe.send((mean, time.process_time() - start, "" if converged else "not converged"))
    except Exception as error:  # recorded as the result, as a user of statsmodels would see it
        pipe.send((None, time.process_time() - start, f"{type(error).__name__}: {error}"[:60]))


def _fit_and_predict(train: Table, test: Table, slopes: list[int]) -> tuple[Array, bool]:
    ids, row = np.unique(train.clients, return_inverse=True)
    design, unseen = (np.column_stack([np.ones(len(t.y)), t.x]) for t in (train, test))
    fit = _linear if train.family == "gaussian" else _generalised
    effects = fit(train, design, row, [0, *(i + 1 for i in slopes)])
    eta = effects.predictor(unseen, np.searchsorted(ids, test.clients))
    return INVERSE_LINKS[train.family](eta), effects.converged


def _linear(train: Table, design: Array, row: Array, which: list[int]) -> Effects:
    from statsmodels.api import MixedLM

    spread = train.y.std()
    found = MixedLM(train.y / spread, design, groups=row, exog_re=design[:, which]).fit()
    random = np.array([np.asarray(found.random_effects[client]) for client in range(row.max() + 1)])
    return Effects(np.asarray(found.fe_params) * spread, random * spread, which, bool(found.converged))


def _generalised(train: Table, design: Array, row: Array, which: list[int]) -> Effects:
    """By variational Bayes, because the Laplace fit more often ends at variances of 0 on these tables."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM, PoissonBayesMixedGLM

    n, m = len(row), row.max() + 1
    parts = [sp.csr_matrix((design[:, i], (np.arange(n), row)), shape=(n, m)) for i in which]
    kind: Any = {"bernoulli": BinomialBayesMixedGLM, "poisson": PoissonBayesMixedGLM}[train.family]
    found = kind(train.y, design, sp.hstack(parts).tocsr(), np.repeat(np.arange(len(which)), m)).fit_vb()
    converged = bool(found.optim_retvals.success)
    return Effects(found.fe_mean, found.vc_mean.reshape(len(which), m).T, which, converged)
