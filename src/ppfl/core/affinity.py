"""The affinity W of Eq. (4): how similar clients are. It is used only through its row sums and W @ C.

Only `Dense` stores an M x M matrix. The diagonal of W cancels in the Laplacian L = D - W.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from ..errors import AffinityError
from . import affinity_checks as checks
from .client_names import as_ids


class Affinity(ABC):
    """A symmetric, non-negative W among named clients; row i of every C (M, K) belongs to ids[i].

    >>> W = from_graph([("a", "b"), ("b", "c", 0.5)], ["a", "b", "c"])
    >>> W.laplacian(torch.ones(3, 1)).tolist()  # L 1 = 0
    [[0.0], [0.0], [0.0]]
    >>> round(float(W.penalty(torch.tensor([[2.0], [0.0], [0.0]]))), 4)  # the squared distance of "a" and "b"
    4.0
    """

    def __init__(self, ids: Sequence[str], degree: Tensor):
        self.ids = as_ids(ids)
        self.degree = degree  # (M,): row sums of W

    @abstractmethod
    def neighbours(self, C: Tensor) -> Tensor:
        """W @ C, (M, K)."""

    @abstractmethod
    def _take(self, rows: Tensor, ids: Sequence[str]) -> Self:
        """The affinity between these rows only, in this order."""

    def laplacian(self, C: Tensor) -> Tensor:
        """L C = D C - W C of Eq. (14), (M, K)."""
        return self.degree.to(C.device, C.dtype)[:, None] * C - self.neighbours(C)

    def majorant(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """Degrees (M,) and neighbour sums (M, K) at C for a positive semi-definite W with the same L (Eq. (13)).

        The diagonal of W cancels in L, so it can be increased until W is positive semi-definite.
        """
        lift = self._lift().to(C)
        return self.degree.to(C) + lift, self.neighbours(C) + lift[:, None] * C

    def _lift(self) -> Tensor:
        return self.degree

    def penalty(self, C: Tensor) -> Tensor:
        """<C, L C> = 1/2 sum_ij w_ij |c_i - c_j|^2: lambda times this is the term of Eqs. (4) and (9)."""
        C = C - C.mean(0)  # changes nothing, as L 1 = 0, but is more precise when memberships are nearly equal
        return (C * self.laplacian(C)).sum()

    def select(self, ids: Iterable[str]) -> Self:
        """The affinity between these clients only, in this order."""
        wanted = checks.check_names(ids)
        rows = checks.find_rows(wanted, self.ids, "select only clients it has, or build it again with all of them")
        return self._take(rows.to(self.degree.device), wanted)

    def check(self, ids: Iterable[str]) -> Self:
        """This affinity with its rows in the order of a federation's client ids; it must have exactly these clients."""
        if (wanted := as_ids(ids)) == self.ids:
            return self
        wanted = checks.check_names(wanted)
        missing, extra = sorted(set(wanted) - set(self.ids)), sorted(set(self.ids) - set(wanted))
        if missing or extra:
            remedy = "build it with affinity.from_labels(counts, ids)" if missing else "use affinity.select(ids)"
            raise AffinityError(
                f"affinity has {len(self)} rows but the federation has {len(wanted)} clients "
                f"(missing: {checks.listed(missing)}; extra: {checks.listed(extra)}); {remedy}"
            )
        return self.select(wanted)

    def to(self, device: torch.device | str) -> Self:
        """The same affinity on another device."""
        moved = copy(self)
        vars(moved).update({k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)})
        return moved

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} clients)"


class Dense(Affinity):
    """W itself, (M, M).

    >>> from_matrix(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), ["a", "b"]).degree.tolist()
    [2.0, 2.0]
    """

    def __init__(self, W: Tensor, ids: Iterable[str]):
        names, W = checks.as_table(W, ids)
        if W.shape[0] != W.shape[1]:
            raise AffinityError(f"affinity has shape {tuple(W.shape)}; W needs one row and one column per client")
        checks.check_entries(
            W, lambda i, j: checks.entry_of(names[i], names[j]), "use 0 for clients that are not similar"
        )
        uneven = (W - W.T).abs() > 1e-5 * W.amax()  # more than rounding errors
        if uneven.any():
            i, j = uneven.nonzero()[0].tolist()
            raise checks.asymmetric(names[i], names[j], float(W[i, j]), float(W[j, i]))
        self.W = (W + W.T) / 2
        super().__init__(names, self.W.sum(1))

    def neighbours(self, C: Tensor) -> Tensor:
        """W @ C, in O(M^2 K)."""
        return self.W.to(C.device, C.dtype) @ C

    def _take(self, rows: Tensor, ids: Sequence[str]) -> Self:
        return type(self)(self.W[rows][:, rows], ids)


class Sparse(Affinity):
    """Undirected edges, each given once: pairs (E, 2) of rows and weights (E,).

    >>> Sparse(torch.tensor([[0, 1]]), torch.tensor([2.0]), ["a", "b"]).degree.tolist()
    [2.0, 2.0]
    """

    def __init__(self, pairs: Tensor, weights: Tensor, ids: Iterable[str]):
        names = checks.check_names(ids)
        if pairs.shape != (len(weights), 2) or not ((pairs >= 0) & (pairs < len(names))).all():
            raise AffinityError(
                f"edges have shape {tuple(pairs.shape)} and {len(weights)} weights; expected (E, 2) rows "
                f"below {len(names)}, and (E,) weights: affinity.from_graph takes edges by client id"
            )
        checks.check_entries(
            weights, lambda e: checks.entry_of(*(names[i] for i in pairs[e])), "leave out edges that mean nothing"
        )
        self.pairs, self.weights = pairs, weights
        super().__init__(names, self.neighbours(weights.new_ones(len(names), 1)).squeeze(1))

    def neighbours(self, C: Tensor) -> Tensor:
        """W @ C, in O(E K)."""
        i, j = self.pairs.to(C.device).T
        weights = self.weights.to(C.device, C.dtype)[:, None]
        back = weights * (i != j)[:, None]  # an edge counts for both of its ends, a loop only once
        return torch.zeros_like(C).index_add(0, i, weights * C[j]).index_add(0, j, back * C[i])

    def _take(self, rows: Tensor, ids: Sequence[str]) -> Self:
        place = torch.full_like(self.degree, -1, dtype=torch.long)
        place[rows] = torch.arange(len(rows), device=place.device)
        pairs = place[self.pairs]
        kept = (pairs >= 0).all(1)
        return type(self)(pairs[kept], self.weights[kept], ids)


class Factored(Affinity):
    """W = H H' with H (M, r) >= 0. W is never computed: a server needs only sum_j h_j and sum_j h_j' c_j.

    >>> Factored(torch.tensor([[1.0], [0.5]]), ["a", "b"]).neighbours(torch.eye(2)).tolist()
    [[1.0, 0.5], [0.5, 0.25]]
    """

    def __init__(self, H: Tensor, ids: Iterable[str]):
        names, self.H = checks.as_table(H, ids)
        remedy = "use affinity.nearest(features, ids, k), or affinity.from_matrix(W, ids)"
        checks.check_entries(self.H, lambda i, r: f"the factor of client {names[i]!r}, column {r},", remedy)
        super().__init__(names, self.H @ self.H.sum(0))

    def neighbours(self, C: Tensor) -> Tensor:
        """H (H' C), in O(M r K)."""
        H = self.H.to(C.device, C.dtype)
        return H @ (H.T @ C)

    def _lift(self) -> Tensor:
        return torch.zeros_like(self.degree)  # H H' is already positive semi-definite

    def _take(self, rows: Tensor, ids: Sequence[str]) -> Self:
        taken = copy(self)  # works for the subclasses below too, whose __init__ has no H
        Factored.__init__(taken, self.H[rows], ids)
        return taken


class Uniform(Factored):
    """All ones, W = 1 1': every client is pulled towards the mean membership (Theorem 1).

    >>> uniform(["a", "b", "c"]).degree.tolist()
    [3.0, 3.0, 3.0]
    """

    def __init__(self, ids: Iterable[str]):
        names = checks.check_names(ids)
        super().__init__(torch.ones(len(names), 1), names)


class Nothing(Factored):
    """W = 0, a factor without columns: memberships are not pulled together.

    >>> nothing(["a", "b"]).degree.tolist()
    [0.0, 0.0]
    """

    def __init__(self, ids: Iterable[str]):
        names = checks.check_names(ids)
        super().__init__(torch.ones(len(names), 0), names)


from_matrix, uniform, nothing = Dense, Uniform, Nothing


def from_labels(counts: Tensor, ids: Iterable[str]) -> Factored:
    """Cosine similarity of label counts (M, classes), the paper's W. Count training labels only.

    >>> from_labels(torch.tensor([[3, 0], [1, 0], [0, 2]]), ["a", "b", "c"]).degree.tolist()
    [2.0, 2.0, 1.0]
    """
    names, counts = checks.as_table(counts, ids)
    checks.check_entries(
        counts, lambda i, y: f"the count of label {y} of client {names[i]!r}", "count its labels again"
    )
    if empty := [names[i] for i in (counts.sum(1) == 0).nonzero().flatten().tolist()]:
        raise AffinityError(
            f"{checks.listed(empty)} has no labels, so no cosine similarity; "
            f"leave it out until it has a training sample, or use affinity.uniform(ids)"
        )
    return Factored(torch.nn.functional.normalize(counts, dim=1), names)


def from_features(means: Tensor, ids: Iterable[str]) -> Dense:
    """exp(-d^2 / 2 s^2) of the distances d between client means (M, d); s is the median of those above 0.

    Unlike a cosine, it is never negative and does not depend on the origin. Give the columns similar scales first.

    >>> W = from_features(torch.tensor([[0.0], [1.0], [9.0]]), ["a", "b", "c"]).neighbours(torch.eye(3))
    >>> bool(W[0, 1] > W[1, 2] > W[0, 2])
    True
    """
    names, x = checks.as_feature_table(means, ids)
    square = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    scale = square[square > 0].median() if (square > 0).any() else square.new_ones(())
    return Dense((-square / (2 * scale)).exp(), names)


def from_graph(edges: Iterable[tuple[str, str] | tuple[str, str, float]], ids: Iterable[str]) -> Sparse:
    """Undirected edges (id, id) of weight 1, or (id, id, weight). An edge that is listed twice counts once.

    >>> from_graph([("a", "b"), ("b", "c", 0.5)], ["a", "b", "c"]).degree.tolist()
    [1.0, 1.5, 0.5]
    """
    names, weight = checks.check_names(ids), dict[tuple[str, str], float]()
    for listed in edges:
        if len(listed) not in (2, 3):
            raise AffinityError(f"an edge is {listed!r}; expected (id, id) or (id, id, weight)")
        a, b, new = (*listed, 1.0)[:3]
        edge = (b, a) if (b, a) in weight else (a, b)
        if edge in weight and weight[edge] != new:
            raise checks.asymmetric(a, b, new, weight[edge])
        weight[edge] = new
    ends = [name for edge in weight for name in edge]
    pairs = checks.find_rows(ends, names, "check the spelling of the edges").reshape(-1, 2)
    return Sparse(pairs, torch.tensor(list(weight.values())), names)


def nearest(features: Tensor, ids: Iterable[str], k: int, block: int = 1024) -> Sparse:
    """Weight 1 between clients if either is among the k nearest of the other, in Euclidean distance.

    features (M, d). Memory is O(block M), because `block` clients are processed at a time.

    >>> nearest(torch.tensor([[0.0], [1.0], [9.0]]), ["a", "b", "c"], k=1).degree.tolist()
    [1.0, 2.0, 1.0]
    """
    names, x = checks.as_feature_table(features, ids)
    if not 1 <= k < len(names):
        raise AffinityError(f"k is {k}, but each client has only {len(names) - 1} others; use a smaller k >= 1")
    x = x - x.mean(0)  # cdist may expand |a - b|^2, which is imprecise far from the origin
    edges = []
    for rows in torch.split(torch.arange(len(names), device=x.device), block):
        distance = torch.cdist(x[rows], x).scatter(1, rows[:, None], torch.inf)  # exclude the client itself
        near = distance.topk(k, largest=False).indices
        edges.append(torch.stack([rows.repeat_interleave(k), near.flatten()], dim=1))
    pairs = torch.unique(torch.cat(edges).sort(1).values, dim=0)
    return Sparse(pairs, x.new_ones(len(pairs)), names)
