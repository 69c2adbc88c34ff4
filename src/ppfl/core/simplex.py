"""Memberships: points on the probability simplex, stored in the last dimension of a tensor (..., K)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..errors import ModelError

# A membership that underflows to 0 can never become positive again, and entropy is not smooth at 0 (Remark 3.2).
FLOOR = 1e-6
CLEAR = 0.8  # a client with at least this share of one canonical model is clear, any other client is mixed


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


def raise_to_floor(c: Tensor) -> Tensor:
    """Raise every entry to at least FLOOR and scale the mass above it so that every row sums to one.

    Rows without an entry below the floor do not change.

    >>> bool((raise_to_floor(torch.tensor([1.0, 0.0, 0.0])) >= FLOOR).all())
    True
    """
    above = (c - FLOOR).clamp_min(0)
    return FLOOR + above * ((1 - c.shape[-1] * FLOOR) / above.sum(-1, keepdim=True))


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
    ppfl.errors.ModelError: memberships[0] is [0.5, 0.75]; a membership row has a sum of 1: ...
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


# ---------------------------------------------------------------------- quadratic programs
#
# One per row, solved exactly and all at the same time, by a primal active-set method. Each step minimises over the free
# coordinates. If one of them would become negative, the step stops there and that coordinate is fixed at 0. Otherwise
# the fixed coordinate that lowers the objective fastest becomes free. A row is done when no coordinate does, usually
# after a few steps.

MAX_STEPS = 20  # per coordinate; rounding errors could make the method cycle
PROXIMAL_PASSES = 3
PROXIMAL_WEIGHT = 1e-12  # relative to H: far above rounding errors, far below any curvature that matters
BLOCK = 1 << 20  # numbers in one tensor when all rows share H, so that memory does not grow with the rows
MANY_CORNERS = 12  # from here on, gradient steps first are faster
GRADIENT_STEPS = 20


def minimize_on_simplex(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """argmin over c on the simplex of c'Hc / 2 + f'c, one problem per row: (M, K).

    H: positive semi-definite, (M, K, K) or one (K, K) for all rows; f: (M, K); start: (M, K), rows on the simplex.

    >>> minimize_on_simplex(torch.eye(2), torch.tensor([[0.0, 0.5]]), torch.tensor([[0.5, 0.5]]))
    tensor([[0.7500, 0.2500]])
    """
    weight = _proximal_weight(H)
    if not bool((weight > 0).any()):
        return _minimize_convex(H, f, start)
    # Where H is singular, a face can have many minima. A small proximal term makes the one nearest to the previous
    # pass the only one, so that every system of equations has a solution; its effect vanishes over the passes.
    convex = H + weight[..., None, None] * torch.eye(f.shape[1], dtype=H.dtype, device=H.device)
    c = start
    for _ in range(PROXIMAL_PASSES):
        c = _minimize_convex(convex, f - weight[..., None] * c, c)
    return c


def nearest_mixtures(points: Tensor, corners: Tensor) -> Tensor:
    """argmin over c on the simplex of |c corners - point|^2, one row per point: (M, K).

    points: (M, d); corners: (K, d), which may coincide or be affinely dependent.

    >>> nearest_mixtures(torch.tensor([[0.25, 9.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    tensor([[0.7500, 0.2500]])
    """
    center = corners.double().mean(0)  # moving everything changes no distance, and saves digits
    A = corners.double() - center
    H, inverse = A @ A.T, torch.linalg.pinv(A)
    found = []
    for block in torch.split(points, max(1, BLOCK // len(A))):
        b = block.double() - center
        f = -b @ A.T
        # the nearest point in the plane through all corners, projected onto the simplex
        start = project(b @ inverse + 1 / len(A))
        if len(A) >= MANY_CORNERS:
            start = _gradient_steps(H, f, start)
        found.append(minimize_on_simplex(H, f, start))
    return torch.cat(found).to(points)


def _gradient_steps(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """Accelerated projected gradient with one H for all rows: most coordinates that end at 0 are at 0 afterwards."""
    step_size = 1 / torch.linalg.eigvalsh(H)[-1].clamp_min(torch.finfo(H.dtype).tiny)
    c = ahead = start
    for t in range(GRADIENT_STEPS):
        before, c = c, project(ahead - step_size * (ahead @ H + f))
        ahead = c + t / (t + 3) * (c - before)
    return c


def _proximal_weight(H: Tensor) -> Tensor:
    """0 where H is positive definite along the simplex, else a small number: (M,), or () for a shared H."""
    k = H.shape[-1]
    size = H.diagonal(dim1=-2, dim2=-1).amax(-1)
    size = torch.where(size > 0, size, 1.0)  # H = 0 makes it a linear program
    weight = max(PROXIMAL_WEIGHT, 4 * k * torch.finfo(H.dtype).eps) * size
    # adding a constant to H adds a constant on the simplex, so only directions along the simplex matter
    shifted = H + size[..., None, None] - weight[..., None, None] * torch.eye(k, dtype=H.dtype, device=H.device)
    is_singular = torch.linalg.cholesky_ex(shifted).info > 0
    return torch.where(is_singular, weight, 0.0)


def _minimize_convex(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """Like minimize_on_simplex, for H that is positive definite along the simplex."""
    if H.dim() == 3:
        return _active_set(H, f, start)
    rows = max(1, BLOCK // (f.shape[1] + 1) ** 2)
    blocks = zip(torch.split(f, rows), torch.split(start, rows), strict=True)
    return torch.cat([_active_set(H, *block) for block in blocks])


def _active_set(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    c, free = start, start > 0
    found, left = torch.empty_like(start), torch.arange(len(start), device=start.device)  # left: rows not done yet
    for _ in range(MAX_STEPS * f.shape[1]):
        target, multiplier = _minimize_free(H, f, free)
        step = target - c
        steps_to_zero = torch.where(free & (step < 0), c / -step, torch.inf)
        length, blocking = steps_to_zero.min(1)
        blocked = length < 1
        c = torch.where(blocked[:, None], c + length.clamp(max=1)[:, None] * step, target).clamp_min(0)
        c[blocked, blocking[blocked]] = 0.0
        free[blocked, blocking[blocked]] = False
        gradient = (H @ c[..., None])[..., 0] + f
        gain = torch.where(free, 0.0, multiplier[:, None] - gradient)
        largest, which = gain.max(1)
        rounding = 4 * torch.finfo(f.dtype).eps * f.abs().amax(1)
        improves = ~blocked & (largest > 1e-12 * gradient.abs().amax(1)) & (largest > rounding)
        free[improves, which[improves]] = True
        found[left] = c
        go_on = (blocked | improves).nonzero()[:, 0]
        if len(go_on) == 0:
            break
        left, c, f, free = left[go_on], c[go_on], f[go_on], free[go_on]
        H = H[go_on] if H.dim() == 3 else H
    return found / found.sum(1, keepdim=True)


def _minimize_free(H: Tensor, f: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum on the plane sum c = 1 with all other coordinates at 0, and the multiplier of the plane."""
    m, k = f.shape
    both_free = free[:, :, None] & free[:, None]
    system = H.new_zeros(m, k + 1, k + 1)
    system[:, :k, :k] = torch.where(both_free, H, torch.eye(k, dtype=H.dtype, device=H.device) * ~free[:, :, None])
    system[:, :k, k] = -free.to(H.dtype)
    system[:, k, :k] = free.to(H.dtype)
    right = torch.cat([torch.where(free, -f, 0.0), f.new_ones(m, 1)], 1)
    found = torch.linalg.solve(system, right)
    return torch.where(free, found[:, :k], 0.0), found[:, k]
