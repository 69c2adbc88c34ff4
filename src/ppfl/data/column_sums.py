"""A preparation of a table from sums over its rows: sites that add them up agree on what one table would give.

Two passes, because sums of squares of raw numbers lose their digits: first counts and sums, from which the means
follow, and then sums of squares about the means. Errors of the means that rounding leaves are corrected by the sums of
deviations in the second pass (Chan, Golub and LeVeque 1983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppfl.data.encoded_column import EncodedColumn
from ppfl.data.preparation import Preparation, PreparedColumn
from ppfl.data.preparation_settings import PreparationSettings
from ppfl.errors import DataError

TARGET = "\0target"  # among the names of columns of numbers, where targets are standardised
MOST_LEVELS = 200  # of a text column, unless they are named
_CONSTANT = 4 * 2.0**-52  # a deviation below this share of the numbers is rounding error
Sums = Mapping[str, Tensor]


class ColumnPlan(NamedTuple):
    """Of which columns to take which sums; the same at all sites."""

    columns: tuple[str, ...]
    numbers: tuple[str, ...]  # with TARGET, where that is standardised
    levels: dict[str, tuple[str, ...]]  # of text columns, all that occur

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


class Center(NamedTuple):
    """About which deviations are taken in the second pass, and in which unit, one of each for a column of numbers."""

    mean: tuple[float, ...]
    unit: tuple[float, ...]


Ask = Callable[[ColumnPlan, Center | None], Sums]


def make_plan(described: Mapping[str, Any], settings: PreparationSettings) -> ColumnPlan:
    """From what every site says of its columns: {"kinds": {column: kind}, "levels": {column: names}}.

    >>> north = {"kinds": {"age": "numbers", "ward": "text"}, "levels": {"ward": ["a", "b"]}}
    >>> south = {"kinds": {"age": "numbers", "ward": "empty"}, "levels": {}}
    >>> make_plan({"north": north, "south": south}, PreparationSettings()).levels
    {'ward': ('a', 'b')}
    """
    columns = tuple(next(iter(described.values()))["kinds"])
    numbers, levels = [], {}
    for column in columns:
        kinds = {site: said["kinds"].get(column) for site, said in described.items()}
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
            levels[column] = settings.levels.get(column) or _union(column, described)
    if settings.standardise_target:
        numbers.append(TARGET)
    return ColumnPlan(columns, tuple(numbers), levels)


def _union(column: str, described: Mapping[str, Any]) -> tuple[str, ...]:
    found = sorted({str(level) for said in described.values() for level in said["levels"].get(column, ())})
    if not found:
        raise DataError(f"column {column!r} has no value in any training row; leave it out with drop")
    if len(found) > MOST_LEVELS:
        raise DataError(
            f"column {column!r} has {len(found)} levels, such as {found[0]!r:.40}; leave it out with drop, or name its "
            f"levels under [preparation.levels]"
        )
    return tuple(found)


def agree(described: Mapping[str, Any], settings: PreparationSettings, ask: Ask, step: float = 0.0) -> Preparation:
    """The preparation of all rows together. ask: gives the sums over all of them; step: to which these are rounded."""
    plan = make_plan(described, settings)
    first = ask(plan, None)
    known = first["known"].clamp_min(1)
    size = first["size"] / known
    center = Center(tuple((first["sum"] / known).tolist()), tuple(torch.where(size > 0, size, 1.0).tolist()))
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
        else:
            mean, scale = measured[name]
            kept = ((mean,), (scale,)) if settings.standardise else ((0.0,), (1.0,))
            columns.append(PreparedColumn(name, (), (), *kept, mean if settings.missing == "fill" else None, count))
    if not any(column.mean for column in columns):
        raise DataError(f"column {columns[0].name!r} has one value, and there is no other column; name other columns")
    target = (0.0, 1.0)
    if settings.standardise_target:
        mean, scale = measured[TARGET]
        target = mean, scale or 1.0
    dropped, factorials = round(float(first["dropped"])), float(first["log_factorials"])
    return Preparation(tuple(columns), rows, dropped, target, factorials)


def _measure(
    plan: ColumnPlan, center: Center, first: Sums, second: Sums, rows: int, step: float
) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each column of numbers; 0 for one that has a single value."""
    found = {}
    each = zip(plan.numbers, *center, first["known"].tolist(), second["deviation"].tolist(), second["square"].tolist(),
               strict=True)  # fmt: skip
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
    encoding = EncodedColumn.of_counts(name, counts) if named is None else EncodedColumn(name, named)
    merged = sum(counts[level] for level in encoding.rare)
    shares = [(counts.get(level, 0) + merged * (level == "other")) / rows for level in encoding.levels[1:]]
    scales = [math.sqrt(max(0.0, share * (1 - share))) for share in shares]
    if not settings.standardise:
        shares, scales = [0.0] * len(shares), [1.0] * len(scales)
    return PreparedColumn(name, encoding.levels, encoding.rare, tuple(shares), tuple(scales), None, missing)


def flat_sums(parts: Mapping[str, Sequence[float] | Tensor | float]) -> dict[str, Tensor]:
    """As a reply carries them: one vector per name, float64."""
    return {name: torch.as_tensor(part, dtype=torch.float64).reshape(-1) for name, part in parts.items()}
