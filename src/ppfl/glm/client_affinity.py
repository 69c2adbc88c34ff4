"""The `affinity` setting of an estimator as an Affinity between its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..core import affinity as core
from ..errors import AffinityError
from .designs import ChoiceDesign
from .families import MultinomialFamily
from .sample_rows import ClientRows


def check_affinity(setting: Any) -> None:
    """Raise an AffinityError for a setting of the wrong type, even if there is no penalty that would use it."""
    if isinstance(setting, str) and setting not in NAMED:
        raise AffinityError(f"there is no affinity {setting!r}; use one of {', '.join(NAMED)}, a matrix or edges")
    if not isinstance(setting, _TYPES) and not sp.issparse(setting) and not hasattr(setting, "columns"):
        raise AffinityError(
            f"affinity is a {type(setting).__name__}; use {', '.join(NAMED)}, a matrix, a DataFrame, "
            f"edges [(id, id), ...] or a ppfl affinity"
        )


def make_affinity(ids: Sequence[Any], setting: Any, rows: ClientRows) -> core.Affinity:
    """From a name, an Affinity, a matrix in the order of the sorted ids, a DataFrame, or edges."""
    check_affinity(setting)
    names = tuple(map(str, ids))
    if isinstance(setting, core.Affinity):
        return setting.check(names)
    if isinstance(setting, str):
        if setting != "uniform" and isinstance(rows.varying, ChoiceDesign):
            raise AffinityError(
                f"affinity = {setting!r} needs one row per sample, and choices have several; use a matrix or edges"
            )
        return NAMED[setting](names, rows)
    if hasattr(setting, "columns"):  # a DataFrame, with clients in any order
        order = [list(map(str, setting.index)), list(map(str, setting.columns))]
        if order[0] != order[1]:
            raise AffinityError("the affinity table has other columns than rows; give both the same client ids")
        return core.from_matrix(_to_tensor(setting.to_numpy()), order[0]).check(names)
    if sp.issparse(setting):
        coo = sp.coo_array(setting, dtype=np.float64)
        at = torch.from_numpy(np.stack([coo.row, coo.col]).astype(np.int64))
        matrix = torch.sparse_coo_tensor(at, torch.from_numpy(coo.data), coo.shape, check_invariants=True)
        return core.from_matrix(matrix, names)
    if isinstance(setting, np.ndarray | torch.Tensor):
        return core.from_matrix(_to_tensor(setting), names)
    for edge in setting:
        if not isinstance(edge, list | tuple) or len(edge) not in (2, 3):
            raise AffinityError(f"affinity has the edge {edge!r}; expected (id, id) or (id, id, weight)")
    return core.from_graph([(str(edge[0]), str(edge[1]), *edge[2:]) for edge in setting], names)


def _to_tensor(matrix: Any) -> Tensor:
    """A copy in double precision; torch warns about arrays that it cannot write to."""
    return torch.from_numpy(np.array(matrix, dtype=np.float64))


def _by_features(names: tuple[str, ...], rows: ClientRows) -> core.Affinity:
    weights = rows.weight[:, None].expand(-1, rows.family.outputs)
    size = rows.weight.new_zeros(rows.n_clients).index_add(0, rows.client, rows.weight)
    sums = rows.varying.client_gradients(weights, rows.client, rows.n_clients)[..., 0]
    return core.from_features(sums / size[:, None], names)


def _by_labels(names: tuple[str, ...], rows: ClientRows) -> core.Affinity:
    if not isinstance(rows.family, MultinomialFamily):
        raise AffinityError("affinity = 'labels' needs classes in y; use 'features' for regressions")
    label = rows.y.long()
    counts = rows.weight.new_zeros(rows.n_clients, int(label.max()) + 1)
    return core.from_labels(counts.index_put((rows.client, label), rows.weight, accumulate=True), names)


NAMED: dict[str, Callable[[tuple[str, ...], ClientRows], core.Affinity]] = {
    "uniform": lambda names, rows: core.uniform(names),
    "labels": _by_labels,
    "features": _by_features,
}
_TYPES = (str, core.Affinity, np.ndarray, torch.Tensor, list, tuple, set)
