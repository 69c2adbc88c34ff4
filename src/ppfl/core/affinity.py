"""The affinity W of Eq. (4): how similar clients are. It is used only through its row sums and W @ C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from ..errors import AffinityError
from .ids import ClientIds, as_ids, check_ids
from .settings import quoted

BLOCK = 1024  # clients whose neighbours are looked for together


class Affinity:
    """A symmetric, non-negative W among named clients; row i of every C (M, K) belongs to ids[i].

    matrix: W (M, M), dense or sparse; or, if `factored`, H (M, r) with W = H H', which is never computed: a server
    needs only sum_j h_j and sum_j h_j' c_j. The diagonal of W cancels in the Laplacian L = D - W. The functions of this
    module make affinities and check what they are made of.

    >>> W = from_graph([("a", "b"), ("b", "c", 0.5)], ["a", "b", "c"])
    >>> W.laplacian(torch.ones(3, 1)).tolist()  # L 1 = 0
    [[0.0], [0.0], [0.0]]
    >>> round(float(W.penalty(torch.tensor([[2.0], [0.0], [0.0]]))), 4)  # the squared distance of "a" and "b"
    4.0
    """

    def __init__(self, matrix: Tensor, ids: Sequence[str], *, factored: bool = False) -> None:
        self.matrix, self.ids, self.factored = matrix, as_ids(ids), factored
        self.degree = matrix @ matrix.sum(0) if factored else matrix.sum(1).to_dense()  # (M,): row sums of W

    def neighbours(self, C: Tensor) -> Tensor:
        """W @ C, (M, K)."""
        matrix = self.matrix.to(C.device, C.dtype)
        return matrix @ (matrix.T @ C) if self.factored else matrix @ C

    def laplacian(self, C: Tensor) -> Tensor:
        """L C = D C - W C of Eq. (14), (M, K)."""
        return self.degree.to(C.device, C.dtype)[:, None] * C - self.neighbours(C)

    def majorant(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """Degrees (M,) and neighbour sums (M, K) at C for a positive semi-definite W with the same L (Eq. (13)).

        The diagonal of W cancels in L, so it can be increased until W is positive semi-definite, as H H' is already.
        """
        degree = self.degree.to(C)
        lift = torch.zeros_like(degree) if self.factored else degree
        return degree + lift, self.neighbours(C) + lift[:, None] * C

    def penalty(self, C: Tensor) -> Tensor:
        """<C, L C> = 1/2 sum_ij w_ij |c_i - c_j|^2: lambda times this is the term of Eqs. (4) and (9)."""
        C = C - C.mean(0)  # changes nothing, as L 1 = 0, but is more precise when memberships are nearly equal
        return (C * self.laplacian(C)).sum()

    def select(self, ids: Iterable[str]) -> Affinity:
        """The affinity between these clients only, in this order."""
        wanted = check_ids(ids, AffinityError)
        rows = _find_rows(wanted, self.ids, "select only clients it has, or build it again with all of them")
        taken = self.matrix.index_select(0, rows.to(self.matrix.device))
        taken = taken if self.factored else taken.index_select(1, rows.to(self.matrix.device))
        return Affinity(taken, wanted, factored=self.factored)

    def check(self, ids: Iterable[str]) -> Affinity:
        """This affinity with its rows in the order of a federation's client ids; it must have exactly these clients."""
        if (wanted := as_ids(ids)) == self.ids:
            return self
        wanted = check_ids(wanted, AffinityError)
        missing, extra = sorted(set(wanted) - set(self.ids)), sorted(set(self.ids) - set(wanted))
        if missing or extra:
            remedy = "build it with affinity.from_labels(counts, ids)" if missing else "use affinity.select(ids)"
            raise AffinityError(
                f"affinity has {len(self)} rows but the federation has {len(wanted)} clients "
                f"(missing: {quoted(missing)}; extra: {quoted(extra)}); {remedy}"
            )
        return self.select(wanted)

    def to(self, device: torch.device | str) -> Self:
        """The same affinity on another device."""
        moved = copy(self)
        moved.matrix, moved.degree = self.matrix.to(device), self.degree.to(device)
        return moved

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Affinity({len(self)} clients)"


def from_matrix(W: Tensor, ids: Iterable[str]) -> Affinity:
    """W itself, (M, M), dense or sparse.

    >>> from_matrix(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), ["a", "b"]).degree.tolist()
    [2.0, 2.0]
    """
    names, W = _as_table(W, ids)
    if W.shape[0] != W.shape[1]:
        raise AffinityError(f"affinity has shape {tuple(W.shape)}; W needs one row and one column per client")
    difference = W - W.T
    if W.is_sparse:
        W, difference = W.coalesce(), difference.coalesce()
    values, differences = (matrix.values() if W.is_sparse else matrix for matrix in (W, difference))

    def clients_at(matrix: Tensor, at: Sequence[int]) -> tuple[str, str]:
        i, j = matrix.indices()[:, at[0]].tolist() if matrix.is_sparse else at
        return names[i], names[j]

    _check_entries(values, lambda *at: _entry_of(*clients_at(W, at)), "use 0 for clients that are not similar")
    uneven = differences.abs() > 1e-5 * (values.amax() if len(values) else 0)  # more than rounding errors
    if uneven.any():
        at = uneven.nonzero()[0].tolist()
        raise _asymmetric(*clients_at(difference, at), by=float(differences[tuple(at)].abs()))
    return Affinity((W + W.T) / 2, names)


def from_factor(H: Tensor, ids: Iterable[str]) -> Affinity:
    """W = H H' with H (M, r) >= 0.

    >>> from_factor(torch.tensor([[1.0], [0.5]]), ["a", "b"]).neighbours(torch.eye(2)).tolist()
    [[1.0, 0.5], [0.5, 0.25]]
    """
    names, H = _as_table(H, ids)
    remedy = "use affinity.nearest(features, ids, k), or affinity.from_matrix(W, ids)"
    _check_entries(H, lambda i, r: f"the factor of client {names[i]!r}, column {r},", remedy)
    return Affinity(H, names, factored=True)


def uniform(ids: Iterable[str]) -> Affinity:
    """All ones, W = 1 1': every client is pulled towards the mean membership (Theorem 1).

    >>> uniform(["a", "b", "c"]).degree.tolist()
    [3.0, 3.0, 3.0]
    """
    names = check_ids(ids, AffinityError)
    return Affinity(torch.ones(len(names), 1), names, factored=True)


def nothing(ids: Iterable[str]) -> Affinity:
    """W = 0, a factor without columns: memberships are not pulled together.

    >>> nothing(["a", "b"]).degree.tolist()
    [0.0, 0.0]
    """
    names = check_ids(ids, AffinityError)
    return Affinity(torch.ones(len(names), 0), names, factored=True)


def from_labels(counts: Tensor, ids: Iterable[str]) -> Affinity:
    """Cosine similarity of label counts (M, classes), the paper's W. Count training labels only.

    >>> from_labels(torch.tensor([[3, 0], [1, 0], [0, 2]]), ["a", "b", "c"]).degree.tolist()
    [2.0, 2.0, 1.0]
    """
    names, counts = _as_table(counts, ids)
    _check_entries(counts, lambda i, y: f"the count of label {y} of client {names[i]!r}", "count its labels again")
    if empty := [names[i] for i in (counts.sum(1) == 0).nonzero().flatten().tolist()]:
        raise AffinityError(
            f"{quoted(empty)} has no labels, so no cosine similarity; "
            f"leave it out until it has a training sample, or use affinity.uniform(ids)"
        )
    return Affinity(torch.nn.functional.normalize(counts, dim=1), names, factored=True)


def from_features(means: Tensor, ids: Iterable[str]) -> Affinity:
    """exp(-d^2 / 2 s^2) of the distances d between client means (M, d); s is the median of those above 0.

    Unlike a cosine, it is never negative and does not depend on the origin. Give the columns similar scales first.

    >>> W = from_features(torch.tensor([[0.0], [1.0], [9.0]]), ["a", "b", "c"]).matrix
    >>> bool(W[0, 1] > W[1, 2] > W[0, 2])
    True
    """
    names, x = _as_feature_table(means, ids)
    square = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    scale = square[square > 0].median() if (square > 0).any() else square.new_ones(())
    return Affinity((-square / (2 * scale)).exp(), names)


def from_graph(edges: Iterable[tuple[str, str] | tuple[str, str, float]], ids: Iterable[str]) -> Affinity:
    """Undirected edges (id, id) of weight 1, or (id, id, weight). An edge that is listed twice counts once.

    >>> from_graph([("a", "b"), ("b", "c", 0.5)], ["a", "b", "c"]).degree.tolist()
    [1.0, 1.5, 0.5]
    """
    names, weight = check_ids(ids, AffinityError), dict[tuple[str, str], float]()
    for edge in edges:
        if len(edge) not in (2, 3):
            raise AffinityError(f"an edge is {edge!r}; expected (id, id) or (id, id, weight)")
        a, b, new = (*edge, 1.0)[:3]
        known = (b, a) if (b, a) in weight else (a, b)
        if known in weight and weight[known] != new:
            raise _asymmetric(a, b, by=abs(new - weight[known]))
        weight[known] = new
    ends = [name for edge in weight for name in edge]
    pairs = _find_rows(ends, names, "check the spelling of the edges").reshape(-1, 2)
    weights, ends_of = torch.tensor(list(weight.values())), list(weight)
    _check_entries(weights, lambda e: _entry_of(*ends_of[e]), "leave out edges that mean nothing")
    return _from_pairs(pairs, weights, names)


def nearest(features: Tensor, ids: Iterable[str], k: int) -> Affinity:
    """Weight 1 between clients if either is among the k nearest of the other, in Euclidean distance.

    features (M, d). Memory is linear in M, because clients are processed in blocks.

    >>> nearest(torch.tensor([[0.0], [1.0], [9.0]]), ["a", "b", "c"], k=1).degree.tolist()
    [1.0, 2.0, 1.0]
    """
    names, x = _as_feature_table(features, ids)
    if not 1 <= k < len(names):
        raise AffinityError(f"k is {k}, but each client has only {len(names) - 1} others; use a smaller k >= 1")
    x = x - x.mean(0)  # cdist may expand |a - b|^2, which is imprecise far from the origin
    edges = []
    for rows in torch.split(torch.arange(len(names), device=x.device), BLOCK):
        distance = torch.cdist(x[rows], x).scatter(1, rows[:, None], torch.inf)  # exclude the client itself
        near = distance.topk(k, largest=False).indices
        edges.append(torch.stack([rows.repeat_interleave(k), near.flatten()], dim=1))
    pairs = torch.unique(torch.cat(edges).sort(1).values, dim=0)
    return _from_pairs(pairs, x.new_ones(len(pairs)), names)


def _from_pairs(pairs: Tensor, weights: Tensor, names: ClientIds) -> Affinity:
    """Undirected edges, each given once: pairs (E, 2) of rows and weights (E,). A loop counts once too."""
    back = pairs[:, 0] != pairs[:, 1]
    both = torch.cat([pairs, pairs[back].flip(1)]).T
    values, size = torch.cat([weights, weights[back]]), (len(names), len(names))
    return Affinity(torch.sparse_coo_tensor(both, values, size, check_invariants=True).coalesce(), names)


# ---------------------------------------------------------------------- checks


def _find_rows(names: Sequence[str], known: Sequence[str], remedy: str) -> Tensor:
    """The row of each of these clients in an affinity whose rows are the known clients."""
    row = dict(zip(known, range(len(known)), strict=True))
    at = list(map(row.get, names))
    if None in at:
        unknown = sorted(set(names) - set(known), key=str)
        raise AffinityError(f"affinity has no client {quoted(unknown)} among its {len(known)}; {remedy}")
    return torch.tensor(at, dtype=torch.long)


def _as_table(x: Tensor, ids: Iterable[str]) -> tuple[ClientIds, Tensor]:
    """The client ids and a float table with one row per client."""
    names, x = check_ids(ids, AffinityError), torch.as_tensor(x)
    if x.dim() != 2 or len(x) != len(names):
        found = f"affinity has {len(x)} rows" if x.dim() == 2 else f"affinity has shape {tuple(x.shape)}"
        raise AffinityError(f"{found} but there are {len(names)} client ids; give one row per client")
    return names, x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _as_feature_table(x: Tensor, ids: Iterable[str]) -> tuple[ClientIds, Tensor]:
    """The client ids and a float table of finite features, one row per client."""
    names, x = _as_table(x, ids)
    _check_entries(x.abs(), lambda i, d: f"feature {d} of client {names[i]!r}", "impute it or leave the column out")
    return names, x


def _check_entries(x: Tensor, name_of: Callable[..., str], remedy: str) -> None:
    """Entries are finite and not negative. `name_of` names the entry at an index for the error message."""
    for bad, need in ((~x.isfinite(), "finite"), (x < 0, "non-negative")):
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise AffinityError(f"{name_of(*at)} is {float(x[tuple(at)]):g}; it must be {need}: {remedy}")


def _asymmetric(a: str, b: str, by: float) -> AffinityError:
    """The error for two clients whose affinity differs by direction."""
    found = f"{_entry_of(a, b)} and {_entry_of(b, a)} differ by {by:g}"
    return AffinityError(f"{found}; W must be symmetric: use (W + W.T) / 2")


def _entry_of(a: str, b: str) -> str:
    return f"affinity[{a!r}, {b!r}]"
