"""The settings of a table fit, and the rows and columns that it can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import DataError, SettingError
from ...data.client_rows import as_ids, group_rows
from ...data.raw_arrays import quoted
from ...data.samples import held_out
from ...data.table_readers import with_text_names
from ..client_ids import Array
from ..regression import PopulationClassifier, PopulationRegressor
from .encoding import Encoding, choose_features, is_plain
from .target import Target

SMALLEST, LARGEST = 1e-100, 1e100  # of a column's largest value


@dataclass(frozen=True)
class TableSettings:
    """What to fit. The fields from `shared` on are settings of the estimators."""

    client: str
    target: str
    family: str | None = None  # guessed from the target if None
    columns: Sequence[str] = ()  # all other columns if empty
    ks: Sequence[int] = (3,)  # the one with the lowest BIC is used
    test_fraction: float = 0.2  # of each client's rows
    seed: int = 0
    shared: Sequence[str] = ()
    mix: str = "weights"
    penalty: float = 0.0
    affinity: str = "uniform"
    ridge: float = 1.0
    n_init: int = 8

    def __post_init__(self) -> None:
        if self.client == self.target:
            raise SettingError(f"column {self.client!r} is both client and target; name two columns")
        if not self.ks:
            raise SettingError("there is no number of canonical models to try; set k, such as 3 or 1,2,3")
        if self.affinity != "uniform" and not self.penalty:
            raise SettingError(
                f"affinity is {self.affinity!r} but penalty is 0, so it has no effect; set a penalty such as 0.01"
            )

    def estimator(self, target: Target, k: int, shared: Any) -> Any:
        """The estimator for K canonical models, not fitted."""
        more = {"mix": self.mix, "penalty": self.penalty, "affinity": self.affinity, "n_init": self.n_init}
        return _make_estimator(target, k, shared=shared, ridge=self.ridge, random_state=self.seed, **more)

    def pooled(self, target: Target) -> Any:
        """The estimator for one model for all, not fitted."""
        return _make_estimator(target, 1, ridge=self.ridge)


def _make_estimator(target: Target, k: int, **settings: Any) -> Any:
    if target.classes:
        return PopulationClassifier(k, **settings)
    return PopulationRegressor(k, family=target.family, **settings)


class PreparedTable(NamedTuple):
    """The usable rows of a table."""

    frame: Any
    clients: Array  # (n,), as text
    target: Target
    features: tuple[str, ...]
    left_out: dict[str, str]  # column -> reason
    incomplete: int  # number of rows with missing values, which are left out
    is_test: Array  # (n,)

    @property
    def encoding(self) -> Encoding:
        """The encoding with the levels of all rows."""
        return Encoding.of(self.frame, self.features)


def prepare_table(frame: Any, settings: TableSettings) -> PreparedTable:
    """Check a table, and take the wanted columns and all rows without missing values."""
    frame = with_text_names(frame)
    excluded = (settings.client, settings.target)
    features = choose_features(frame, excluded, settings.columns)
    if not features.names:
        raise DataError(f"no column is left for features besides {quoted(excluded)}; add some to the table")
    used = frame[[*excluded, *features.names]]
    kept = used.dropna()
    if kept.empty:
        raise DataError(f"none of {len(frame)} rows has a value in each of {quoted(list(used.columns), 12)}; fill some")
    if odd := [name for name, dtype in kept.dtypes.items() if dtype.kind == "c"]:
        raise DataError(f"column {quoted(odd)} has complex numbers; use their real and imaginary parts as two columns")
    if odd := [name for name in kept.columns if not is_plain(kept[name])]:
        raise DataError(f"column {quoted(odd)} has lists or bytes; expected numbers or text: convert it first")
    numbers = kept.select_dtypes("number")
    if infinite := [name for name in numbers if not bool(np.isfinite(np.array(numbers[name], dtype=float)).all())]:
        raise DataError(f"column {quoted(infinite)} has infinite values; correct them, or drop the rows")
    _check_sizes(numbers)
    clients = as_ids(kept[settings.client].to_numpy())
    if (most := max(settings.ks)) > (count := len(np.unique(clients))):
        raise SettingError(f"k is {most} but there are {count} clients; set k to at most this number")
    target = Target.of(settings.target, kept[settings.target], settings.family)
    is_test = _hold_out(clients, target, settings)
    return PreparedTable(kept, clients, target, features.names, features.left_out, len(used) - len(kept), is_test)


def _check_sizes(numbers: Any) -> None:
    """Squares of numbers, and sums of these over all rows, must neither overflow nor vanish."""
    for name in numbers:
        largest = float(np.abs(np.array(numbers[name], dtype=float)).max())
        if largest and not SMALLEST <= largest <= LARGEST:
            expected = f"{SMALLEST:.0e} to {LARGEST:.0e}"
            raise DataError(f"column {name!r} has values up to {largest:.3g}; expected {expected}: change its unit")


def _hold_out(clients: Array, target: Target, settings: TableSettings) -> Array:
    """(n,), True for a random part of each client's rows; some rows of every class stay for training."""
    rows = group_rows(clients)
    drawn = held_out(rows.sizes, rows.ids, settings.test_fraction, settings.seed, "test").numpy()
    is_test = np.zeros(len(clients), dtype=bool)
    is_test[slice(None) if rows.order is None else rows.order.numpy()] = drawn
    if target.classes:
        missing = np.setdiff1d(target.values, target.values[~is_test])
        is_test &= ~np.isin(target.values, missing)
    return is_test
