"""Personalized random utility: who chooses what, and why, client by client (Feng et al. 2020, Eq. O-feng).

A client's utility of alternative a is x_a' theta c_i; it takes the best up to Gumbel noise, so that the probability
of a choice is a softmax over the alternatives of the situation: a conditional logit with a membership for every client.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from ..core.errors import DataError
from .columns import Array, Clients, Columns, grouped
from .designs import Alternatives
from .families import Classes
from .likelihoods import Rows
from .population import PopulationEstimator


class _Situations(NamedTuple):
    """Rows of a long table as places (situation, alternative)."""

    ids: tuple[Any, ...]  # of n situations
    situation: Array  # (rows,), 0 to n - 1
    place: Array  # (rows,), 0 to J - 1 within its situation
    most: int  # J

    @classmethod
    def of(cls, situations: Any, rows: int) -> _Situations:
        if situations is None:
            raise DataError("situations is None; give the situation every row belongs to")
        ids, situation = grouped("situation", situations, rows)
        sizes = np.bincount(situation)
        if (sizes < 2).any():
            alone = ids[int(np.argmin(sizes))]
            raise DataError(f"situation {alone!r} has one alternative, so nothing to choose; give it two or more")
        order = np.argsort(situation, kind="stable")
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        place = np.empty(rows, dtype=np.int64)
        place[order] = np.arange(rows) - np.repeat(first, sizes)
        return cls(ids, situation, place, int(sizes.max()))

    @property
    def total(self) -> int:
        return len(self.ids)

    def table(self, x: Tensor) -> Tensor:
        """Rows (rows, q) as (n, J, q), 0 where there is no alternative."""
        whole = x.new_zeros(self.total, self.most, x.shape[1])
        whole[self.situation, self.place] = x
        return whole

    def there(self) -> Tensor:
        mask = torch.zeros(self.total, self.most, dtype=torch.bool)
        mask[self.situation, self.place] = True
        return mask

    def centred(self, x: Array) -> Array:
        """Less the mean of its situation: only differences move a choice."""
        sums = np.zeros((self.total, x.shape[1]))
        np.add.at(sums, self.situation, x)
        centred = x - (sums / np.bincount(self.situation)[:, None])[self.situation]
        # what rounding leaves of a column that is the same for all alternatives would be taken for data
        return np.where(np.abs(centred) <= 1e-12 * np.abs(x).max(0), 0.0, centred)


class PopulationChoice(PopulationEstimator):
    """K canonical tastes, and for every client a membership that says how much of each it has.

    The table is long: a row for every alternative of every situation. `situations` says which rows are alternatives to
    each other, `y` is 1 for the one that was taken.

    >>> random = np.random.default_rng(0)
    >>> price = random.normal(size=(400, 3))
    >>> minded = np.repeat(np.arange(40), 10) % 2  # every other client minds the price
    >>> taken = (random.gumbel(size=(400, 3)) - 3 * price * minded[:, None]).argmax(1)
    >>> table = dict(situations=np.repeat(np.arange(400), 3), clients=np.repeat(np.arange(40), 30))
    >>> y = (np.arange(3) == taken[:, None]).ravel()
    >>> model = PopulationChoice(k=2, random_state=0).fit(price.reshape(-1, 1), y, **table)
    >>> bool(model.canonical_coef_.min() < -2), bool(abs(model.canonical_coef_).min() < 0.3)
    (True, True)
    """

    def __init__(
        self,
        k: int = 3,
        *,
        mix: str = "weights",
        penalty: float = 0.0,
        affinity: Any = "uniform",
        shared: Any = None,
        ridge: float = 1.0,
        solver: str = "auto",
        n_init: int = 8,
        tol: float = 1e-6,
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            k, mix=mix, penalty=penalty, affinity=affinity, shared=shared, ridge=ridge, fit_intercept=False,
            solver=solver, n_init=n_init, tol=tol, max_iter=max_iter, random_state=random_state,
        )  # fmt: skip

    def fit(self, X: Any, y: Any, situations: Any, clients: Any = None) -> Self:
        """`clients` has the client of every row; without it all choices are one client's: a conditional logit."""
        x, taken = validate_data(self, X, y, dtype=np.float64)
        where = _Situations.of(situations, len(x))
        who = _chooser(where, Clients.of(clients, len(x)))
        self._has_clients, self._family = clients is not None, Classes(where.most)
        x = where.centred(x)
        self._columns = Columns.of(x, np.ones(len(x)), self._names(x), self.shared, intercept=False)
        self._fit_rows(self._situation_rows(x, _chosen(where, taken), where, who), who)
        slopes, _ = self._columns.in_units(self._fit.coefficients, 0.0, 1.0)
        self.canonical_coef_ = slopes[..., 0]
        self.canonical_intercept_ = np.zeros(len(slopes))
        return self

    def onboard(self, X: Any, y: Any, situations: Any, clients: Any) -> Any:
        """Place clients that `fit` did not have: only their memberships are found, the canonical tastes stay.

        They are known from then on, and their memberships are returned.
        """
        check_is_fitted(self, "_fit")
        x, taken = validate_data(self, X, y, dtype=np.float64, reset=False)
        where = _Situations.of(situations, len(x))
        who = _chooser(where, self._strangers(clients, len(x)))
        return self._onboard_rows(self._situation_rows(where.centred(x), _chosen(where, taken), where, who), who)

    def predict_proba(self, X: Any, situations: Any, clients: Any = None) -> Array:
        """For every row the probability that it is taken: they sum to 1 over a situation."""
        check_is_fitted(self, "_fit")
        x = validate_data(self, X, dtype=np.float64, reset=False)
        where = _Situations.of(situations, len(x))
        rows = self._situation_rows(where.centred(x), np.zeros(where.total), where, None)
        chooser = None if clients is None else _chooser(where, Clients.of(clients, len(x))).of_situations()
        return self._mean(rows, chooser)[where.situation, where.place]

    def predict(self, X: Any, situations: Any, clients: Any = None) -> Array:
        """1 for the most likely alternative of each situation, else 0."""
        probability = self.predict_proba(X, situations, clients)
        situation = _Situations.of(situations, len(probability)).situation
        order = np.lexsort((-probability, situation))
        first = np.concatenate([[True], np.diff(situation[order]) > 0])
        taken = np.zeros(len(probability), dtype=np.int64)
        taken[order[first]] = 1
        return taken

    def score(self, X: Any, y: Any, situations: Any, clients: Any = None) -> float:
        """The share of situations whose choice is predicted."""
        predicted = self.predict(X, situations, clients)
        return float(predicted[self._taken(y, situations, len(predicted))].mean())

    def deviance(self, X: Any, y: Any, situations: Any, clients: Any = None) -> float:
        """Minus twice the mean log probability of what was taken."""
        probability = self.predict_proba(X, situations, clients)
        return float(-2 * np.log(np.maximum(probability[self._taken(y, situations, len(probability))], 1e-300)).mean())

    def _taken(self, y: Any, situations: Any, rows: int) -> Array:
        taken = column_or_1d(y)
        if len(taken) != rows:
            raise DataError(f"y has {len(taken)} entries for {rows} rows; give 0 or 1 for every row")
        return _marks(_Situations.of(situations, rows), taken)

    def _situation_rows(self, x: Array, chosen: Array, where: _Situations, who: _Choosers | None) -> Rows:
        """Client by client; in the order of the situations where there are no targets."""
        order = torch.arange(where.total) if who is None else torch.from_numpy(np.argsort(who.row, kind="stable"))
        varying, shared = (
            Alternatives(where.table(design.x)[order], where.there()[order])  # type: ignore[attr-defined]
            for design in self._columns.split(x)
        )
        client = torch.zeros(where.total, dtype=torch.long) if who is None else torch.from_numpy(who.row)[order]
        target = torch.from_numpy(chosen)[order].double()
        weight = torch.ones(where.total, dtype=torch.float64)
        n_clients = 1 if who is None else len(who.ids)
        return Rows(varying, shared, target, weight, client, n_clients, Classes(where.most), self.mix)


class _Choosers(Clients):
    """Whose situation each is."""

    __slots__ = ()

    def of_situations(self) -> list[Any]:
        return [self.ids[at] for at in self.row]


def _chooser(where: _Situations, who: Clients) -> _Choosers:
    low = np.full(where.total, len(who.ids))
    high = np.full(where.total, -1)
    np.minimum.at(low, where.situation, who.row)
    np.maximum.at(high, where.situation, who.row)
    if (mixed := np.flatnonzero(low != high)).size:
        at = mixed[0]
        raise DataError(
            f"situation {where.ids[at]!r} has alternatives of two clients, {who.ids[low[at]]!r} and "
            f"{who.ids[high[at]]!r}; number situations across all clients"
        )
    return _Choosers(who.ids, low)


def _marks(where: _Situations, taken: Array) -> Array:
    """True for the one alternative of each situation that was taken."""
    values = set(np.unique(taken).tolist())
    if not values <= {0, 1}:
        odd = sorted(values - {0, 1}, key=str)[0]
        raise DataError(f"y has {odd!r}; it is 1 for the alternative that was taken, else 0")
    mark = np.asarray(taken).astype(bool)
    count = np.bincount(where.situation, weights=mark, minlength=where.total)
    if (odd := np.flatnonzero(count != 1)).size:
        at = odd[0]
        raise DataError(f"situation {where.ids[at]!r} has {int(count[at])} alternatives taken; mark exactly one with 1")
    return mark


def _chosen(where: _Situations, taken: Array) -> Array:
    """The place of what was taken, (n,)."""
    mark = _marks(where, taken)
    chosen = np.zeros(where.total)
    chosen[where.situation[mark]] = where.place[mark]
    return chosen
