"""Points at which the marginal likelihood is computed: memberships of some clients, together with the clients' data."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..likelihoods import Coefficients, Likelihood
from ..proposals import MembershipSample, Proposals, ScoreMoments
from ..stick_breaking import StickBreaking
from .adaptation import choose_sets, draw_sample
from .parameters import ParameterShape

_NEGLIGIBLE = math.log(1e-20)  # smaller weights are raised to this, because subnormal numbers are slow


class ClientPoints(NamedTuple):
    """Some clients, with their data and the points of their memberships."""

    clients: Tensor
    position: Tensor  # (M,), of the clients' sets of points
    data: Likelihood
    proposals: Proposals | None  # None if all clients have the same points
    sample: MembershipSample

    def moments(self, weights: Tensor) -> ScoreMoments | None:
        """The moments of the clients' memberships, from the weights (M, G) of their points given the data."""
        return None if self.proposals is None else ScoreMoments.of(self.sample.scores, weights)

    def log_joint(self, coefficients: Coefficients, alpha: Tensor, client_weight: Tensor | None) -> Tensor:
        """Log-likelihood plus log weight of every client and point, (M, G)."""
        logs = self.data.client_log_likelihoods(coefficients, self.sample.memberships)
        if client_weight is not None:
            logs = logs * client_weight[self.clients, None]
        return logs + self.sample.log_weights(alpha)

    def weigh(self, logs: Tensor, alpha: Tensor, client_weight: Tensor | None) -> tuple[Tensor, float, Tensor | None]:
        """Weights (M, G) of the points given the data, the sum of all log integrals, and the clients' weights (M, 1).

        `logs` (M, G) are the log-likelihoods at the points.
        """
        tempering = None if client_weight is None else client_weight[self.clients, None]
        joint = (logs if tempering is None else logs * tempering) + self.sample.log_weights(alpha)
        top = joint.amax(1, keepdim=True)
        relative = joint.sub_(top).clamp_(min=_NEGLIGIBLE).exp_()
        total = relative.sum(1, keepdim=True)
        return relative.div_(total), float((top + total.log()).sum()), tempering

    def subset(self, clients: Tensor) -> list[ClientPoints]:
        """Those of these clients that are here, with the points they have, in chunks of data."""
        chosen = torch.isin(self.clients, clients).nonzero()[:, 0]
        if not len(chosen):
            return []
        proposals = None if self.proposals is None else self.proposals.subset(chosen)
        sample = self.sample if proposals is None else self.sample.subset(chosen)
        found = []
        for chunk in self.data.subset(chosen).chunks(sample.log_weight.shape[1]):
            own = None if proposals is None else proposals.subset(chunk.clients)
            points = sample if own is None else sample.subset(chunk.clients)
            place = self.position[chosen][chunk.clients]
            found.append(ClientPoints(chunk.clients, place, chunk.data, own, points))
        return found


def points_of_population(data: Likelihood, shape: ParameterShape, count: int) -> list[ClientPoints]:
    """The same points for all clients, those of the population with alpha = 0.3, in chunks of data."""
    alpha = torch.full((shape.k,), 0.3, dtype=torch.float64)
    position = torch.zeros(1, dtype=torch.long)
    places = choose_sets(data, shape)
    sample = draw_sample(Proposals.prior(1, shape.k), StickBreaking.of(alpha), position, count)
    return [
        ClientPoints(chunk.clients, places[chunk.clients], chunk.data, None, sample)
        for chunk in data.chunks(len(sample.log_weight[0]))
    ]
