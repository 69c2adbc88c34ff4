"""Draws of parameters and memberships, from which intervals for clients and predictions are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import SettingError
from ..client_ids import Array
from ..client_memberships import ClientMemberships, PointMemberships
from ..likelihoods import Coefficients
from ..solvers.parameters import ParameterShape, concentration
from .parameter_table import covariance_of, in_solver_order

DRAWS = 200
_DRAWS_FOR_DEVIATION = 20
_CLIENTS_PER_CHUNK = 2000
_SEED = 0  # so that the same call gives the same interval


def draw_parameters(model: Any, count: int = DRAWS) -> list[Coefficients]:
    """Coefficients from the normal distribution around the estimate with the inverse information as covariance."""
    return [in_solver_order(model, vector)[0] for vector in _draw_vectors(model, count)]


def _draw_vectors(model: Any, count: int) -> Array:
    covariance, random = covariance_of(model).matrix, np.random.default_rng(_SEED)
    size, axes = np.linalg.eigh(covariance)
    root = axes * np.sqrt(np.maximum(size, 0.0))
    return np.asarray(model._parameters() + random.normal(size=(count, len(root))) @ root.T)


def draw_memberships(memberships: ClientMemberships, clients: Tensor, count: int = DRAWS) -> Array:
    """Memberships (m, count, K) of these clients, from their posterior distributions."""
    if isinstance(memberships, PointMemberships):
        return np.repeat(memberships.mean[clients].numpy()[:, None], count, 1)
    random = np.random.default_rng(_SEED + 1)
    found = []
    for some in torch.split(clients, _CLIENTS_PER_CHUNK):
        points, weights = memberships.points(some).mT, memberships.weights[some]  # type: ignore[attr-defined]
        # one draw from each of `count` parts of equal probability, in random order: less noise than plain draws
        level = (torch.from_numpy(random.permuted(np.tile(np.arange(count), (len(some), 1)), axis=1))) / count
        level = level + torch.from_numpy(random.random(level.shape)) / count
        # points that follow each other in one membership are neighbours, so that equal parts are parts of the simplex
        order = points[:, 0].argsort(1)
        ends = weights.gather(1, order).double().cumsum(1)
        at = torch.searchsorted(ends, level * ends[:, -1:]).clamp(max=ends.shape[1] - 1)
        chosen = order.gather(1, at)
        found.append(points.gather(2, chosen[:, None].expand(-1, points.shape[1], -1)).mT.numpy())
    return np.concatenate(found)


def membership_deviations(model: Any) -> Array:
    """How much memberships (M, K) vary because the canonical models are estimates: standard deviations.

    The posterior distribution of a membership takes the canonical models as known. Its mean moves with them, and the
    rest of the uncertainty is how far. It is computed once and kept.
    """
    if model._deviations is None:
        covariance = covariance_of(model).matrix
        if model._objective is None:
            raise SettingError(
                "intervals for memberships need the rows of the fit, which pickles do not hold; call "
                "membership_intervals() before pickling, or use model.save(path), which stores what they need"
            )
        find = _deviations_by_scores if model._objective.has_hessian else _deviations_by_draws
        found = find(model, covariance)[:, model._order.numpy()]
        model._deviations = np.minimum(found, 1.0).astype(np.float32)
    known: Array = model._deviations
    onboarded = len(model.clients_) - len(known)
    if onboarded:  # their rows are not kept; the typical client stands for them
        known = np.concatenate([known, np.tile(np.median(known, 0), (onboarded, 1))])
    return known


def _deviations_by_scores(model: Any, covariance: Array) -> Array:
    """By the delta method. The derivative of a posterior mean is the covariance of memberships and scores."""
    objective = model._objective
    coefficients, log_alpha = objective.shape.unpack(torch.from_numpy(model._parameters()))
    spread = torch.from_numpy(covariance)
    found = torch.zeros(objective.data.n_clients, len(model.concentration_), dtype=torch.float64)
    for part in objective.parts:
        c = part.sample.memberships
        weights, scores = _weights_and_scores(objective.shape, part, coefficients, log_alpha)
        centred = (c - (c * weights[:, None]).sum(2, keepdim=True)) * weights[:, None]
        slopes = torch.bmm(centred, scores.mT)  # (m, K, P)
        found[part.clients] = ((slopes @ spread) * slopes).sum(2).clamp_min(0.0).sqrt()
    return found.numpy()


def _weights_and_scores(
    shape: ParameterShape, part: Any, coefficients: Coefficients, log_alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights (m, G) of clients' memberships, and the derivatives (m, P, G) of their log-likelihoods."""
    with torch.enable_grad():
        at = log_alpha.clone().requires_grad_()
        alpha = concentration(at)
        (chain,) = torch.autograd.grad(alpha.sum(), at)
    c = part.sample.memberships
    found = part.data.scores(coefficients, c)
    weights = torch.softmax(found.logs + part.sample.log_weights(alpha.detach()), 1)
    columns, nuisance, _ = found.derivatives(weights)
    canonical = (c[:, :, None] * columns[:, None, : shape.varying]).flatten(1, 2)
    of_alpha = (part.sample.logs * chain[:, None]).expand(len(columns), -1, -1)  # up to a constant
    return weights, torch.cat([canonical, columns[:, shape.varying :], nuisance, of_alpha], 1)


def _deviations_by_draws(model: Any, covariance: Array) -> Array:
    """From the posterior means under parameters that are drawn."""
    objective = model._objective
    centre = objective.find_memberships(model._parameters(), objective.data).mean.numpy()
    total = np.zeros_like(centre)
    vectors = _draw_vectors(model, _DRAWS_FOR_DEVIATION)
    for vector in vectors:
        total += (objective.find_memberships(vector, objective.data).mean.numpy() - centre) ** 2
    return np.asarray(np.sqrt(total / len(vectors)))
