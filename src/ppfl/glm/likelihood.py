"""What a likelihood is, where its parameters lie in a vector, and the sums that sites add up.

A client's coefficients are b_i = B c_i + u_i. The membership c_i has a Dirichlet distribution, and the residual effect
u_i = L z_i a normal one. `Layout` says which parameters there are, `Likelihood` has the data of the clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

Vector = np.ndarray[Any, np.dtype[np.float64]]
Matrix = np.ndarray[Any, np.dtype[np.float64]]
Residual = Literal["none", "intercept", "diagonal", "full"]

CHUNK_SIZE = 1 << 18  # numbers (rows x points x parameters) that fit in the cache
LARGEST_ALPHA = 10.0


class Parameters(NamedTuple):
    """One point of the parameter space, in standardised units."""

    canonical: Tensor  # (K, q, m), B
    shared: Tensor  # (f, m)
    nuisance: Tensor  # (r,), of the family: the log dispersion of gaussian targets
    residual: Tensor  # (s, q), the columns of L; for gaussian targets in units of their standard deviation
    log_alpha: Tensor  # (K,), of the Dirichlet distribution of memberships, before `concentration` bounds it

    @property
    def alpha(self) -> Tensor:
        return concentration(self.log_alpha)


class Layout(NamedTuple):
    """Which parameters there are, and where they lie in the vector: in the order of `Parameters`.

    With one canonical model there is no alpha, so log_alpha has no place in the vector and is (0,).
    """

    k: int
    varying: int  # columns with one coefficient per canonical model
    shared: int = 0  # columns with the same coefficient for all clients
    outputs: int = 1  # coefficients per column: the number of classes of a multinomial target, else 1
    nuisance: int = 0
    residual: Residual = "none"
    effects: tuple[int, ...] = ()  # the varying columns that have a residual effect
    # Where a column was centred, u_i moves the standardised intercept too: by mean / scale of the column for each unit
    centres: tuple[float, ...] = ()  # (q,), of the varying columns; 0 for the intercept and without centring
    intercept: int = -1  # its position among the varying columns, -1 without one

    @property
    def n_coefficients(self) -> int:
        return (self.k * self.varying + self.shared) * self.outputs

    @property
    def n_residual(self) -> int:
        """Free numbers in L."""
        s = self.n_effects
        return s * (s + 1) // 2 if self.residual == "full" else s

    @property
    def n_effects(self) -> int:
        """s, the number of normal scores z_i of a client."""
        return 0 if self.residual == "none" else len(self.effects)

    @property
    def n_alpha(self) -> int:
        return self.k if self.k > 1 else 0

    @property
    def size(self) -> int:
        return self.n_coefficients + self.nuisance + self.n_residual + self.n_alpha

    @property
    def free_parameters(self) -> int:
        """Without those that the sum of class probabilities fixes, and with alpha."""
        free = self.outputs - (self.outputs > 1)
        return (self.k * self.varying + self.shared) * free + self.nuisance + self.n_residual + self.n_alpha

    @property
    def places(self) -> dict[str, slice]:
        """The slice of the vector for every field of `Parameters`."""
        sizes = (
            self.k * self.varying * self.outputs, self.shared * self.outputs, self.nuisance, self.n_residual,
            self.n_alpha,
        )  # fmt: skip
        ends = np.cumsum(sizes).tolist()
        return {name: slice(end - size, end) for name, size, end in zip(Parameters._fields, sizes, ends, strict=True)}

    def unpack(self, vector: Vector | Tensor) -> Parameters:
        at = torch.from_numpy(vector) if isinstance(vector, np.ndarray) else vector
        parts = {name: at[place] for name, place in self.places.items()}
        return Parameters(
            parts["canonical"].reshape(self.k, self.varying, self.outputs),
            parts["shared"].reshape(self.shared, self.outputs),
            parts["nuisance"],
            torch.tensordot(parts["residual"], residual_basis(self), 1),
            parts["log_alpha"],
        )

    def pack(self, at: Parameters) -> Vector:
        """The inverse of `unpack`."""
        residual = at.residual.flatten()[:0]
        if self.n_residual:
            basis = residual_basis(self).flatten(1)
            residual = torch.linalg.lstsq(basis.T, at.residual.reshape(-1, 1)).solution[:, 0]
        parts = (at.canonical.flatten(), at.shared.flatten(), at.nuisance, residual, at.log_alpha)
        return np.asarray(torch.cat(parts).numpy())

    def reordered(self, vector: Vector, order: Tensor) -> Vector:
        """The vector with the canonical models in another order."""
        at = self.unpack(vector)
        alpha = at.log_alpha[order] if self.n_alpha else at.log_alpha
        return self.pack(at._replace(canonical=at.canonical[order], log_alpha=alpha))


@lru_cache(maxsize=64)
def residual_basis(layout: Layout) -> Tensor:
    """How L depends on its free numbers, linearly: (n_residual, s, q)."""
    s, q = layout.n_effects, layout.varying
    basis = torch.zeros(layout.n_residual, s, q, dtype=torch.float64)
    if layout.residual == "full":
        for i, (row, place) in enumerate(np.stack(np.tril_indices(s), 1).tolist()):
            basis[i, place, layout.effects[row]] = 1.0
        return basis
    for i, column in enumerate(layout.effects[:s]):  # independent effects in the original columns
        basis[i, i, column] = 1.0
        if layout.intercept >= 0 and column != layout.intercept and layout.centres:
            basis[i, i, layout.intercept] = layout.centres[column]
    return basis


def concentration(log_alpha: Tensor) -> Tensor:
    """alpha (K,), smoothly bounded by 10: data can hardly tell larger ones apart."""
    bound = math.log(LARGEST_ALPHA)
    return torch.exp(bound - torch.nn.functional.softplus(bound - log_alpha))


def log_concentration(alpha: Tensor) -> Tensor:
    """The inverse of `concentration`.

    >>> log_concentration(concentration(torch.tensor([-1.0, 0.5])))
    tensor([-1.0000,  0.5000])
    """
    bound = math.log(LARGEST_ALPHA)
    return bound - torch.log(torch.expm1((bound - alpha.log()).clamp_min(1e-12)))


class ScoreSums(NamedTuple):
    """What Louis' formula needs, summed over points with their weights.

    P parameters: those of the vector but alpha, followed by the scores that the caller adds.
    """

    mean: Tensor  # (M, P), of each client's scores
    products: Tensor  # (P, P), the sum over clients of the mean products of scores
    information: Tensor  # (P', P'), minus the mean second derivatives, without the scores that were added


class LikelihoodAt(Protocol):
    """The likelihood of some clients at one point of the parameter space."""

    def log_likelihoods(self, shares: Tensor, derivatives: bool = False) -> Tensor:
        """(M, G) at the shares (M, K + s', G) of every client, or (1, K + s', G) if all clients have the same ones.

        Shares are memberships, followed by the residual scores z that are integrated by points.
        """

    def score_sums(self, shares: Tensor, weights: Tensor, more: Tensor) -> ScoreSums:
        """Sums of scores over points with weights (M, G), and of other scores `more` (M, E, G).

        At the shares for which `log_likelihoods` was called last, with `derivatives`.
        """


class Chunk(NamedTuple):
    """Some clients with their data."""

    clients: Tensor  # positions
    data: Likelihood


class Likelihood(Protocol):
    """The rows of M clients."""

    @property
    def n_clients(self) -> int: ...

    @property
    def n_samples(self) -> float:
        """The sum of all sample weights."""

    @property
    def integrates_residual(self) -> bool:
        """Whether u_i is integrated in closed form, so that points are for memberships alone."""

    def at(self, layout: Layout, parameters: Parameters) -> LikelihoodAt: ...

    def chunks(self, numbers: int) -> Iterator[Chunk]:
        """All clients in chunks that fit in the cache with this many numbers for every row, in any order."""

    def subset(self, clients: Tensor) -> Likelihood:
        """The data of the clients at these positions, which must be increasing."""


class LikelihoodSums(NamedTuple):
    """Sums over clients of minus the log marginal likelihood. Sites add them up, and Newton uses nothing else.

    They are without regularization, which is added once, and not divided by the number of samples.
    """

    value: float
    gradient: Vector  # (P,)
    hessian: Matrix  # (P, P)
    splitting: Matrix  # (n_coefficients, n_coefficients), second derivatives for copies of a model that move apart
    clients: float
    samples: float
    narrow: float  # clients that know their membership well
    squared_error: float  # of the value, by the points: from the two halves of the points of every client

    @property
    def error(self) -> float:
        """The standard error of the value."""
        return math.sqrt(self.squared_error)

    def __add__(self, other: LikelihoodSums) -> LikelihoodSums:  # type: ignore[override]
        pairs: Iterator[tuple[Any, Any]] = zip(self, other, strict=True)
        return LikelihoodSums(*(a + b for a, b in pairs))


Points = Literal["fresh", "adapt", "move", "keep"]


class Subset(NamedTuple):
    """Some rows of some clients: all but those of one fold, of a share of the clients that their data choose."""

    fold: int = -1  # the fold that is left out; -1 for none
    share: float = 1.0  # of the clients


class Ask(NamedTuple):
    """One evaluation of minus the log marginal likelihood of all sites.

    Every site keeps two sets of points for each `task`: those in use, and those of its last answer. An ask says
    first whether the last ones come into use, and then how the new ones follow from those in use.
    """

    task: str
    layout: Layout
    subset: Subset
    points_each: int  # per client
    vector: Vector
    points: Points  # "fresh": from the population, "adapt": from those in use, "move": in one step, "keep": the same
    accept: bool = True  # whether the points of the last answer come into use first
    once: bool = False  # whether no other ask follows, so that no points have to be kept


class HeldOutAsk(NamedTuple):
    """How well a candidate predicts the rows of every fold, from fits to the other folds."""

    layout: Layout
    vectors: list[Vector]  # one for each fold
    points_each: int
    wider: tuple[float, ...] = (0.0,)  # added to the log dispersion for the rows that are held out


class HeldOutSums(NamedTuple):
    """The held-out log-likelihoods h of all clients, of C candidates and kinds of widening."""

    total: Vector  # (C,), the sum of h
    products: Matrix  # (C, C), the sum of h h'
    clients: float

    def __add__(self, other: HeldOutSums) -> HeldOutSums:  # type: ignore[override]
        pairs: Iterator[tuple[Any, Any]] = zip(self, other, strict=True)
        return HeldOutSums(*(a + b for a, b in pairs))


class Objective(Protocol):
    """Minus the log marginal likelihood of the clients of one or several sites.

    `Evaluator` is one for the rows of a process, and `SumOfObjectives` adds several. A transport carries the same two
    methods to its sites and adds their answers. The asks of one call are independent: folds, starts and candidates go
    side by side in one exchange.
    """

    def evaluate(self, asks: Sequence[Ask]) -> list[LikelihoodSums]: ...

    def held_out(self, asks: Sequence[HeldOutAsk]) -> HeldOutSums:
        """C is the number of asks times that of their kinds of widening."""


class SumOfObjectives(NamedTuple):
    """The clients of several sites."""

    sites: Sequence[Objective]

    def evaluate(self, asks: Sequence[Ask]) -> list[LikelihoodSums]:
        answers = zip(*(site.evaluate(asks) for site in self.sites), strict=True)
        return [reduce(LikelihoodSums.__add__, each) for each in answers]

    def held_out(self, asks: Sequence[HeldOutAsk]) -> HeldOutSums:
        return reduce(HeldOutSums.__add__, (site.held_out(asks) for site in self.sites))
