"""`[preparation]` of an experiment file: how the columns of a table become the numbers that a network takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ppfl.core.settings import Settings

MissingRule = Literal["refuse", "drop", "fill"]
Levels = Annotated[tuple[str, ...], Field(min_length=2, max_length=10_000)]


class PreparationSettings(Settings):
    """Means, deviations and levels are those of all training rows, of all sites together.

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
    def _names_levels_once(self) -> PreparationSettings:
        for column, names in self.levels.items():
            if len(set(names)) < len(names):
                raise ValueError(f"levels of {column!r} name one of them twice; name each once")
        return self
