"""The rows of a table before they are prepared: text, and numbers with gaps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.data.column_sums import TARGET, Center, ColumnPlan, agree, flat_sums
from ppfl.data.encoded_column import OTHER, is_text
from ppfl.data.federation import Federation
from ppfl.data.preparation import MISSING, Preparation, as_numbers, as_text
from ppfl.data.preparation_settings import PreparationSettings
from ppfl.data.samples import Samples
from ppfl.data.table_readers import choose_columns, with_text_names
from ppfl.errors import DataError


@dataclass(frozen=True, eq=False)
class TableRows:
    """A table, and which of its rows belong to which client and split."""

    frame: Any  # the feature columns, as text or float64
    federation: Federation  # its x has the number of each row (n, 1), its features are the columns of the frame
    settings: PreparationSettings
    targets: Any  # (n,) float64, before they are rounded to float32; None for classes
    gaps: Any  # (all rows, columns), True where a value is missing
    left_out: Any  # (all rows,), True for those that the frame no longer has
    owners: Any  # (all rows,), their clients

    @classmethod
    def of(
        cls, frame: Any, client: str, target: str, preparation: PreparationSettings, *,
        columns: Sequence[str] | None = None, drop: Sequence[str] = (), is_test: str | None = None, **settings: Any,
    ) -> TableRows:  # fmt: skip
        """From a pandas table; settings as for `from_table`.

        >>> import pandas as pd
        >>> table = pd.DataFrame({"shop": ["a", "a", "b"], "kind": ["x", "y", "x"], "sold": [1.5, 2.5, 3.0]})
        >>> rows = TableRows.of(table, "shop", "sold", PreparationSettings(), test_fraction=0)
        >>> rows.describe()
        {'kinds': {'kind': 'text'}, 'levels': {'kind': ['x', 'y']}}
        """
        frame = with_text_names(frame)
        features = choose_columns(frame, client, target, columns, drop, is_test)
        if absent := [name for name in (*preparation.text, *preparation.levels) if name not in features]:
            raise DataError(f"[preparation] names column {absent[0]!r}, which is no feature; correct its name")
        parts = {name: _as_kind(name, frame[name], preparation) for name in features}
        values = frame[features].assign(**parts)
        missing = values.isna()
        kept = _kept_rows(missing, frame[[client, target]].isna().any(axis=1), preparation)
        used = frame[kept]
        federation = Federation.from_arrays(
            np.arange(len(used))[:, None], used[target].to_numpy(), used[client].to_numpy(), tokens=True,
            is_test=None if is_test is None else used[is_test].to_numpy(), features=features, **settings,
        )  # fmt: skip
        is_number = federation.train.y.is_floating_point() and federation.train.y.dim() == 1
        targets = used[target].to_numpy(dtype=np.float64) if is_number else None
        owners = frame[client].astype(str).to_numpy()
        whole = values[kept].reset_index(drop=True)
        return cls(whole, federation, preparation, targets, missing.to_numpy(), ~kept, owners)

    def with_clients(self, federation: Federation, only: Sequence[str] | None = None) -> TableRows:
        """With other names of the clients, or `only` some of them."""
        if only is None:
            return replace(self, federation=federation)
        mine = np.isin(self.owners, list(only))
        about = {name: getattr(self, name)[mine] for name in ("gaps", "left_out", "owners")}
        return replace(self, federation=federation, **about)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of clients, targets and all values."""
        from pandas.util import hash_pandas_object

        digest = hashlib.sha256(self.federation.fingerprint.encode())
        numbers = np.concatenate([part.x[:, 0].cpu().numpy() for part in self.federation.splits.values()])
        digest.update(hash_pandas_object(self.frame.iloc[np.sort(numbers)], index=False).to_numpy().tobytes())
        return digest.hexdigest()[:32]

    def describe(self) -> dict[str, Any]:
        """Of each column whether it has numbers, text or nothing, and the levels that [preparation] does not name."""
        kinds = {name: _kind(self.frame[name], name, self.settings) for name in self.frame.columns}
        sent = [name for name, kind in kinds.items() if kind == "text" and name not in self.settings.levels]
        return {"kinds": kinds, "levels": {name: sorted(self._text(name).unique().tolist()) for name in sent}}

    def sums(self, plan: ColumnPlan, center: Center | None = None) -> dict[str, Tensor]:
        """Over all training rows: counts and sums, or with a center the sums of deviations and their squares."""
        about = {"sites": 1.0, "clients": float(self.federation.n_clients)}
        columns = [self._numbers(name) for name in plan.numbers]
        numbers = np.array(columns, dtype=np.float64).reshape(len(columns), len(self._train))
        known = ~np.isnan(numbers)
        if center is not None:
            mean, unit = (np.array(part)[:, None] for part in center)
            away = np.where(known, (numbers - mean) / unit, 0.0)
            return flat_sums({**about, "deviation": away.sum(1), "square": (away**2).sum(1)})
        filled = np.where(known, numbers, 0.0)
        return flat_sums({
            **about, "rows": float(len(self.federation.train)), "dropped": float(self.left_out.sum()),
            "log_factorials": self._log_factorials(), "missing": self.gaps.sum(0),
            "known": known.sum(1), "sum": filled.sum(1), "size": np.abs(filled).sum(1),
            "levels": [count for name, levels in plan.levels.items() for count in self._counts(name, levels)],
        })  # fmt: skip

    def prepare(self, preparation: Preparation) -> Federation:
        """All rows as a preparation makes them."""
        x = torch.from_numpy(preparation.apply(self.frame)).float()
        shift, scale = preparation.target
        y = None if self.targets is None else torch.from_numpy((self.targets - shift) / scale).float()

        def prepared(part: Samples) -> Samples:
            rows = part.x[:, 0].cpu()
            return Samples(x[rows], part.y.cpu() if y is None else y[rows], part.offsets.cpu()).to(part.x.device)

        parts: dict[str, Any] = {split: prepared(part) for split, part in self.federation.splits.items()}
        return replace(self.federation, **parts, features=preparation.terms, preparation=preparation)

    def prepare_alone(self) -> Federation:
        """Prepared as the sums of these rows say: all rows are in one place."""
        return self.prepare(agree({"here": self.describe()}, self.settings, self.sums))

    @cached_property
    def _train(self) -> Any:
        return self.federation.train.x[:, 0].cpu().numpy()

    def _numbers(self, name: str) -> Any:
        if name != TARGET:
            return self.frame[name].to_numpy(dtype=np.float64)[self._train]
        if self.targets is None:
            raise DataError("standardise_target is for a target that is a number; leave it out for classes")
        return self.targets[self._train]

    def _log_factorials(self) -> float:
        """The sum of log y!, 0 unless targets are counts."""
        if not self.settings.count_target:
            return 0.0
        counts = None if self.targets is None else self.targets[self._train]
        if counts is None or (counts < 0).any():
            raise DataError("targets are not counts: expected numbers from 0 on, with task = 'regression' under [data]")
        return float(torch.lgamma(torch.from_numpy(counts) + 1).sum())

    def _text(self, name: str) -> Any:
        """Of the training rows."""
        values = self.frame[name].iloc[self._train]
        return as_text(values).fillna(MISSING) if self.settings.missing == "fill" else as_text(values).dropna()

    def _counts(self, name: str, levels: Sequence[str]) -> list[float]:
        counts = self._text(name).value_counts().to_dict()
        unknown = sorted(str(level) for level in counts if level not in set(levels))
        if unknown and OTHER not in levels:
            raise DataError(
                f"column {name!r} has level {unknown[0]!r:.40}, which is not one of its levels in [preparation]; add "
                f"it, or {OTHER!r} for all others"
            )
        rest = float(sum(counts[level] for level in unknown))
        return [counts.get(level, 0) + rest * (level == OTHER) for level in levels]


def _kind(values: Any, name: str, settings: PreparationSettings) -> str:
    if name in settings.text or name in settings.levels:
        return "text"
    if not values.notna().any():
        return "empty"
    return "text" if is_text(values) else "numbers"


def _as_kind(name: str, values: Any, settings: PreparationSettings) -> Any:
    return as_text(values) if _kind(values, name, settings) == "text" else as_numbers(name, values)


def _kept_rows(missing: Any, unusable: Any, settings: PreparationSettings) -> Any:
    """(n,), True for the rows that are used."""
    incomplete = missing.any(axis=1)
    if settings.missing == "refuse" and incomplete.any():
        counts = ", ".join(f"{name!r} ({n})" for name, n in missing.sum().items() if n)
        raise DataError(
            f"columns {counts} have missing values; set missing = 'drop' or 'fill' in [preparation], or fill them"
        )
    kept = ~(incomplete | unusable) if settings.missing == "drop" else incomplete | True
    if not kept.any():
        raise DataError(f"none of {len(kept)} rows has all its values; set missing = 'fill', or drop columns")
    return kept.to_numpy()
