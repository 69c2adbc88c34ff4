"""Each client's own noise: the distribution of its variance, given its rows.

It depends on the client's membership through the residual sum of squares. Models keep these sums as polynomials in the
membership, a few numbers per client, so that predictions need no rows of the fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..client_memberships import ClientMemberships, PointMemberships
from ..families import HeteroscedasticGaussianFamily

_CLIENTS_AT_ONCE = 500


def points_of(memberships: ClientMemberships, clients: Tensor) -> tuple[Tensor, Tensor]:
    """Memberships (m, K, G) and their weights (m, G) of these clients."""
    if isinstance(memberships, PointMemberships):
        return memberships.mean[clients][..., None], torch.ones(len(clients), 1, dtype=torch.float64)
    return memberships.points(clients).mT, memberships.weights[clients]  # type: ignore[attr-defined]


def nuisance_of_rows(model: Any, position: Tensor, c: Tensor, nuisance: Tensor) -> Tensor:
    """The nuisance parameters of rows of clients with these positions (n,) and memberships (n, K, G).

    From those of the population, (r,) or (r, G): the same for all rows, or (r, n, G) if clients have their own noise.
    """
    family, sums = model._family, model._residual_sums
    if sums is None or not isinstance(family, HeteroscedasticGaussianFamily):
        return nuisance
    own = sums.with_new_client().take(position)
    return family.given(nuisance, own.at(c), own.size[:, None])


def client_variances(model: Any) -> Tensor:
    """The mean variance (M + 1,) of each client given its rows, and last of a new client, of standardised targets."""
    nuisance = model._result.coefficients.nuisance
    known = model._memberships.concat(model._result.prior)
    found = []
    for some in torch.split(torch.arange(len(model.clients_) + 1), _CLIENTS_AT_ONCE):
        points, weights = points_of(known, some)
        own = nuisance_of_rows(model, some, points, nuisance)
        found.append((weights * model._family.variance(torch.zeros_like(weights), own)).sum(1))
    return torch.cat(found)
