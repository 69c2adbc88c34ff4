"""The mixed model of statsmodels that fits a table, in a process of its own, which a time limit can end."""

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
    """Of an intercept and the columns after it."""

    fixed: Array  # (1 + d,)
    random: Array  # (clients, len(which))
    which: list[int]  # the columns with random effects, 0 for the intercept
    converged: bool

    def predictor(self, x: Array, row: Array) -> Array:
        return x @ self.fixed + (x[:, self.which] * self.random[row]).sum(1)


class MixedAnswer(NamedTuple):
    mean: Array | None  # of the test rows; None where there is no answer
    seconds: float
    effects: str  # "slopes" or "intercept"
    note: str = ""
    slopes: float | None = None  # seconds that random slopes took, whether they converged or not


def mixed_model(train: Table, test: Table, limit: float, *, slopes: bool) -> MixedAnswer:
    """With random slopes for all columns that vary within clients if these converge in time, else random intercepts."""
    if slopes and train.slopes:
        answer = _limited(train, test, train.slopes, limit)
        if answer.mean is None or answer.note:
            answer = _limited(train, test, [], limit)._replace(note=f"slopes: {answer.note}", slopes=answer.seconds)
        return answer._replace(slopes=answer.slopes or answer.seconds)
    return _limited(train, test, [], limit)


def _limited(train: Table, test: Table, slopes: list[int], limit: float) -> MixedAnswer:
    kind = "slopes" if slopes else "intercept"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, train, test, slopes, limit))
    child.start()
    there.close()
    try:
        mean, seconds, note = here.recv()
    except EOFError:  # the limit ended it
        mean, seconds, note = None, limit, f"not done in {limit:g} s"
    child.join()
    return MixedAnswer(mean, seconds, kind, note)


def _answer(pipe: Connection, train: Table, test: Table, slopes: list[int], limit: float) -> None:
    import statsmodels.api  # noqa: F401  loading it is no part of fitting

    warnings.simplefilter("ignore")
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (round(start + limit),) * 2)
    try:
        mean, converged = _predicted(train, test, slopes)
        pipe.send((mean, time.process_time() - start, "" if converged else "not converged"))
    except Exception as error:  # whatever it is, it is what a user of statsmodels would have got
        pipe.send((None, time.process_time() - start, f"{type(error).__name__}: {error}"[:60]))


def _predicted(train: Table, test: Table, slopes: list[int]) -> tuple[Array, bool]:
    ids, row = np.unique(train.clients, return_inverse=True)
    design, unseen = (np.column_stack([np.ones(len(t.y)), t.x]) for t in (train, test))
    fit = _linear if train.family == "gaussian" else _generalised
    effects = fit(train, design, row, [0, *(at + 1 for at in slopes)])
    eta = effects.predictor(unseen, np.searchsorted(ids, test.clients))
    return INVERSE_LINKS[train.family](eta), effects.converged


def _linear(train: Table, design: Array, row: Array, which: list[int]) -> Effects:
    from statsmodels.api import MixedLM

    spread = train.y.std()
    found = MixedLM(train.y / spread, design, groups=row, exog_re=design[:, which]).fit()
    random = np.array([np.asarray(found.random_effects[client]) for client in range(row.max() + 1)])
    return Effects(np.asarray(found.fe_params) * spread, random * spread, which, bool(found.converged))


def _generalised(train: Table, design: Array, row: Array, which: list[int]) -> Effects:
    """By variational Bayes: on these tables the Laplace fit more often ends at variances of 0."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM, PoissonBayesMixedGLM

    n, m = len(row), row.max() + 1
    parts = [sp.csr_matrix((design[:, at], (np.arange(n), row)), shape=(n, m)) for at in which]
    kind: Any = {"bernoulli": BinomialBayesMixedGLM, "poisson": PoissonBayesMixedGLM}[train.family]
    found = kind(train.y, design, sp.hstack(parts).tocsr(), np.repeat(np.arange(len(which)), m)).fit_vb()
    converged = bool(found.optim_retvals.success)
    return Effects(found.fe_mean, found.vc_mean.reshape(len(which), m).T, which, converged)
