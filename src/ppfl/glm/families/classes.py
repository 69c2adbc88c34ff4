"""Families of classes: two with one predictor, or several with one predictor each."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.losses import bernoulli_log_density, observed_class
from .family_contract import TINY, Derivatives, Family, Memberships, combine_logs, derivatives_of_one


class MultinomialFamily(Family):
    """Labels 0, 1, ...; the mean parameters are the logarithms of all class probabilities."""

    name = "multinomial"
    links = ("logit",)
    loss = "cross_entropy"

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.outputs = classes

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return eta.log_softmax(-1)

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        return observed_class(parameters, y.long()[:, None].expand(parameters.shape[:-1]))

    def log_density_of_predictors(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """Of the observed class only. Summing over classes with memberships in the last dimension is fast."""
        by_class = eta.transpose(1, 2)
        return by_class[torch.arange(len(y)), y.long()] - torch.logsumexp(by_class, 1)

    def mixed_log_density(self, c: Memberships, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """Selecting the observed class first gives the same result, and mixing one class is cheaper than all."""
        return combine_logs(c, self.log_density(parameters, y, nuisance)[..., None])[..., 0]

    def derivatives(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
        logs = eta.log_softmax(-1).mT  # (n, p, G)
        probability, label = logs.exp(), y.long()
        curvature = probability[:, :, None] * -probability[:, None]
        curvature.diagonal(dim1=1, dim2=2).add_(probability.mT)
        slope = F.one_hot(label, logs.shape[1])[..., None] - probability
        return Derivatives(logs[torch.arange(len(y)), label], slope, curvature)

    def mean(self, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return parameters.exp()

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return mean * (1 - mean)

    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        return -2 * observed_class(mean, y.long()).clamp_min(TINY).log()

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        up_to = torch.arange(parameters.shape[-1]) <= y[:, None, None]
        return torch.where(up_to, parameters.detach().exp(), 0.0).sum(-1)

    def cdf_below(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return self.cdf(y - 1, parameters, nuisance)

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        gumbel = torch.from_numpy(random.gumbel(size=parameters.shape))
        return (parameters.detach() + gumbel).argmax(-1).double()


class BernoulliFamily(MultinomialFamily):
    """Two classes, with one predictor."""

    name = "bernoulli"
    loss = "logistic"

    def __init__(self) -> None:
        super().__init__(1)

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return torch.cat([F.logsigmoid(-eta), F.logsigmoid(eta)], -1)

    def log_density_of_predictors(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        return bernoulli_log_density(eta[..., 0], y[:, None])

    def derivatives(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
        eta = eta[..., 0]
        small = eta.abs().neg_().exp_()
        log = ((2 * y - 1)[:, None] * eta).clamp_(max=0).sub_(small.log1p())
        probability = torch.where(eta >= 0, 1.0, small).div_(small + 1)
        return derivatives_of_one(log, y[:, None] - probability, probability * (1 - probability))
