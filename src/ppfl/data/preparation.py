"""How the columns of a table become the numbers that a network or a GLM takes: the same numbers for the same row,
wherever the row is.

Numbers stay numbers. Text becomes one indicator for each level except the first, which is the reference. Levels with
few training rows, and levels that appear only later, become the level `other`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from ppfl.core.settings import Settings
from ppfl.data.arrays import quoted
from ppfl.data.columns import as_numbers, as_text
from ppfl.data.files import check_limit
from ppfl.errors import DataError

if TYPE_CHECKING:
    from ppfl.data.tables import DataTable

OTHER = "other"
GAP: Literal[""] = ""  # the level of a missing text that is filled; an empty text is missing, so no cell has this level
RARE = 5  # a level with fewer training rows becomes `other`

MissingRule = Literal["refuse", "drop", "fill"]
Levels = Annotated[tuple[str, ...], Field(min_length=2, max_length=10_000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rows = Annotated[int, Field(ge=0)]


class PreparationSettings(Settings):
    """`[preparation]` of an experiment. Means, deviations and levels are those of all training rows of all sites.

    >>> PreparationSettings(missing="fill").standardise
    True
    """

    standardise: bool = True  # every prepared column to mean 0 and standard deviation 1
    # a missing value: "drop" leaves its row out; "fill" puts the mean in its place, and for text a level of its own
    missing: MissingRule = "refuse"
    text: tuple[str, ...] = ()  # columns of numbers that are names, such as postcodes
    levels: dict[str, Levels] = {}  # of text columns, the reference level first; then no site sends names of levels
    standardise_target: bool = False  # scores are then in these units, predictions in those of the target
    count_target: bool = False  # the targets are counts, and the sum of log y! is needed for their likelihood

    @model_validator(mode="after")
    def _names_levels_once(self) -> Self:
        for column, names in self.levels.items():
            if len(set(names)) < len(names):
                raise ValueError(f"levels of {column!r} name one of them twice; name each once")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are text, whatever is in them."""
        return tuple(dict.fromkeys((*self.text, *self.levels)))


class PreparedColumn(Settings):
    """One column of a table, which becomes one column of numbers, or one for each level but the first."""

    name: str
    levels: tuple[str, ...] = ()  # of text, the reference level first; empty for numbers
    rare: tuple[str, ...] = ()  # levels of few rows, which became `other`
    mean: tuple[Finite, ...]  # subtracted from each encoded column
    scale: tuple[Scale, ...]  # by which each is divided; 0: the column has one value, and becomes 0
    fill: Finite | Literal[""] | None = None  # in the place of a missing number or text; None: these are refused
    missing: Rows = 0  # in how many rows the value was missing

    @model_validator(mode="after")
    def _has_a_mean_for_each_term(self) -> Self:
        if not len(self.mean) == len(self.scale) == len(self.terms):
            raise ValueError(f"column {self.name!r} has {len(self.mean)} means for {len(self.terms)} terms")
        return self

    @property
    def terms(self) -> list[str]:
        """The names of the encoded columns."""
        if not self.levels:
            return [self.name]
        return [f"{self.name} is missing" if level == GAP else f"{self.name} = {level}" for level in self.levels[1:]]

    def encode(self, values: Any) -> NDArray[np.float64]:
        """Numbers in their own unit (n, 1), or indicators of the levels but the first (n, levels - 1)."""
        known = as_text(values) if self.levels else as_numbers(self.name, values)
        if gaps := int(known.isna().sum()):
            if self.fill is None:
                raise DataError(
                    f"column {self.name!r} has {gaps} missing values, and the preparation fills none; fill them, or "
                    f"leave out these rows"
                )
            known = known.fillna(self.fill)
        if not self.levels:
            return np.array(known, dtype=np.float64)[:, None]
        size = len(known) * len(self.levels) * 8
        what = f"column {self.name!r} has {len(self.levels):,} levels, which take {size:,} bytes"
        check_limit("bytes", size, what, "leave it out, or ")
        position = {level: at for at, level in enumerate(self.levels)}
        unknown = position.get(OTHER, 0)
        codes = np.array([position.get(value, unknown) for value in known], dtype=np.int64)
        return np.asarray(codes[:, None] == np.arange(1, len(self.levels)), dtype=np.float64)


class Preparation(Settings):
    """What is done with every row of a table, at all sites: `encode`, then `scale`.

    >>> age = PreparedColumn(name="age", mean=(40.0,), scale=(10.0,), fill=40.0, missing=1)
    >>> ward = PreparedColumn(name="ward", levels=("east", "west"), mean=(0.0,), scale=(1.0,))
    >>> preparation = Preparation(columns=(age, ward), rows=7)
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"ward": ["west", "east"], "age": [60.0, None]})
    >>> preparation.encode(frame).tolist()
    [[60.0, 1.0], [40.0, 0.0]]
    >>> preparation.apply(frame).tolist()
    [[2.0, 1.0], [0.0, 0.0]]
    >>> Preparation.read(preparation.model_dump(mode="json")) == preparation
    True
    """

    columns: tuple[PreparedColumn, ...]
    rows: Rows  # training rows that means and levels are of
    dropped: Rows = 0  # rows that were left out, as a value was missing
    missing: MissingRule = "refuse"
    target: tuple[Finite, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = (0.0, 1.0)  # mean and scale of targets
    log_factorials: Finite = 0.0  # the sum of log y! over these rows, where targets are counts
    left_out: dict[str, str] = {}  # columns that are not used, each with the reason

    @classmethod
    def fit(cls, table: DataTable, train: Any, settings: PreparationSettings) -> Preparation:
        """The preparation of a table whose training rows have these numbers.

        Args:
            table: All rows.
            train: The numbers of the training rows, (n,).
            settings: What to do with text, gaps and units.
        """
        from ppfl.data.column_sums import agree  # it builds preparations
        from ppfl.data.table_sums import describe_columns, sum_rows

        described = {"here": describe_columns(table, settings, train)}
        return agree(described, settings, lambda plan, center: sum_rows(table, plan, train, center))

    @classmethod
    def read(cls, found: Any) -> Preparation:
        """From plain values, such as a server sends; DataError if they are anything else."""
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise DataError(f"this is no preparation of a table ({reason}); use the same ppfl everywhere") from None

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the prepared columns."""
        return tuple(term for column in self.columns for term in column.terms)

    @property
    def means_and_scales(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of the prepared columns (terms,); the scale of a column with one value is infinite, so that it becomes 0."""
        means = [value for column in self.columns for value in column.mean]
        scales = [value or np.inf for column in self.columns for value in column.scale]
        return np.array(means, dtype=np.float64), np.array(scales, dtype=np.float64)

    def encode(self, frame: Any) -> NDArray[np.float64]:
        """Numbers in their own units and indicators of levels (n, terms). The table has all columns by name."""
        if absent := [column.name for column in self.columns if column.name not in frame.columns]:
            raise DataError(f"no column {quoted(absent)}; the table has {quoted(list(frame.columns), most=12)}")
        parts = [column.encode(frame[column.name]) for column in self.columns]
        return np.concatenate([np.zeros((len(frame), 0)), *parts], axis=1)

    def scale(self, encoded: NDArray[np.float64]) -> NDArray[np.float64]:
        """Encoded columns (n, terms) with their means subtracted and divided by their scales."""
        mean, scale = self.means_and_scales
        return np.asarray((encoded - mean) / scale + 0.0)  # no -0.0

    def apply(self, frame: Any) -> NDArray[np.float64]:
        """The prepared columns (n, terms)."""
        return self.scale(self.encode(frame))


def find_levels(counts: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The levels of a text column, the reference first, and the rare ones, from how many rows have each of them.

    >>> find_levels({"east": 9, "north": 7, "attic": 1})
    (('east', 'north', 'other'), ('attic',))
    """
    common = [level for level, count in counts.items() if count >= RARE]
    rare = sorted(set(counts) - set(common)) if common else []
    levels = sorted(set(counts) - {*rare, OTHER, GAP})
    # these two are last, so that one of them is the reference only if there is no other level
    levels += [OTHER] * bool(rare or OTHER in counts) + [GAP] * (GAP in counts and GAP not in rare)
    return tuple(levels), tuple(rare)
