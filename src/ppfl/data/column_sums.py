"""A preparation of a table from sums over its rows: sites that add them up agree on what one table would give.

Two passes, because sums of squares of raw numbers lose their digits: first counts and sums, from which the means
follow, and then sums of squares about the means. Errors of the means that rounding leaves are corrected by the sums of
deviations in the second pass (Chan, Golub and LeVeque 1983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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


class Center(Settings):
    """About which deviations are taken in the second pass, and in which unit, one of each for a column of numbers."""

    mean: tuple[Finite, ...]
    unit: tuple[Finite, ...]


Ask = Callable[[ColumnPlan, Center | None], Sums]


def make_plan(described: Mapping[str, TableFacts], settings: PreparationSettings) -> tuple[ColumnPlan, dict[str, str]]:
    """The sums to take, and the columns that are left out, each with the reason, from what every site says of its own.

    >>> north = TableFacts(kinds={"age": "numbers", "ward": "text"}, levels={"ward": ["a", "b"]})
    >>> south = TableFacts(kinds={"age": "numbers", "ward": "empty"})
    >>> make_plan({"north": north, "south": south}, PreparationSettings())[0].levels
    {'ward': ('a', 'b')}
    """
    numbers: list[str] = []
    levels: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    columns = next(iter(described.values())).kinds
    for column in columns:
        kinds = {site: said.kinds.get(column, "empty") for site, said in described.items()}
        known = {kind: site for site, kind in reversed(kinds.items()) if kind != "empty"}
        found = tuple(sorted({level for said in described.values() for level in said.levels.get(column, ())}))
        reasons = [said.left_out.get(column, "") for site, said in described.items() if kinds[site] != "empty"]
        is_named = any(said.named for said in described.values()) or column in settings.names
        if not is_named and (reason := _reason_to_leave_out(reasons, {*found} - {GAP})):
            left_out[column] = reason
            continue
        if not known:
            raise DataError(f"column {column!r} has no value in any row; leave it out with drop")
        if len(known) > 1:
            raise DataError(
                f"column {column!r} has text at site {known['text']!r} and numbers at site {known['numbers']!r}; "
                f"correct the cells, or name it under text in [preparation]"
            )
        if "numbers" in known:
            numbers.append(column)
            continue
        named = settings.levels.get(column, ())
        gaps = (GAP,) if named and settings.missing == "fill" and GAP not in named else ()
        levels[column] = (*named, *gaps) or found
        if not levels[column]:
            raise DataError(f"column {column!r} has no value in any training row; leave it out with drop")
    plan = ColumnPlan(
        columns=tuple(column for column in columns if column not in left_out),
        numbers=(*numbers, TARGET) if settings.standardise_target else tuple(numbers), levels=levels,
        missing=settings.missing, count_target=settings.count_target,
    )  # fmt: skip
    return plan, left_out


def _reason_to_leave_out(reasons: Sequence[str], levels: Collection[str]) -> str:
    """Why a column is not used, from the reasons of all sites that have values in it; empty for a useful column.

    It has to have row numbers at every site, and the same one value: whether numbers are the same is known after the
    first sums.
    """
    if not reasons:
        return NO_VALUE
    if other := [reason for reason in reasons if reason not in ("", ROW_NUMBERS, ONE_VALUE)]:
        return other[0]
    if len(levels) > MOST_LEVELS:
        return f"{len(levels)} levels"
    alike = {*reasons} == {ROW_NUMBERS} or ({*reasons} == {ONE_VALUE} and len(levels) == 1)
    return reasons[0] if alike else ""


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
    plan, left_out = make_plan(described, settings)
    first = ask(plan, None)
    known = first["known"].clamp_min(1)
    size = first["size"] / known
    unit = torch.where(size > 0, size, 1.0)
    center = Center(mean=tuple((first["sum"] / known).tolist()), unit=tuple(unit.tolist()))
    second = ask(plan, center)
    rows = round(float(first["rows"]))
    measured = _measure(plan, center, first, second, rows, step)
    missing = dict(zip(plan.columns, first["missing"].tolist(), strict=True))
    of_levels = iter(first["levels"].round().int().tolist())
    columns = []
    for name in plan.columns:
        count = round(missing[name])
        if name in plan.levels:
            by_level = {level: next(of_levels) for level in plan.levels[name]}
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
