"""Smaller models as parameters of larger ones, and the directions in which they can grow.

Two copies of a canonical model with half of its alpha each are exactly the same model, so its likelihood is a lower
bound for K + 1. It is a saddle point: the copies move apart in the direction in which the likelihood curves upwards
most. A model without a residual effect is one with L = 0.
"""

from __future__ import annotations

import numpy as np
import torch

from .likelihood import Layout, LikelihoodSums, Matrix, Vector, log_concentration, residual_basis

_AXES = 2  # directions in each corner


def embedded(smaller: Layout, vector: Vector, larger: Layout, corner: int | None = None) -> Vector:
    """The same model as parameters of a larger layout: with a corner split into two equal ones, or with L = 0."""
    at = smaller.unpack(vector)
    canonical, log_alpha = at.canonical, at.log_alpha
    if corner is not None:
        # with one canonical model any alpha is the same model; this one costs no penalty
        alpha = at.alpha if smaller.k > 1 else torch.full((1,), 2.0, dtype=torch.float64)
        twice = [*range(smaller.k), corner]
        alpha = alpha[twice].clone()
        alpha[[corner, -1]] /= 2
        canonical, log_alpha = canonical[twice], log_concentration(alpha)
    residual = at.residual
    if smaller.residual != larger.residual:
        residual = _residual_in(larger, at.residual.T @ at.residual)
    return larger.pack(at._replace(canonical=canonical, log_alpha=log_alpha, residual=residual))


def embedded_many(one: Layout, vector: Vector, larger: Layout) -> Vector:
    """One canonical model K times, with all alpha equal and without a residual effect."""
    at, k = one.unpack(vector), larger.k
    alpha = torch.full((k,), 2.0 / k, dtype=torch.float64)
    residual = torch.zeros(larger.n_effects, larger.varying, dtype=torch.float64)
    return larger.pack(
        at._replace(canonical=at.canonical.repeat(k, 1, 1), log_alpha=log_concentration(alpha), residual=residual)
    )


def _residual_in(layout: Layout, covariance: torch.Tensor) -> torch.Tensor:
    """L' (s, q) of a layout with this covariance (q, q), which it can have."""
    s = layout.n_effects
    if layout.residual == "full":
        effects = list(layout.effects)
        some = covariance[effects][:, effects]
        size, axes = torch.linalg.eigh(some)
        root = axes * size.clamp_min(0).sqrt()
        upper = torch.linalg.qr(root.T).R  # some = upper' upper
        found = covariance.new_zeros(s, layout.varying)
        found[:, effects] = upper
        return found
    # independent effects: the variances of all columns but the intercept are those of the original columns
    variance = covariance.diagonal().clone()
    for column in layout.effects:
        if column != layout.intercept and layout.intercept >= 0 and layout.centres:
            variance[layout.intercept] -= layout.centres[column] ** 2 * covariance[column, column]
    own = torch.stack([variance[column].clamp_min(0).sqrt() for column in layout.effects])
    independent: torch.Tensor = torch.tensordot(own, residual_basis(layout), 1)
    return independent


def splitting_axes(
    layout: Layout, vector: Vector, found: LikelihoodSums, tied: tuple[int, ...]
) -> list[tuple[int, Vector]]:
    """The corners with the directions in which their copies move apart, the most promising first.

    The share of a copy in the corner's membership is a beta variable that does not depend on the data, so the curvature
    follows from the points of the smaller model.
    """
    size = layout.varying * layout.outputs
    alpha = layout.unpack(vector).alpha if layout.k > 1 else torch.ones(1)
    free = [i for i in range(size) if i // layout.outputs not in tied]
    axes = []
    for corner in range(layout.k):
        place = np.array(free) + corner * size
        curvature, directions = np.linalg.eigh(found.splitting[np.ix_(place, place)])
        for i in range(min(_AXES, len(free))):
            axis = np.zeros(size)
            axis[free] = directions[:, i]
            axes.append((curvature[i] / (1 + float(alpha[corner])), corner, axis))
    return [(corner, axis) for _, corner, axis in sorted(axes, key=lambda each: each[0])]


def root_of_differences(one: Layout, found: LikelihoodSums) -> Matrix:
    """A root of the covariance of clients' own coefficients around one model, (q m, q m).

    Scores of clients whose coefficients differ by Sigma, with the mean information I, have the covariance
    I + I Sigma I.
    """
    size, clients = one.varying * one.outputs, found.clients
    information = found.hessian[:size, :size] / clients
    excess = -found.splitting[:size, :size] / clients
    inverse = np.linalg.pinv(information)
    covariance = inverse @ excess @ inverse
    values, axes = np.linalg.eigh((covariance + covariance.T) / 2)
    return np.asarray(axes * np.sqrt(np.clip(values, 0.0, None)))


def tied_basis(layout: Layout, tied: tuple[int, ...]) -> Matrix:
    """The directions in which the coefficients of these columns are the same for all canonical models."""
    eye = np.eye(layout.size)
    size, m = layout.varying * layout.outputs, layout.outputs
    together = [column * m + output for column in tied for output in range(m)]
    moved = {i + k * size for i in together for k in range(layout.k)}
    free = [i for i in range(layout.size) if i not in moved]
    both = [sum(eye[i + k * size] for k in range(layout.k)) for i in together]
    return np.asarray([*eye[free], *both]).T


def is_diagonal(layout: Layout) -> Vector:
    """1 for the free numbers of L that are on its diagonal."""
    if layout.residual != "full":
        return np.ones(layout.n_residual)
    rows, columns = np.tril_indices(layout.n_effects)
    return np.asarray(rows == columns, dtype=float)
