"""How the columns of a table become numbers for a GLM: by a preparation, or by the design of a formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...data.arrays import quoted
from ...data.preparation import Preparation, PreparationSettings, PreparedColumn
from ...data.tables import DataTable
from ...errors import DataError
from ..client_ids import Array
from ..formula import FormulaDesign
from ..standardize import INTERCEPT

# estimators standardise columns themselves, and report coefficients in the units of the table
IN_OWN_UNITS = PreparationSettings(standardise=False, missing="drop")


class Encoding(NamedTuple):
    """The feature columns in their own units."""

    preparation: Preparation

    @classmethod
    def of(cls, table: DataTable, rows: Array) -> Encoding:
        """With the levels that the rows of this mask have."""
        return cls(Preparation.fit(table, np.flatnonzero(rows), IN_OWN_UNITS))

    @property
    def columns(self) -> tuple[PreparedColumn, ...]:
        return self.preparation.columns

    @property
    def intercept(self) -> bool:
        return True

    @property
    def terms(self) -> list[str]:
        return list(self.preparation.terms)

    def encode(self, frame: Any) -> Array:
        """(n, terms)."""
        return self.preparation.encode(frame)

    def shared(self, names: Sequence[str]) -> list[int | str] | str | None:
        """The `shared` setting of an estimator: positions of the encoded columns, `intercept`, or `all`."""
        if not names:
            return None
        if "all" in names and INTERCEPT not in names:
            return "all"
        known = {column.name: column for column in self.columns}
        if absent := [name for name in names if name not in known and name not in (INTERCEPT, "all")]:
            raise DataError(
                f"shared names {quoted(absent)}, which is no feature; use some of {quoted(list(known), 12)}"
            )
        wanted = {term for name in (known if "all" in names else names) if name in known for term in known[name].terms}
        positions: list[int | str] = [i for i, term in enumerate(self.terms) if term in wanted]
        return [*positions, *([INTERCEPT] if INTERCEPT in names else [])]


class FormulaEncoding(NamedTuple):
    """The design of a formula, in the place of an encoding."""

    spec: FormulaDesign

    @property
    def columns(self) -> tuple[PreparedColumn, ...]:
        return ()

    @property
    def terms(self) -> list[str]:
        return list(self.spec.names)

    @property
    def intercept(self) -> bool:
        return self.spec.intercept

    def encode(self, frame: Any) -> Array:
        """(n, terms)."""
        return np.asarray(self.spec.design(frame), dtype=np.float64)

    def shared(self, names: Sequence[str]) -> list[int | str] | None:
        return list(self.spec.shared) or None
