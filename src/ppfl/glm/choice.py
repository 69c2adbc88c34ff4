"""Personalized random utility models of choices, client by client (Feng et al. 2020, Eq. O-feng).

The utility of alternative a for client i is x_a' b_i plus Gumbel noise, and the client takes the alternative with the
highest utility. So the probability of a choice is a softmax over the alternatives of a situation: a conditional logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from ..errors import DataError
from .base import NEW, PopulationGLM
from .columns import Array, ColumnScaling, TargetUnits, encode_ids
from .families import MultinomialFamily
from .rows import ChoiceDesign, RowLikelihood


class Situations(NamedTuple):
    """The situation of every row of a long table, and its place among the alternatives of that situation."""

    ids: tuple[Any, ...]  # of n situations
    situation: Array  # (rows,), 0 to n - 1
    place: Array  # (rows,), 0 to J - 1 within its situation
    most: int  # J, the largest number of alternatives

    @classmethod
    def of(cls, situations: Any, rows: int) -> Situations:
        if situations is None:
            raise DataError("situations is None; give the situation every row belongs to")
        ids, situation = encode_ids("situation", situations, rows)
        sizes = np.bincount(situation)
        if (sizes < 2).any():
            single = ids[int(np.argmin(sizes))]
            raise DataError(f"situation {single!r} has one alternative, so nothing to choose; give it two or more")
        order = np.argsort(situation, kind="stable")
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        place = np.empty(rows, dtype=np.int64)
        place[order] = np.arange(rows) - np.repeat(first, sizes)
        return cls(ids, situation, place, int(sizes.max()))

    @property
    def total(self) -> int:
        return len(self.ids)

    def arrange(self, x: Tensor) -> Tensor:
        """Rows (rows, q) as (n, J, q), with 0 where a situation has fewer than J alternatives."""
        whole = x.new_zeros(self.total, self.most, x.shape[1])
        whole[self.situation, self.place] = x
        return whole

    def available(self) -> Tensor:
        """(n, J), whether a situation has an alternative at a place."""
        mask = torch.zeros(self.total, self.most, dtype=torch.bool)
        mask[self.situation, self.place] = True
        return mask

    def center(self, x: Array) -> Array:
        """Subtract the mean of each situation: only differences between alternatives matter for a choice."""
        sums = np.zeros((self.total, x.shape[1]))
        np.add.at(sums, self.situation, x)
        centered = x - (sums / np.bincount(self.situation)[:, None])[self.situation]
        # a column that is the same for all alternatives must not leave rounding errors that look like data
        return np.where(np.abs(centered) <= 1e-12 * np.abs(x).max(0), 0.0, centered)


class PopulationChoice(PopulationGLM):
    """K canonical tastes, and one membership per client with its share of each.

    The table is in long format, with one row for every alternative of every situation. `situations` says which rows
    are alternatives to each other, and `y` is 1 for the alternative that was taken.

    >>> random = np.random.default_rng(0)
    >>> price = random.normal(size=(400, 3))
    >>> sensitive = np.repeat(np.arange(40), 10) % 2  # every other client dislikes high prices
    >>> taken = (random.gumbel(size=(400, 3)) - 3 * price * sensitive[:, None]).argmax(1)
    >>> table = dict(situations=np.repeat(np.arange(400), 3), clients=np.repeat(np.arange(40), 30))
    >>> y = (np.arange(3) == taken[:, None]).ravel()
    >>> model = PopulationChoice(k=2, random_state=0).fit(price.reshape(-1, 1), y, **table)
    >>> bool(model.canonical_coef_.min() < -2), bool(abs(model.canonical_coef_).min() < 0.3)
    (True, True)
    """

    def __init__(
        self,
        k: Any = 3,
        *,
        residual: str | None = "auto",
        choose: str = "held_out",
        mix: str = "weights",
        penalty: float = 0.0,
        affinity: Any = "uniform",
        shared: Any = None,
        ridge: float = 1.0,
        n_init: int = 1,
        tol: float = 1e-6,
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            k, residual=residual, choose=choose, mix=mix, penalty=penalty, affinity=affinity, shared=shared,
            ridge=ridge, fit_intercept=False, n_init=n_init, tol=tol, max_iter=max_iter, random_state=random_state,
        )  # fmt: skip

    def fit(self, X: Any, y: Any, situations: Any, clients: Any = None) -> Self:
        """Fits the population.

        Args:
            X: (rows, d), one row for every alternative.
            y: (rows,), 1 for the alternative that was taken, else 0.
            situations: (rows,), which rows are alternatives to each other.
            clients: (rows,), the client of every row; without it the fit is a plain conditional logit.
        """
        x, taken = validate_data(self, X, y, dtype=np.float64)
        grouping = Situations.of(situations, len(x))
        ids, codes = _situation_clients(grouping, clients)
        self._family, self._units, self._between = MultinomialFamily(grouping.most), TargetUnits(), ()
        self._has_offset = False
        x = grouping.center(x)
        self._scaling = ColumnScaling.fit(x, np.ones(len(x)), self._names(x), self.shared, intercept=False)
        rows = self._situation_rows(x, _chosen_places(grouping, taken), grouping, codes, len(ids))
        return self._fit_rows(rows, ids, has_clients=clients is not None)

    def onboard(self, X: Any, y: Any, situations: Any, clients: Any) -> Any:  # type: ignore[override]
        """Finds the memberships of clients that `fit` did not have. The canonical tastes stay as they are.

        Returns:
            The new memberships. The clients are known to the model from then on.
        """
        check_is_fitted(self, "fit_")
        x, taken = validate_data(self, X, y, dtype=np.float64, reset=False)
        grouping = Situations.of(situations, len(x))
        self._new_clients(clients, len(x))
        ids, codes = _situation_clients(grouping, clients)
        chosen = _chosen_places(grouping, taken)
        return self._onboard_rows(self._situation_rows(grouping.center(x), chosen, grouping, codes, len(ids)), ids)

    def predict_proba(self, X: Any, situations: Any, clients: Any = None) -> Array:
        """The probability that each row is taken; probabilities sum to 1 over a situation."""
        check_is_fitted(self, "fit_")
        x = validate_data(self, X, dtype=np.float64, reset=False)
        grouping = Situations.of(situations, len(x))
        rows = self._situation_rows(grouping.center(x), np.zeros(grouping.total), grouping, None)
        by_situation: Any = clients
        if clients is not None and not (isinstance(clients, str) and clients == NEW):
            ids, codes = _situation_clients(grouping, clients)
            by_situation = [ids[code] for code in codes]
        mean = self._mean_of(rows, self._positions(by_situation, grouping.total))
        return np.asarray(mean[grouping.situation, grouping.place])

    def predict(self, X: Any, situations: Any, clients: Any = None) -> Array:
        """1 for the most likely alternative of each situation, else 0."""
        probability = self.predict_proba(X, situations, clients)
        situation = Situations.of(situations, len(probability)).situation
        order = np.lexsort((-probability, situation))
        first = np.concatenate([[True], np.diff(situation[order]) > 0])
        taken = np.zeros(len(probability), dtype=np.int64)
        taken[order[first]] = 1
        return taken

    def score(self, X: Any, y: Any, situations: Any, clients: Any = None) -> float:
        """The share of situations whose choice is predicted."""
        predicted = self.predict(X, situations, clients)
        return float(predicted[self._is_taken(y, situations, len(predicted))].mean())

    def deviance(self, X: Any, y: Any, situations: Any, clients: Any = None) -> float:
        """Minus twice the mean log probability of the choices."""
        probability = self.predict_proba(X, situations, clients)
        taken = probability[self._is_taken(y, situations, len(probability))]
        return float(-2 * np.log(np.maximum(taken, 1e-300)).mean())

    def _is_taken(self, y: Any, situations: Any, rows: int) -> Array:
        taken = column_or_1d(y)
        if len(taken) != rows:
            raise DataError(f"y has {len(taken)} entries for {rows} rows; give 0 or 1 for every row")
        return _check_taken(Situations.of(situations, rows), taken)

    def _situation_rows(
        self, x: Array, chosen: Array, grouping: Situations, codes: Array | None, n_clients: int = 1
    ) -> RowLikelihood:
        """One row per situation, sorted by client, or in the order of the situations for predictions."""
        order = torch.arange(grouping.total) if codes is None else torch.from_numpy(np.argsort(codes, kind="stable"))
        client = torch.zeros(grouping.total, dtype=torch.long) if codes is None else torch.from_numpy(codes)[order]
        varying, shared = (
            ChoiceDesign(grouping.arrange(part)[order], grouping.available()[order]) for part in self._scaling.split(x)
        )
        target, weight = torch.from_numpy(chosen)[order].double(), torch.ones(grouping.total, dtype=torch.float64)
        return RowLikelihood(varying, shared, target, weight, client, n_clients, self._family, self.mix)


def _situation_clients(grouping: Situations, clients: Any) -> tuple[tuple[Any, ...], Array]:
    """The clients and that of every situation, from the client of every row."""
    if clients is None:
        return (0,), np.zeros(grouping.total, np.int64)
    ids, codes = encode_ids("client", clients, len(grouping.situation))
    low, high = np.full(grouping.total, len(ids)), np.full(grouping.total, -1)
    np.minimum.at(low, grouping.situation, codes)
    np.maximum.at(high, grouping.situation, codes)
    if (mixed := np.flatnonzero(low != high)).size:
        i = mixed[0]
        raise DataError(
            f"situation {grouping.ids[i]!r} has alternatives of two clients, {ids[low[i]]!r} and {ids[high[i]]!r}; "
            f"give every situation of every client its own id"
        )
    return ids, low


def _check_taken(grouping: Situations, taken: Array) -> Array:
    """True for the alternative that was taken, which must be one per situation."""
    values = set(np.unique(taken).tolist())
    if not values <= {0, 1}:
        bad = sorted(values - {0, 1}, key=str)[0]
        raise DataError(f"y has {bad!r}; it is 1 for the alternative that was taken, else 0")
    is_taken = np.asarray(taken).astype(bool)
    count = np.bincount(grouping.situation, weights=is_taken, minlength=grouping.total)
    if (bad := np.flatnonzero(count != 1)).size:
        i = bad[0]
        raise DataError(
            f"situation {grouping.ids[i]!r} has {int(count[i])} alternatives taken; mark exactly one with 1"
        )
    return is_taken


def _chosen_places(grouping: Situations, taken: Array) -> Array:
    """The place of the alternative that was taken, (n,)."""
    is_taken = _check_taken(grouping, taken)
    chosen = np.zeros(grouping.total)
    chosen[grouping.situation[is_taken]] = grouping.place[is_taken]
    return chosen
