"""Gaussian targets whose noise differs by client: variances are drawn from a population of variances.

A client's variance is inverse gamma with shape a and scale b, and is integrated out. The nuisance parameters are
log(b / a), where 1 / (b / a) is the mean of 1 / variance in the population, and log a: with a large one all clients
have the same variance, and this is the gaussian family.

The variance given a client's rows is inverse gamma too. So a client with rows has the same distribution as a client
without, only with other nuisance parameters, which `given` finds.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import special
from torch import Tensor

from ..residual_sums import SumDerivatives
from .continuous import GaussianFamily
from .family_contract import LOG_DISPERSION, to_array
from .negative_binomial import log_rising_ratio

LOG_SHAPE = "log shape of variances"
_CENTRE, _SCALE = 2.0, 2.0  # of the normal prior of log a: a few clients say little about it


class HeteroscedasticGaussianFamily(GaussianFamily):
    """The distribution of one row of a client is Student's t with 2 a degrees of freedom and the scale sqrt(b / a)."""

    name = "heteroscedastic gaussian"
    links = ("identity",)
    loss = None
    nuisance = (LOG_DISPERSION, LOG_SHAPE)

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """Of rows that are the only one of their client."""
        return log_density_of_sums((parameters[..., 0] - y[:, None]).square(), torch.ones_like(y)[:, None], nuisance)

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        """The mean of the clients' variances, which is infinite if a is at most 1."""
        return self.mean_variance(nuisance) * torch.ones_like(mean)

    def mean_variance(self, nuisance: Tensor) -> Tensor:
        typical, shape = nuisance[0].exp(), nuisance[1].exp()
        return torch.where(shape > 1, typical * shape / (shape - 1).clamp_min(1e-300), math.inf)

    def variance_quantile(self, nuisance: Tensor, level: float) -> float:
        """Of the clients' variances in the population."""
        shape = float(nuisance[1].exp())
        return float(nuisance[0].exp()) * shape / float(special.gammaincinv(shape, 1 - level))

    def typical_deviation(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return torch.exp(0.5 * nuisance[0]) * torch.ones_like(mean)

    def given(self, nuisance: Tensor, sums: Tensor, size: Tensor) -> Tensor:
        """The nuisance parameters (2, ...) of a client with `size` rows and these residual sums of squares."""
        typical, shape = nuisance[0].exp(), nuisance[1].exp()
        larger = shape + 0.5 * size + torch.zeros_like(sums)
        return torch.stack([((shape * typical + 0.5 * sums) / larger).log(), larger.log()])

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        standard = (y[:, None] - parameters[..., 0]) * torch.exp(-0.5 * nuisance[0])
        return torch.from_numpy(np.asarray(special.stdtr(to_array(2 * nuisance[1].exp()), to_array(standard))))

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        """Every row is of another client, with its own variance."""
        mean = parameters[..., 0].detach()
        drawn = random.standard_t(to_array(2 * nuisance[1].exp()), size=mean.shape)
        return mean + torch.exp(0.5 * nuisance[0]).detach() * torch.from_numpy(drawn)

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        return [*super().initial_nuisance(mean, y), _CENTRE]

    def nuisance_penalty(self, nuisance: Tensor) -> Tensor:
        """If clients do not differ the likelihood is flat towards inf, and the shape would have no best value."""
        return 0.5 * ((nuisance[1] - _CENTRE) / _SCALE).square().sum()

    def natural_parameters(self, nuisance: Tensor) -> dict[str, float]:
        """The median variance, and the standard deviation of the logarithms of the clients' noise.

        The noise is the square root of the variance, so with a spread of 0.5 one client in six has a noise of more than
        e^0.5 times that of the median client.
        """
        spread = 0.5 * math.sqrt(float(special.polygamma(1, float(nuisance[1].exp()))))
        return {"dispersion": self.variance_quantile(nuisance, 0.5), "spread of log noise": spread}


def log_density_of_sums(sums: Tensor, size: Tensor, nuisance: Tensor) -> Tensor:
    """The log density of a client's rows, from their residual sum of squares and their number.

    In differences of lgamma(a), and of logarithms of b, large numbers would cancel.
    """
    log_typical, log_shape = nuisance[0], nuisance[1]
    shape, half = log_shape.exp(), 0.5 * size
    excess = torch.log1p(sums * torch.exp(-log_typical - log_shape) / 2)
    constant = log_rising_ratio(half, -log_shape) - half * (log_typical + math.log(2 * math.pi))
    return constant - (shape + half) * excess


def derivatives_of_sums(sums: Tensor, size: Tensor, nuisance: Tensor) -> SumDerivatives:
    """Of the same, for sums (M, G) and sizes (M, 1)."""
    typical, shape, half = nuisance[0].exp(), nuisance[1].exp(), 0.5 * size
    with torch.enable_grad():
        log_shape = nuisance[1].detach().expand(size.shape).clone().requires_grad_()
        rising = log_rising_ratio(half, -log_shape)
        (slope,) = torch.autograd.grad(rising.sum(), log_shape, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), log_shape)
    slope, degrees = slope.detach(), shape + half
    ratio = sums / (2 * shape * typical)
    excess, share = shape * torch.log1p(ratio), ratio / (1 + ratio)
    gained = degrees * share
    bend = gained * (1 - share)  # minus the slope of `gained` in either logarithm, as far as it is in the share
    precision = degrees / (shape * typical + 0.5 * sums)
    mixed = bend - shape * share
    return SumDerivatives(
        log_density_of_sums(sums, size, nuisance),
        precision,
        precision.square() / degrees,
        [gained - half, slope - excess + gained],
        [precision * (1 - share), precision * (half / degrees - share)],
        [[bend, mixed], [mixed, bend + excess - 2 * shape * share - curvature]],
    )
