"""A preparation of a table from sums over its rows: sites that add them up agree on what one table would give.

Two passes, because sums of squares of raw numbers lose their digits: first counts and sums, from which the means
follow, and then sums of squares about the means. Errors of the means that rounding leaves are corrected by the sums of
deviations in the second pass (Chan, Golub and LeVeque 1983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ppfl.core.settings import Settings
from ppfl.data.columns import MOST_LEVELS, NO_VALUE, ONE_VALUE, ROW_NUMBERS
from ppfl.data.preparation import (
    GAP,
    OTHER,
    Finite,
    MissingRule,
    Preparation,
    PreparationSettings,
    PreparedColumn,
    find_levels,
)
from ppfl.errors import DataError

TARGET = "\0target"  # among the names of columns of numbers, where targets are standardised
_CONSTANT = 4 * 2.0**-52  # a deviation below this share of the numbers is rounding error
Sums = Mapping[str, Tensor]


class TableFacts(Settings):
    """What the owner of a table says of its columns, before anything is summed.

    named: the features were chosen by name, so that none is left out.
    left_out: the columns that would be left out if there were no other table, each with the reason.
    levels: of text columns in training rows, unless they are in the settings or too many.
    """

    kinds: dict[str, Literal["numbers", "text", "empty"]]
    levels: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    named: bool = True


class ColumnPlan(Settings):
    """Of which columns to take which sums; the same at all sites."""

    columns: tuple[str, ...]
    numbers: tuple[str, ...]  # with TARGET, where that is standardised
    levels: dict[str, tuple[str, ...]]  # of text columns, all that occur
    missing: MissingRule = "refuse"
    count_target: bool = False

    def sizes(self, *, second: bool) -> dict[str, int]:
        """How many numbers each of the sums has."""
        numbers = len(self.numbers)
        if second:
            return {"sites": 1, "clients": 1, "deviation": numbers, "square": numbers}
        return {
            "sites": 1, "clients": 1, "rows": 1, "dropped": 1, "log_factorials": 1,
            "missing": len(self.columns), "known": numbers, "sum": numbers, "size": numbers,
            "levels": sum(map(len, self.levels.values())),
        }  # fmt: skip

    @property
    def text(self) -> dict[str, slice]:
        """Where the counts of each column's levels are."""
        found, at = {}, 0
        for name, levels in self.levels.items():
            found[name] = slice(at, at + len(levels))
            at += len(levels)
        return found


class Center(Settings):
    """About which deviations are taken in the second pass, and in which unit, one of each for a column of numbers."""

    mean: tuple[Finite, ...]
    unit: tuple[Finite, ...]


Ask = Callable[[ColumnPlan, Center | None], Sums]


def choose_columns(described: Mapping[str, TableFacts], settings: PreparationSettings) -> dict[str, str]:
    """The columns that are left out, each with the reason, from what every site says of its own.

    A column that the data or the preparation name is never left out. Row numbers have to be row numbers at every site,
    and one value has to be the same one: whether numbers are is known after the first sums.

    >>> north = TableFacts(kinds={"age": "numbers", "note": "text"}, left_out={"note": "99 levels"}, named=False)
    >>> choose_columns({"north": north}, PreparationSettings())
    {'note': '99 levels'}
    """
    left_out = {}
    for column in _columns(described):
        if any(said.named for said in described.values()) or column in {*settings.text, *settings.levels}:
            continue
        known = [said for said in described.values() if said.kinds.get(column) != "empty"]
        reasons = [said.left_out.get(column, "") for said in known]
        found = {level for said in known for level in said.levels.get(column, ())} - {GAP}
        if not known:
            left_out[column] = NO_VALUE
        elif any(reason not in ("", ROW_NUMBERS, ONE_VALUE) for reason in reasons):
            left_out[column] = next(reason for reason in reasons if reason not in ("", ROW_NUMBERS, ONE_VALUE))
        elif len(found) > MOST_LEVELS:
            left_out[column] = f"{len(found)} levels"
        elif set(reasons) == {ROW_NUMBERS}:
            left_out[column] = ROW_NUMBERS
        elif set(reasons) == {ONE_VALUE} and len(found) == 1:
            left_out[column] = ONE_VALUE
    return left_out


def make_plan(
    described: Mapping[str, TableFacts], settings: PreparationSettings, left_out: Mapping[str, str] = {}
) -> ColumnPlan:
    """From what every site says of its columns.

    >>> north = TableFacts(kinds={"age": "numbers", "ward": "text"}, levels={"ward": ["a", "b"]})
    >>> south = TableFacts(kinds={"age": "numbers", "ward": "empty"})
    >>> make_plan({"north": north, "south": south}, PreparationSettings()).levels
    {'ward': ('a', 'b')}
    """
    columns = tuple(column for column in _columns(described) if column not in left_out)
    numbers, levels = [], {}
    for column in columns:
        kinds = {site: said.kinds.get(column, "empty") for site, said in described.items()}
        known = {kind: site for site, kind in reversed(kinds.items()) if kind != "empty"}
        if not known:
            raise DataError(f"column {column!r} has no value in any row; leave it out with drop")
        if len(known) > 1:
            raise DataError(
                f"column {column!r} has text at site {known['text']!r} and numbers at site {known['numbers']!r}; "
                f"correct the cells, or name it under text in [preparation]"
            )
        if "numbers" in known:
            numbers.append(column)
        else:
            levels[column] = _named_levels(column, settings) or _union(column, described)
    if settings.standardise_target:
        numbers.append(TARGET)
    return ColumnPlan(
        columns=columns, numbers=tuple(numbers), levels=levels, missing=settings.missing,
        count_target=settings.count_target,
    )  # fmt: skip


def _columns(described: Mapping[str, TableFacts]) -> list[str]:
    return list(next(iter(described.values())).kinds)


def _named_levels(column: str, settings: PreparationSettings) -> tuple[str, ...]:
    """The levels that the settings name, and one for gaps where these are filled."""
    named = settings.levels.get(column, ())
    return (*named, GAP) if named and settings.missing == "fill" and GAP not in named else named


def _union(column: str, described: Mapping[str, TableFacts]) -> tuple[str, ...]:
    found = sorted({level for said in described.values() for level in said.levels.get(column, ())})
    if not found:
        raise DataError(f"column {column!r} has no value in any training row; leave it out with drop")
    return tuple(found)


def agree(
    described: Mapping[str, TableFacts], settings: PreparationSettings, ask: Ask, step: float = 0.0
) -> Preparation:
    """The preparation of the rows of one table, or of the tables of many sites together.

    Args:
        described: What every site says of its table.
        settings: What to do with text, gaps and units.
        ask: Gives the sums over the training rows of all sites: counts and sums, or with a center the deviations.
        step: To which the sums are rounded, as secure sums are.
    """
    left_out = choose_columns(described, settings)
    plan = make_plan(described, settings, left_out)
    first = ask(plan, None)
    known = first["known"].clamp_min(1)
    size = first["size"] / known
    unit = torch.where(size > 0, size, 1.0)
    center = Center(mean=tuple((first["sum"] / known).tolist()), unit=tuple(unit.tolist()))
    second = ask(plan, center)
    rows = round(float(first["rows"]))
    measured = _measure(plan, center, first, second, rows, step)
    missing = dict(zip(plan.columns, first["missing"].tolist(), strict=True))
    columns = []
    for name in plan.columns:
        count = round(missing[name])
        if name in plan.levels:
            counts = first["levels"][plan.text[name]].round().int().tolist()
            by_level = dict(zip(plan.levels[name], counts, strict=True))
            columns.append(_text_column(name, by_level, rows, count, settings))
            continue
        mean, scale = measured[name]
        if not scale and not any(said.named for said in described.values()):
            left_out[name] = ONE_VALUE
            continue
        kept = ((mean,), (scale,)) if settings.standardise else ((0.0,), (1.0,))
        fill = mean if settings.missing == "fill" else None
        columns.append(PreparedColumn(name=name, mean=kept[0], scale=kept[1], fill=fill, missing=count))
    if plan.columns and not any(column.mean for column in columns):
        raise DataError(f"column {plan.columns[0]!r} has one value, and there is no other column; name other columns")
    target = (0.0, 1.0)
    if settings.standardise_target:
        mean, scale = measured[TARGET]
        target = mean, scale or 1.0
    return Preparation(
        columns=tuple(columns), rows=rows, dropped=round(float(first["dropped"])), missing=settings.missing,
        target=target, log_factorials=float(first["log_factorials"]), left_out=left_out,
    )  # fmt: skip


def _measure(
    plan: ColumnPlan, center: Center, first: Sums, second: Sums, rows: int, step: float
) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each column of numbers; 0 for one that has a single value."""
    found = {}
    each = zip(plan.numbers, center.mean, center.unit, first["known"].tolist(), second["deviation"].tolist(),
               second["square"].tolist(), strict=True)  # fmt: skip
    for name, mean, unit, known, deviation, square in each:
        if not known >= 1:  # values in test rows alone
            raise DataError(f"column {name!r} has no value in any training row; leave it out with drop")
        squares = max(0.0, square - deviation**2 / known)  # rows that are filled with the mean deviate by 0
        share = math.sqrt(squares / rows)
        constant = share <= _CONSTANT or squares <= 4 * step or unit * share <= 4 * step / known
        found[name] = mean + unit * deviation / known, 0.0 if constant else unit * share
    return found


def _text_column(
    name: str, counts: dict[str, int], rows: int, missing: int, settings: PreparationSettings
) -> PreparedColumn:
    named = settings.levels.get(name)
    if named is None:
        levels, rare = find_levels(counts)
    else:
        levels, rare = tuple(level for level in counts if level in named or counts[level]), ()
    merged = sum(counts[level] for level in rare)
    shares = [(counts.get(level, 0) + merged * (level == OTHER)) / rows for level in levels[1:]]
    scales = [math.sqrt(max(0.0, share * (1 - share))) for share in shares]
    if not settings.standardise:
        shares, scales = [0.0] * len(shares), [1.0] * len(scales)
    fill = GAP if settings.missing == "fill" else None
    return PreparedColumn(
        name=name, levels=levels, rare=rare, mean=tuple(shares), scale=tuple(scales), fill=fill, missing=missing
    )


def flat_sums(parts: Mapping[str, Sequence[float] | Tensor | float]) -> dict[str, Tensor]:
    """As a reply carries them: one vector per name, float64."""
    return {name: torch.as_tensor(part, dtype=torch.float64).reshape(-1) for name, part in parts.items()}
