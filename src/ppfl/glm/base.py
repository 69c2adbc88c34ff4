"""What all population estimators share: settings, the one place where tables are read, the fit, and what it found."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, validation
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from ..data.ids import text_ids
from ..errors import AffinityError, DataError, SettingError
from . import inference, intervals, save, summary
from .choose_k import CRITERIA, Search, automatic, choose_model
from .columns import Array, ColumnScaling, TargetUnits, encode_ids, find_positions, label_rows
from .family import Family
from .formula import FormulaDesign
from .likelihood import Likelihood
from .moments import fastest_form
from .population_fit import PopulationFit
from .posterior import Posterior
from .problem import LogLikelihood, Problem, find_posterior, precise_log_likelihood
from .rows import DenseDesign, RowLikelihood

NEW = "new"  # clients=NEW asks for the predictions of a client without data
MIXES = ("weights", "predictions")
RESIDUALS = ("auto", None, "intercept", "diagonal", "full")
AFFINITIES = ("uniform", "labels", "features")
MOST_MODELS = 5  # that k="auto" tries
_EXACT_FIT = 1e-7  # data with any noise have a larger dispersion than this, for standardised targets
_EMPTY = torch.zeros(0, dtype=torch.float64)


class MissingClientsWarning(UserWarning):
    """A model with memberships was used without clients.

    >>> from ppfl.glm import PopulationRegressor
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     model = PopulationRegressor(k=2).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 0.0])
    >>> caught[0].category.__name__
    'MissingClientsWarning'
    """


class Reading(NamedTuple):
    """Checked rows of a table."""

    x: Array  # (n, d)
    y: Array  # (n,), numbers or positions of classes; (0,) for predictions
    clients: Any  # one id for every row, None, or NEW
    weight: Array  # (n,), frequencies
    offset: Array | None  # (n,), in the units of the predictor


class PopulationGLM(BaseEstimator):  # type: ignore[misc]
    """K canonical models and one membership per client, fitted to a table."""

    fit_: PopulationFit
    formula_: FormulaDesign | None
    _family: Family
    _log_likelihood: LogLikelihood | None

    def __init__(
        self,
        k: Any = 3,
        *,
        residual: str | None = "auto",
        choose: str = "held_out",
        mix: str = "weights",
        penalty: float = 0.0,
        affinity: Any = "uniform",
        shared: Any = None,
        ridge: float = 1.0,
        fit_intercept: bool = True,
        n_init: int = 1,
        tol: float = 1e-6,
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.residual = residual
        self.choose = choose
        self.mix = mix
        self.penalty = penalty
        self.affinity = affinity
        self.shared = shared
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.n_init = n_init
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    # ------------------------------------------------------------------ reading tables

    def _read(
        self, X: Any, y: Any = None, clients: Any = None, sample_weight: Any = None, offset: Any = None, *,
        targets: bool = True, reset: bool = False,
    ) -> Reading:  # fmt: skip
        """The rows of a table in the form of the fit; `reset` for the table of a fit."""
        if not reset:
            check_is_fitted(self, "fit_")
        formula = None if reset else self.formula_
        if formula is not None:
            given = formula.read(X, clients, offset)
            y = formula.target(X, classes=hasattr(self, "predict_proba")) if targets and y is None else y
            sample_weight = formula.sample_weight(X) if targets and sample_weight is None else sample_weight
            X, clients, offset = given
        x, values = self._validate(X, y, targets=targets, reset=reset)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        return Reading(x, values, clients, weight, self._check_offset(offset, len(x), reset=reset))

    def _validate(self, X: Any, y: Any, *, targets: bool, reset: bool) -> tuple[Array, Array]:
        """X and y by scikit-learn's rules, y as numbers."""
        raise NotImplementedError

    def _target_units(self, y: Array, weight: Array) -> TargetUnits:
        """So that one tolerance and one ridge suit all units."""
        return TargetUnits()

    def _check_offset(self, offset: Any, rows: int, *, reset: bool) -> Array | None:
        """The offset of every row, or None without one."""
        if reset:
            self._has_offset = offset is not None
        if self._has_offset != (offset is not None):
            had = "had an offset for every row" if self._has_offset else "had no offset"
            raise DataError(f"the fit {had}; give the same to every call of the model")
        if offset is None:
            return None
        if self._family.outputs > 1:
            raise DataError("an offset is the same for all of three or more classes, so it has no effect; leave it out")
        values = np.asarray(offset, dtype=np.float64)
        if values.shape != (rows,):
            raise DataError(f"offset has shape {values.shape} for {rows} rows; give one number per row")
        if not np.isfinite(values).all():
            raise DataError(f"offset is {values[~np.isfinite(values)][0]} in some rows; an exposure must be positive")
        return values

    def _rows(self, table: Reading, codes: Array | None = None, n_clients: int = 0) -> RowLikelihood:
        """Standardised rows: sorted by client with these codes, or in their own order for predictions."""
        order = slice(None) if codes is None else np.argsort(codes, kind="stable")
        varying, shared = (DenseDesign(part) for part in self._scaling.split(table.x[order]))
        offset = None if table.offset is None else torch.from_numpy(table.offset[order] / self._units.scale)
        if codes is None:
            return RowLikelihood(varying, shared, _EMPTY, _EMPTY, _EMPTY, 0, self._family, self.mix, offset)
        y = (table.y - self._units.shift) / self._units.scale
        target, weight = (torch.from_numpy(np.ascontiguousarray(part[order])).double() for part in (y, table.weight))
        client = torch.from_numpy(codes[order])
        return RowLikelihood(varying, shared, target, weight, client, n_clients, self._family, self.mix, offset)

    def _names(self, x: Array) -> list[str]:
        return list(getattr(self, "feature_names_in_", [f"x{i}" for i in range(x.shape[1])]))

    # ------------------------------------------------------------------ fitting

    def _fit_table(self, table: Reading) -> Self:
        """Standardises the columns, and fits the rows."""
        self._units = TargetUnits()
        if not table.x.shape[1] and (table.clients is None or not self.fit_intercept):
            raise DataError(
                f"X has 0 feature(s) (shape={table.x.shape}) while a minimum of 1 is required without clients or "
                f"intercept"
            )
        if not table.weight.sum() > 0:
            raise DataError("sample_weight is 0 for all rows; some must be positive")
        rows = len(table.x)
        ids, codes = ((0,), np.zeros(rows, np.int64)) if table.clients is None else encode_ids(
            "client", table.clients, rows
        )  # fmt: skip
        self._scaling = ColumnScaling.fit(
            table.x, table.weight, self._names(table.x), self.shared, intercept=self.fit_intercept
        )
        self._units = self._target_units(table.y, table.weight)
        self._between = constant_within(table.x, codes)
        return self._fit_rows(self._rows(table, codes, len(ids)), ids, has_clients=table.clients is not None)

    def _fit_rows(self, rows: RowLikelihood, ids: Sequence[Any], *, has_clients: bool) -> Self:
        """Chooses a model and keeps it."""
        self.formula_ = None
        self._has_clients = has_clients
        self._check_settings()
        ks = self._numbers_to_try(len(ids))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        varying, shared = self._scaling.slopes()
        problem = Problem.of(rows, self.ridge, varying, shared, self._scaling.centres(), self._scaling.intercept_at)
        if self.penalty > 0 and ks[-1] > 1:
            from .penalized import fit_penalized  # needs networks and training

            found = fit_penalized(self, rows, ids, seed)
            self._keep(found.fit, fastest_form(rows), ids, None)
            self._log_likelihood = found.log_likelihood
            return self
        residual = "none" if self.residual is None or not has_clients else self.residual
        if residual not in ("auto", "none") and not problem.has_residual:
            raise SettingError(
                f"residual is {residual!r}, and this model has no place for it: three or more classes have several "
                f"predictors, and some column or the intercept has to vary between clients; use residual = None"
            )
        candidates = automatic(problem, ks, "none" if residual == "auto" and len(ks) == 1 else residual)
        search = Search(self.n_init, self.tol, self.max_iter, seed, self.choose)
        fit, table = choose_model(problem, candidates, search)
        return self._keep(fit, fastest_form(rows), ids, table)

    def _keep(
        self, fit: PopulationFit, data: Likelihood | None, ids: Sequence[Any], table: pd.DataFrame | None,
        n_clients: int | None = None,
    ) -> Self:  # fmt: skip
        """Sets all attributes of a fit. `n_clients` is their number where only their sites know them."""
        self.fit_, self._data = fit, data
        self._n_clients = len(ids) if n_clients is None else n_clients
        self._posterior = fit.posterior
        self._covariance: inference.Covariance | None = None
        self._deviations: Array | None = None
        self._log_likelihood = None
        self.k_, self.residual_ = fit.k, fit.layout.residual
        self.clients_ = np.array(ids)
        self._position = {name: at for at, name in enumerate(text_ids(list(ids)).tolist())}
        self.objective_path_ = np.asarray(fit.path)
        self.n_iter_ = max(1, fit.steps)
        self.converged_ = fit.converged and not self._fits_exactly()
        self.concentration_ = fit.alpha.numpy() if fit.k > 1 else np.ones(1)
        self.selection_ = pd.DataFrame() if table is None else self._in_units(table)
        whole = self._scaling.to_units(fit.parameters.canonical, fit.parameters.shared, self._units).numpy()
        single = whole.shape[2] == 1  # (K, d) and (K,), or (K, m, d) and (K, m)
        self.canonical_coef_ = whole[:, :-1, 0] if single else whole[:, :-1].swapaxes(1, 2)
        self.canonical_intercept_ = whole[:, -1, 0] if single else whole[:, -1]
        if not self.converged_:
            warnings.warn(self._convergence_message(), ConvergenceWarning, stacklevel=5)
        return self

    @property
    def _log_units(self) -> float:
        """What the log-likelihood of standardised targets has to be changed by."""
        return -self.fit_.n_samples * float(np.log(self._units.scale))

    def _in_units(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table of all candidates for y in its own units, without parameters that the columns leave open."""
        found, change = table.copy(), self._log_units
        over = np.array([self._unidentified(k) for k in found["k"]])
        found["log_likelihood"] += change
        found["held_out"] += change / self.fit_.n_samples
        found["n_parameters"] -= over
        found["aic"] -= 2 * (change + over)
        found["bic"] -= 2 * change + over * self._log_clients
        return found

    def _unidentified(self, k: int) -> int:
        """Coefficients that the columns leave open, as they are sums of others or constant."""
        outputs = self.fit_.layout.outputs
        return self._scaling.redundant(k) * (outputs - (outputs > 1))

    def _fits_exactly(self) -> bool:
        return self._family.has_dispersion and float(self.fit_.parameters.nuisance[0].exp()) < _EXACT_FIT

    def _convergence_message(self) -> str:
        if self._fits_exactly():
            dispersion = float(self.fit_.parameters.nuisance[0].exp())
            return (
                f"the model fits every row exactly, to a dispersion of {dispersion:.0e}, so its likelihood grows "
                f"without end and no fit is best; use fewer columns, a smaller k or more rows, or add the noise y lacks"
            )
        reached = self.n_iter_ >= self.max_iter
        remedy = "raise max_iter" if reached else "no step lowers the objective any more, so raise tol"
        done = f"{self.n_iter_} of {self.max_iter} iterations"
        return f"the fit stopped after {done}, short of tol = {self.tol:g}; {remedy}"

    def _check_settings(self) -> None:
        for name, known in (("mix", MIXES), ("residual", RESIDUALS), ("choose", CRITERIA)):
            if getattr(self, name) not in known:
                raise SettingError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(map(str, known))}")
        if isinstance(self.affinity, str) and self.affinity not in AFFINITIES:
            raise AffinityError(
                f"there is no affinity {self.affinity!r}; use one of {', '.join(AFFINITIES)}, a matrix or edges"
            )
        if self.fit_intercept not in (True, False):
            raise SettingError(f"fit_intercept is {self.fit_intercept!r}; use True or False")
        for name in ("n_init", "max_iter"):
            _check_count(name, getattr(self, name))
        for name in ("ridge", "tol", "penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < np.inf:
                raise SettingError(f"{name} is {value!r}; set a number, at least 0")
        if self.mix == "predictions" and self.residual not in ("auto", None):
            raise SettingError(
                f"residual is {self.residual!r} with mix = 'predictions', where clients have no coefficients of their "
                f"own; use residual = None or mix = 'weights'"
            )

    def _numbers_to_try(self, n_clients: int) -> list[int]:
        """All numbers of canonical models to try."""
        if isinstance(self.k, str):
            if self.k != "auto":
                raise SettingError(f"k is {self.k!r}; set a number, several such as [1, 2, 3], or 'auto'")
            ks = list(range(1, min(MOST_MODELS, n_clients) + 1))
        else:
            ks = sorted(set(self.k)) if isinstance(self.k, list | tuple | range) else [self.k]
        if not ks:
            raise SettingError("k is empty; set a number, several such as [1, 2, 3], or 'auto'")
        for k in ks:
            _check_count("k", k)
        if not self._has_clients:
            if len(ks) == 1 and ks[0] > 1:  # with several, or "auto", one model is one of the choices
                _warn(
                    f"k is {ks[0]} but no clients were given, so this is a plain GLM with one model for all rows; pass "
                    f"clients=ids, or set k=1"
                )
            return [1]
        if ks[-1] > n_clients:
            raise SettingError(f"k is {ks[-1]} but the number of clients is {n_clients}; set k to at most that")
        if self.penalty > 0 and len(ks) > 1:
            raise SettingError(
                f"k is {self.k!r}, but a fit with penalty > 0 has one membership per client and no likelihood of held-"
                f"out rows to choose k by; set a number"
            )
        return [int(k) for k in ks]

    # ------------------------------------------------------------------ memberships and predictions

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows of the fit."""
        return {**super().__getstate__(), "_data": None} if hasattr(self, "fit_") else dict(super().__getstate__())

    @property
    def memberships_(self) -> pd.DataFrame:
        """The share of each canonical model in each client: one row per client, those of `onboard` included."""
        check_is_fitted(self, "fit_")
        return label_rows(self._posterior.mean.numpy(), self.clients_)

    @property
    def is_point_fit(self) -> bool:
        """Whether every client has one membership instead of a distribution, as with `penalty > 0`."""
        return self.k_ > 1 and self.fit_.posterior.weights.shape[1] == 1

    def _refuse_points(self, what: str) -> None:
        check_is_fitted(self, "fit_")
        if self.is_point_fit:
            raise SettingError(
                f"{what} need the distribution of memberships, and this fit has one membership per client (penalty > 0 "
                f"or rounds over sites); fit with penalty = 0"
            )

    def _positions(self, clients: Any, rows: int) -> torch.Tensor:
        """The position of every row's client in `clients_`, or their number for a new client."""
        is_new = clients is None or (isinstance(clients, str) and clients == NEW)
        if clients is None and self._has_clients and (self.k_ > 1 or self.residual_ != "none"):
            _warn(
                f"no clients were given to a model of {self.k_} canonical models, so every row is predicted as of a "
                f"new client. Pass clients=ids, or clients='new' if this is what you want. In cross-validation: "
                f"sklearn.set_config(enable_metadata_routing=True), "
                f"model.set_fit_request(clients=True).set_score_request(clients=True) and params={{'clients': ids}}; "
                f"for scoring='...' give scoring=ppfl.glm.client_scorer('...') instead"
            )
        if is_new or not self._has_clients:
            return torch.full((rows,), 0 if not self._has_clients else len(self.clients_))
        ids, codes = encode_ids("client", clients, rows)
        return torch.tensor(find_positions(ids, self._position))[torch.from_numpy(codes)]

    def _mean_of(self, rows: RowLikelihood, position: torch.Tensor) -> Array:
        """Means (n,) or probabilities (n, m) of standardised targets, of clients with these positions."""
        found = None
        for posterior, some, client in self._by_posterior(position):
            part = posterior.predict(rows.take(some), self.fit_.parameters, client)
            found = part.new_zeros(len(position), *part.shape[1:]) if found is None else found
            found[some] = part
        return np.zeros(0) if found is None else np.asarray(found.numpy())

    def _by_posterior(self, position: torch.Tensor) -> Iterator[tuple[Posterior, torch.Tensor, torch.Tensor]]:
        """Known and new clients: the distribution of each, the rows that it is for, and their positions in it."""
        known = position < len(self.clients_)
        if len(some := known.nonzero()[:, 0]):
            yield self._posterior, some, position[some]
        if len(some := (~known).nonzero()[:, 0]):
            yield self.fit_.prior, some, torch.zeros(len(some), dtype=torch.long)

    def _table_mean(self, table: Reading) -> Array:
        """Means of y in its own units (n,), or probabilities of classes (n, m)."""
        mean = self._mean_of(self._rows(table), self._positions(table.clients, len(table.x)))
        return mean if mean.ndim == 2 else self._units.shift + self._units.scale * mean

    def client_coef(self, client: Any, interval: float | None = None) -> Any:
        """A client's own coefficients (d,) and intercept: those of its membership and its residual effect.

        With `interval`, such as 0.9, a DataFrame with one row per term and the columns mean, lower and upper.
        """
        check_is_fitted(self, "fit_")
        self._check_has_coefficients()
        at = self._known_position(client)
        if interval is not None:
            return intervals.client_coefficients(self, at, interval)
        whole = inference.client_coefficients(self)[at]
        return (whole[:-1, 0], whole[-1, 0]) if whole.shape[1] == 1 else (whole[:-1].T, whole[-1])

    def _check_has_coefficients(self) -> None:
        """Refuses clients that mix predictions, unless that is the same as mixing coefficients."""
        if self.mix == "predictions" and self._family.link != "identity":
            raise SettingError(
                "with mix = 'predictions' a client mixes predictions and has no coefficients of its own; look at "
                "memberships_ and canonical_coef_, or fit with mix = 'weights'"
            )

    def _known_position(self, client: Any) -> int:
        (at,) = find_positions([client], self._position)
        if at == len(self.clients_):
            raise DataError(f"client {client!r} is not known to the model; add it with onboard")
        return at

    def onboard(
        self, X: Any, y: Any = None, clients: Any = None, sample_weight: Any = None, offset: Any = None
    ) -> pd.DataFrame:
        """Finds the memberships of clients that `fit` did not have. The canonical models stay as they are.

        Returns:
            The new memberships. The clients are known to the model from then on.
        """
        table = self._read(X, y, clients, sample_weight, offset)
        ids, codes = self._new_clients(table.clients, len(table.x))
        return self._onboard_rows(self._rows(table, codes, len(ids)), ids)

    def _new_clients(self, clients: Any, rows: int) -> tuple[tuple[Any, ...], Array]:
        """The clients of these rows, if the model has memberships and knows none of them yet."""
        if clients is None:
            raise DataError("clients is None; give the client of every row")
        if not self._has_clients:
            raise DataError("the model was fitted without clients, so it has no memberships; fit it with clients first")
        ids, codes = encode_ids("client", clients, rows)
        places = find_positions(ids, self._position)
        if known := [client for client, at in zip(ids, places, strict=True) if at < len(self.clients_)]:
            raise DataError(f"client {known[0]!r} is known already; leave it out, or fit again with all its rows")
        return ids, codes

    def _onboard_rows(self, rows: RowLikelihood, ids: Sequence[Any]) -> pd.DataFrame:
        found = find_posterior(self.fit_, fastest_form(rows))
        self._posterior = self._posterior.concat(found)
        self._position |= {name: len(self.clients_) + at for at, name in enumerate(text_ids(list(ids)).tolist())}
        self.clients_ = np.array([*self.clients_.tolist(), *ids])
        return label_rows(found.mean.numpy(), ids)

    # ------------------------------------------------------------------ information

    @property
    def _log_clients(self) -> float:
        return float(np.log(max(2, self._n_clients)))

    @property
    def log_likelihood_(self) -> float:
        """With memberships and residual effects integrated out, in the units of y, as lme4 with REML = FALSE."""
        return self._precise().value + self._log_units

    @property
    def log_likelihood_error_(self) -> float:
        """The standard error of `log_likelihood_`, from the integration."""
        return self._precise().error

    def _precise(self) -> LogLikelihood:
        """Computed when it is first needed, because it takes about as long as a fit."""
        check_is_fitted(self, "fit_")
        if self._log_likelihood is None:
            self._log_likelihood = precise_log_likelihood(self.fit_, self._need_rows("the log-likelihood"))
        return self._log_likelihood

    def _need_rows(self, what: str) -> Likelihood:
        if self._data is None:
            raise SettingError(
                f"{what} needs the rows of the fit, which pickles and copies do not hold; ask for it before pickling, "
                f"or use model.save(path), which stores it"
            )
        return self._data

    @property
    def n_parameters_(self) -> int:
        """Coefficients, dispersion, residual variances and alpha; constant and aliased columns do not count."""
        check_is_fitted(self, "fit_")
        memberships = self._n_clients * (self.k_ - 1) - self.k_ if self.is_point_fit else 0
        return self.fit_.layout.free_parameters - self._unidentified(self.k_) + memberships

    @property
    def aic_(self) -> float:
        """Comparable with lme4's for the same rows and REML = FALSE."""
        return 2 * self.n_parameters_ - 2 * self.log_likelihood_

    @property
    def bic_(self) -> float:
        """With the number of clients as the sample size, as each has one membership. lme4 counts rows instead."""
        check_is_fitted(self, "fit_")
        return self._log_clients * self.n_parameters_ - 2 * self.log_likelihood_

    @property
    def dispersion_(self) -> float:
        """The variance of gaussian targets in the units of y squared, one over the shape of gamma targets, else 1."""
        check_is_fitted(self, "fit_")
        return inference.natural_parameters(self).get("dispersion", 1.0)

    @property
    def dropped_(self) -> pd.Series:
        """The number of rows with missing values that the fit left out, by client."""
        formula: FormulaDesign | None = getattr(self, "formula_", None)
        if formula is None:
            raise AttributeError("the model was not fitted by a formula, so no rows were left out; see from_formula")
        clients, counts = zip(*formula.dropped, strict=True) if formula.dropped else ((), ())
        index = pd.Index(clients, name=formula.client, dtype=object)  # None: rows without a client
        return pd.Series(counts, index=index, name="dropped", dtype="int64")

    # ------------------------------------------------------------------ inference

    def conf_int(self, level: float = 0.95) -> pd.DataFrame:
        """Every parameter with its standard error and interval: a DataFrame with one row per model and term.

        Standard errors come from the observed information of the marginal likelihood, in the units of the table. The
        ridge and the weak priors belong to what is minimised, and to the information too. Intervals of effects that
        differ between clients alone use Student's t with the number of clients less that of such effects as degrees of
        freedom. With K > 1 the intervals hold for the canonical models as numbered here.
        """
        self._refuse_points("standard errors")
        return inference.parameter_table(self, level)

    def summary(self, level: float = 0.95) -> summary.Summary:
        """Everything that the fit found, with standard errors and intervals: text, or HTML in a notebook.

        `print(model.summary())`, and `model.summary().to_html("summary.html")` for a page.
        """
        check_is_fitted(self, "fit_")
        return summary.summarize(self, level)

    def membership_intervals(self, level: float = 0.9) -> pd.DataFrame:
        """Lower and upper ends of every client's memberships: a DataFrame with one row per client.

        They are quantiles of the posterior distribution, widened because the canonical models are estimates too.
        """
        self._refuse_points("intervals for memberships")
        return intervals.memberships(self, level)

    def save(self, path: str | Path) -> Path:
        """Writes the fitted model to one file (safetensors, with its SHA-256), which `ppfl.glm.load` reads.

        The file holds coefficients, memberships and standard errors, but no rows of the fit. Nothing is pickled.
        """
        check_is_fitted(self, "fit_")
        return save.save(self, path)


def validate_data(*args: Any, **settings: Any) -> Any:
    """scikit-learn's check, except that X may have no columns: clients may differ in their intercepts alone."""
    return validation.validate_data(*args, ensure_min_features=0, **settings)


def constant_within(x: Array, codes: Array) -> tuple[int, ...]:
    """The columns that have one value for every client."""
    _, first = np.unique(codes, return_index=True)
    return tuple(np.flatnonzero((x == x[first][codes]).all(0)).tolist())


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise SettingError(f"{name} is {value!r}; set a whole number, at least 1")


def _warn(message: str) -> None:
    """Shown at the first line outside this package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ppfl."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MissingClientsWarning, stacklevel=level)
