"""What the owner of a table says of it, so that a preparation can be made of this table or of those of many sites."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ppfl.data.column_sums import Center, ColumnPlan, TableFacts
from ppfl.data.columns import ONE_VALUE
from ppfl.data.preparation import GAP, OTHER, MissingRule, PreparationSettings
from ppfl.data.tables import Array, DataTable
from ppfl.errors import DataError


def describe_columns(table: DataTable, settings: PreparationSettings, train: Array) -> TableFacts:
    """What the columns have, and the levels of text in the training rows that the settings do not name.

    >>> table = DataTable.of({"shop": [1, 2], "day": ["mo", "tu"], "sold": [3, 4]}, "shop", "sold")
    >>> describe_columns(table, PreparationSettings(), np.arange(2)).levels
    {'day': ('mo', 'tu')}
    """
    kinds: dict[str, Literal["numbers", "text", "empty"]] = {}
    levels: dict[str, tuple[str, ...]] = {}
    for name in table.features:
        values = table.features[name]
        kinds[name] = "text" if values.dtype == object else "numbers" if values.notna().any() else "empty"
        has_few_levels = table.named or table.left_out.get(name, ONE_VALUE) == ONE_VALUE
        if kinds[name] == "text" and name not in settings.levels and has_few_levels:
            levels[name] = tuple(sorted(_texts(table, name, train, settings.missing).unique().tolist()))
    return TableFacts(kinds=kinds, levels=levels, left_out=dict(table.left_out), named=table.named)


def sum_rows(table: DataTable, plan: ColumnPlan, train: Array, center: Center | None = None) -> dict[str, Tensor]:
    """Over the training rows: counts and sums, or with a center the sums of deviations and their squares.

    Missing values and rows that are left out are those of all rows.
    """
    found: dict[str, Any] = {"sites": 1, "clients": len(np.unique(table.clients[train].astype(str)))}
    columns = [table.numbers(name)[train] for name in plan.numbers]
    numbers = np.array(columns, dtype=np.float64).reshape(len(columns), len(train))
    known = ~np.isnan(numbers)
    if center is not None:
        mean, unit = (np.array(part)[:, None] for part in (center.mean, center.unit))
        away = np.where(known, (numbers - mean) / unit, 0.0)
        found |= {"deviation": away.sum(1), "square": (away**2).sum(1)}
    else:
        filled = np.where(known, numbers, 0.0)
        levels = [_count_levels(table, name, plan, train) for name in plan.levels]
        found |= {
            "rows": len(train), "dropped": (~table.usable(plan.missing)).sum(),
            "log_factorials": _sum_log_factorials(table.targets[train]) if plan.count_target else 0,
            "missing": [table.features[name].isna().sum() for name in plan.columns],
            "known": known.sum(1), "sum": filled.sum(1), "size": np.abs(filled).sum(1),
            "levels": [count for counts in levels for count in counts],
        }  # fmt: skip
    return {name: torch.as_tensor(np.asarray(part), dtype=torch.float64).reshape(-1) for name, part in found.items()}


def _sum_log_factorials(targets: Array) -> float:
    """The sum of log y!."""
    counts = targets.astype(np.float64) if targets.dtype.kind in "iuf" else None
    if counts is None or (counts < 0).any():
        raise DataError("targets are not counts: expected numbers from 0 on, with task = 'regression' under [data]")
    return float(torch.lgamma(torch.from_numpy(counts) + 1).sum())


def _texts(table: DataTable, name: str, train: Array, missing: MissingRule) -> pd.Series:
    values = table.features[name].iloc[train].astype(object)
    return values.fillna(GAP) if missing == "fill" else values.dropna()


def _count_levels(table: DataTable, name: str, plan: ColumnPlan, train: Array) -> list[float]:
    levels = plan.levels[name]
    counts = _texts(table, name, train, plan.missing).value_counts().to_dict()
    unknown = sorted(str(level) for level in counts if level not in set(levels))
    if unknown and OTHER not in levels:
        raise DataError(
            f"column {name!r} has level {unknown[0]!r:.40}, which is not one of its levels in [preparation]; add "
            f"it, or {OTHER!r} for all others"
        )
    rest = float(sum(counts[level] for level in unknown))
    return [counts.get(level, 0) + rest * (level == OTHER) for level in levels]
