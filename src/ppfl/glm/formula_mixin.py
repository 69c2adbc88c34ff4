"""Fitting by a formula, and methods that then take tables as the fit did."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import pandas as pd

from ..errors import SettingError
from .formula import FormulaDesign

Method = TypeVar("Method", bound=Callable[..., Any])


class FormulaMixin:
    """Adds `from_formula` to an estimator for tables.

    After it every public method with an argument X takes a table with the columns of the fit.
    """

    _formula: FormulaDesign | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            is_public = inspect.isfunction(method) and name[0] != "_" and name != "fit"
            if is_public and not hasattr(method, "reads_formula") and "X" in inspect.signature(method).parameters:
                setattr(cls, name, reads_formula(method))
        super().__init_subclass__(**settings)

    @classmethod
    def from_formula(
        cls,
        formula: str,
        data: Any,
        *,
        offset: str | None = None,
        exposure: str | None = None,
        weights: str | None = None,
        **settings: Any,
    ) -> Self:
        """Fit by a formula such as `reaction ~ days + (days | subject)` to a DataFrame.

        The bar part says which coefficients vary, and after the bar which column has the clients. All other terms have
        one coefficient for all clients. `offset` is a column that is added to the linear predictor, `exposure` one
        whose logarithm is added, and `weights` one with the weight of every row; a formula may also contain
        `offset(log(hours))`. The other settings are those of the estimator. Rows with missing values are left out and
        counted in `dropped_`. The model predicts for tables with the same columns.

        >>> import numpy as np, pandas as pd
        >>> random = np.random.default_rng(0)
        >>> data = pd.DataFrame({"subject": np.repeat(np.arange(20), 10), "days": np.tile(np.arange(10.0), 20)})
        >>> data["reaction"] = np.where(data["subject"] % 2, 20.0, 5.0) * data["days"] + random.normal(size=200)
        >>> from ppfl.glm import PopulationRegressor
        >>> formula = "reaction ~ days + (0 + days | subject)"
        >>> model = PopulationRegressor.from_formula(formula, data, k=2, random_state=0)
        >>> [model.client_coef(subject)[0].round().tolist() for subject in (0, 1)]
        [[5.0], [20.0]]
        >>> model.predict(data[["days", "subject"]]).shape
        (200,)
        """
        for name in ("shared", "fit_intercept"):
            if name in settings:
                raise SettingError(f"{name} is set, but the formula says this already; leave it out")
        spec, rows = FormulaDesign.fit(formula, data, offset=offset, exposure=exposure, weights=weights)
        x = spec.read(rows).x
        make: Any = cls
        model = make(shared=list(spec.shared) or None, fit_intercept=spec.intercept, **settings)
        y = spec.target(rows, classes=hasattr(cls, "predict_proba"))
        more = {"sample_weight": spec.sample_weight(rows), "offset": spec.offset(rows)}
        more = {name: value for name, value in more.items() if value is not None}
        model.fit(x, y, clients=rows[spec.client].to_numpy(), **more)
        model._formula = spec
        return cast(Self, model)

    @property
    def dropped_(self) -> pd.Series:
        """The number of rows with missing values that the fit left out, by client: a Series."""
        if self._formula is None:
            raise AttributeError("the model was not fitted by a formula, so no rows were left out; see from_formula")
        clients, counts = zip(*self._formula.dropped, strict=True) if self._formula.dropped else ((), ())
        index = pd.Index(clients, name=self._formula.client, dtype=object)  # None: rows without a client
        return pd.Series(counts, index=index, name="dropped", dtype="int64")


def reads_formula(method: Method) -> Method:
    """Let a method of a model that was fitted by a formula take a table in the form that the fit had.

    The design, the clients, the offset, and where they are not given the targets and weights come from the table.
    """
    signature = inspect.signature(method)
    takes = signature.parameters

    @functools.wraps(method)
    def read_table(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self._formula
        if spec is None:
            return method(self, *args, **kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        frame: Any = given.get("X")
        if not hasattr(frame, "columns") or list(frame.columns) == list(spec.names):
            return method(self, *args, **kwargs)
        rows = spec.read(frame, given.get("clients"), given.get("offset"))
        given |= {"X": rows.x, "clients": rows.clients}
        given |= {"offset": rows.offset} if rows.offset is not None else {}
        if "y" in takes and given.get("y") is None:
            given["y"] = spec.target(frame, classes=hasattr(self, "predict_proba"))
        if "sample_weight" in takes and given.get("sample_weight") is None and spec.weights is not None:
            given["sample_weight"] = spec.sample_weight(frame)
        given.pop("self")
        return method(self, **given)

    read_table.reads_formula = True  # type: ignore[attr-defined]
    return cast(Method, read_table)
