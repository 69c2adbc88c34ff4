"""Memberships: points on the probability simplex, stored in the last dimension of a tensor (..., K)."""

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from .errors import ModelError

# A membership that underflows to 0 can never become positive again, and entropy is not smooth at 0 (Remark 3.2).
FLOOR = 1e-6


def uniform(n: int, k: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Memberships (n, k) that are all 1/k, the initial values in the experiments of the paper.

    >>> uniform(2, 4).tolist()
    [[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    """
    return torch.full((n, k), 1.0 / k, dtype=dtype, device=device)


def mirror_step(c: Tensor, g: Tensor, eta: float | Tensor) -> Tensor:
    """Entropic mirror descent, Eqs. (14)-(16): c <- c exp(-eta g) / <c, exp(-eta g)>.

    c, g: (..., K); eta: a number, or one step size per row (..., 1).

    >>> c = mirror_step(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), eta=2.0)
    >>> torch.allclose(c.log().diff(), torch.tensor([2.0]))
    True
    """
    return torch.softmax(c.log() - eta * g, dim=-1)


def inside(c: Tensor, floor: float = FLOOR) -> Tensor:
    """Raise every entry to at least the floor and scale the mass above the floor so that every row sums to one.

    Rows without an entry below the floor do not change.

    >>> bool((inside(torch.tensor([1.0, 0.0, 0.0])) >= FLOOR).all())
    True
    """
    k = c.shape[-1]
    if not 0 <= k * floor < 1:
        raise ModelError(f"a floor of {floor:g} does not fit {k} memberships that sum to 1; use one in [0, 1/{k})")
    above = (c - floor).clamp_min(0)
    return floor + above * ((1 - k * floor) / above.sum(-1, keepdim=True))


def project(v: Tensor) -> Tensor:
    """The nearest point of the simplex, in Euclidean distance, to every row of v (..., K).

    >>> project(torch.tensor([0.7, 0.7, -9.0])).tolist()
    [0.5, 0.5, 0.0]
    """
    v = v - v.amax(-1, keepdim=True)  # for precision; the projection does not change if a constant is added
    ordered = v.sort(-1, descending=True).values
    count = torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
    shift = (ordered.cumsum(-1) - 1) / count  # (..., K): the threshold if the largest `count` entries stay positive
    support = (ordered > shift).sum(-1, keepdim=True)
    return (v - shift.gather(-1, support - 1)).clamp_min(0)


def harden(c: Tensor) -> Tensor:
    """One-hot rows: each client belongs to its largest membership only (the first one if there are ties).

    >>> harden(torch.tensor([[0.2, 0.5, 0.3]])).tolist()
    [[0.0, 1.0, 0.0]]
    """
    return torch.zeros_like(c).scatter(-1, c.argmax(-1, keepdim=True), 1.0)


def entropy(p: Tensor) -> Tensor:
    """Shannon entropy in nats: 0 for one-hot memberships, log K for uniform memberships. Returns (...).

    >>> round(float(entropy(uniform(1, 4)).exp()), 4)  # as many as four equal ones
    4.0
    """
    return -torch.xlogy(p, p).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the l1 distance: the share of mass that must move to turn p into q. Returns (...).

    >>> float(total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75])))
    0.75
    """
    return (p - q).abs().sum(-1) / 2


def check(c: Tensor, name: str = "memberships", tolerance: float = 1e-4) -> Tensor:
    """Return c if all its rows are on the simplex; otherwise raise a ModelError that names the first bad row.

    >>> check(torch.tensor([[0.5, 0.75]]))
    Traceback (most recent call last):
        ...
    ppfl.core.errors.ModelError: memberships[0] is [0.5, 0.75]; a membership row has a sum of 1: ...
    """
    if c.dim() == 0 or c.shape[-1] == 0 or not c.is_floating_point():
        raise ModelError(
            f"{name} has shape {tuple(c.shape)} and type {c.dtype}; "
            f"expected real rows (..., K) with K >= 1, such as simplex.uniform(n, k)"
        )
    slack = max(tolerance, 8 * torch.finfo(c.dtype).eps)
    faults: Sequence[tuple[Tensor, str, str]] = (
        (
            ~c.isfinite().all(-1),
            "finite numbers",
            "look for a step size that is too large or inputs on a very large scale",
        ),
        ((c < 0).any(-1), "no negative entry", "use simplex.project"),
        ((c.sum(-1) - 1).abs() > slack, "a sum of 1", "divide each row by its sum, or use simplex.project"),
    )
    for bad, expected, remedy in faults:
        if bad.any():
            row = bad.nonzero()[0].tolist()
            found = ", ".join(f"{value:.6g}" for value in c[tuple(row)].tolist())
            raise ModelError(f"{name}{row or ''} is [{found}]; a membership row has {expected}: {remedy}")
    return c


def match(a: Tensor, b: Tensor) -> Tensor:
    """Match each column of a (M, Ka) with a different column of b (M, Kb >= Ka), minimising the total variation.

    Canonical models have no order, so compare two runs as a and b[:, match(a, b)].

    >>> a = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.2, 0.8]])
    >>> match(a, a[:, [2, 0, 1]]).tolist()
    [1, 2, 0]
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[0]:
        raise ModelError(
            f"cannot match memberships of shapes {tuple(a.shape)} and {tuple(b.shape)}; "
            f"expected (M, Ka) and (M, Kb) of the same M clients in the same order"
        )
    if b.shape[1] < a.shape[1]:
        raise ModelError(
            f"cannot match {a.shape[1]} canonical models with {b.shape[1]}; "
            f"give the memberships with fewer columns first"
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ModelError("cannot match memberships that are not finite; call simplex.check on both first")
    # (Ka, Kb) distances between columns; in float64, so that ties are resolved in the same way on every device
    cost = torch.cdist(a.detach().double().T.contiguous(), b.detach().double().T.contiguous(), p=1)
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.long, device=a.device)
