"""What a fitted estimator says about its own uncertainty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from ..client_ids import Array
from ..families import Family, HeteroscedasticGaussianFamily
from ..solvers import SolverResult
from .client_noise import client_variances
from .intervals import membership_intervals
from .model_summary import summarize
from .parameter_table import ParameterRow, natural_parameters, parameter_rows
from .residuals import residuals
from .saved_estimator import save_estimator
from .summary_tables import ModelSummary


class InferenceMixin:
    """Methods of fitted estimators: intervals, residuals and a summary."""

    _family: Family
    _result: SolverResult
    clients_: Array
    _target_scale: float

    @property
    def dispersion_(self) -> float:
        """The variance of gaussian targets in the units of y squared, one over the shape of gamma targets, else 1.

        If clients have their own variances, the median of the population.
        For quasi families, by how much the variance of y is larger than that of the family.
        """
        check_is_fitted(self, "_result")
        return natural_parameters(self, self._result.coefficients.nuisance).get("dispersion", 1.0)

    @property
    def client_dispersion_(self) -> pd.Series:
        """The dispersion of every client, a Series with one entry per client.

        With family = "heteroscedastic gaussian", the mean of its variance given its rows; else all are the same.
        """
        check_is_fitted(self, "_result")
        found = np.full(len(self.clients_), self.dispersion_)
        if isinstance(self._family, HeteroscedasticGaussianFamily):
            found = client_variances(self)[:-1].numpy() * self._target_scale**2
        return pd.Series(found, pd.Index(self.clients_, name="client"), name="dispersion")

    def conf_int(self, level: float = 0.95) -> pd.DataFrame:
        """Every parameter with its standard error and interval: a DataFrame with one row per model and term.

        Standard errors come from the observed information of the marginal likelihood, in the units of the table. The
        ridge and the prior on alpha belong to what is minimised, and to the information too. With K > 1 the intervals
        hold for the canonical models as numbered here.
        """
        check_is_fitted(self, "_result")
        table = pd.DataFrame(parameter_rows(self, level), columns=ParameterRow._fields)
        keys = ["model", "term", *(["output"] if (table["output"] != "").any() else [])]
        return table.drop(columns=[] if "output" in keys else ["output"]).set_index(keys)

    def summary(self, level: float = 0.95) -> ModelSummary:
        """Everything that the fit found, with standard errors and intervals: text, or HTML in a notebook.

        `print(model.summary())`, and `model.summary().to_html("summary.html")` for a page.
        """
        check_is_fitted(self, "_result")
        return summarize(self, level)

    def membership_intervals(self, level: float = 0.9) -> Any:
        """Lower and upper ends of every client's memberships: a DataFrame with one row per client.

        They are quantiles of the posterior distribution, widened because the canonical models are estimates too.
        """
        check_is_fitted(self, "_result")
        return membership_intervals(self, level)

    def residuals(
        self, X: Any, y: Any, clients: Any = None, offset: Any = None, kind: str = "deviance", seed: int = 0
    ) -> Array:
        """One residual per row, given its client.

        kind: "deviance" (signed roots of the deviance), "pearson" (differences divided by the standard deviation of
        y) or "quantile" (randomised with `seed`; standard normal if the model is right, for every family).
        """
        check_is_fitted(self, "_result")
        return np.asarray(residuals(self, X, y, clients, offset, kind, seed))

    def save(self, path: str | Path) -> Path:
        """Write the fitted model to one file (safetensors, with its SHA-256), which `ppfl.glm.load` reads.

        The file holds coefficients, memberships and standard errors, but no rows of the fit. Nothing is pickled.
        """
        check_is_fitted(self, "_result")
        return save_estimator(self, path)
