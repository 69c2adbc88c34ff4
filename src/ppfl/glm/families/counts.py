"""Families of counts: Poisson, and the quasi-Poisson whose variance is a multiple of the mean."""

from __future__ import annotations

import math
from typing import ClassVar, Self

import numpy as np
import torch
from scipy import special
from torch import Tensor

from ...core.losses import poisson_deviance, poisson_log_density
from ...errors import DataError
from .family_contract import LARGEST_LOG, Array, Derivatives, PositiveFamily, derivatives_of_one, safe_exp, to_array


class CountFamily(PositiveFamily):
    """Counts 0, 1, 2, ... whose means are stored as logarithms."""

    links = ("log", "sqrt")

    def check(self, y: Tensor) -> None:
        if bool((y < 0).any()) or bool((y != y.round()).any()):
            fault = f"the smallest is {float(y.min()):g}" if bool((y < 0).any()) else "not all are whole"
            raise DataError(f"family {self.name!r} needs counts 0, 1, 2, ... in y; {fault}: clean y, or use 'gaussian'")

    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        return poisson_deviance(mean, y)

    def cdf_below(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return self.cdf((y - 1).clamp_min(0), parameters, nuisance) * (y > 0)[:, None]


class PoissonFamily(CountFamily):
    name = "poisson"
    loss: ClassVar[str | None] = "poisson"

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        log_mean = parameters[..., 0]
        return poisson_log_density(log_mean, safe_exp(log_mean), y[:, None]) - torch.lgamma(y + 1)[:, None]

    def derivatives(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
        if self.link != "log":
            return super().derivatives(eta, y, nuisance)
        eta = eta[..., 0]
        mean = safe_exp(eta)
        log = (y[:, None] * eta).sub_(mean).sub_(torch.lgamma(y + 1)[:, None])
        return derivatives_of_one(log, y[:, None] - mean, mean.clamp(max=math.exp(LARGEST_LOG)))

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return mean

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        mean = to_array(safe_exp(parameters[..., 0]))
        return torch.from_numpy(np.asarray(special.pdtr(to_array(y)[:, None], mean)))

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        mean = to_array(safe_exp(parameters[..., 0]))
        return torch.from_numpy(random.poisson(mean).astype(np.float64))


class QuasiPoissonFamily(PoissonFamily):
    """Counts with a variance of `dispersion` times the mean; the Poisson log-likelihood is divided by it.

    This is no distribution, so `cdf` and `draw` are those of the negative binomial with the same mean and variance, or
    of the Poisson if the dispersion is at most 1.
    """

    name = "quasipoisson"
    loss = None
    is_quasi = True

    def __init__(self, link: str | None = None, dispersion: float = 1.0) -> None:
        super().__init__(link)
        self.dispersion = dispersion

    def with_dispersion(self, dispersion: float) -> Self:
        return type(self)(self.link, dispersion)

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        return super().log_density(parameters, y, nuisance) / self.dispersion

    def derivatives(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
        found = super().derivatives(eta, y, nuisance)
        if self.link != "log":
            return found  # of this family's own density
        scale = 1 / self.dispersion
        return Derivatives(scale * found.log, scale * found.slope, scale * found.curvature)

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return self.dispersion * mean

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        if self.dispersion <= 1:
            return super().cdf(y, parameters, nuisance)
        mean = to_array(safe_exp(parameters[..., 0]))
        return torch.from_numpy(negative_binomial_cdf(to_array(y)[:, None], mean, (self.dispersion - 1) / mean))

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        if self.dispersion <= 1:
            return super().draw(parameters, nuisance, random)
        mean = to_array(safe_exp(parameters[..., 0]))
        return torch.from_numpy(draw_negative_binomial(mean, (self.dispersion - 1) / mean, random))

    def natural_parameters(self, nuisance: Tensor) -> dict[str, float]:
        return {"dispersion": self.dispersion}


def negative_binomial_cdf(y: Array, mean: Array, inverse_size: Array) -> Array:
    """P(Y <= y) for counts with variance mean + inverse_size mean^2."""
    # With the success probability q near 0 rather than 1 - q near 1, nothing is lost near the Poisson limit.
    excess = inverse_size * mean
    return np.asarray(special.betaincc(y + 1, 1 / inverse_size, excess / (1 + excess)))


def draw_negative_binomial(mean: Array, inverse_size: Array, random: np.random.Generator) -> Array:
    """Poisson counts whose means are gamma distributed."""
    rate = random.gamma(1 / inverse_size, inverse_size, size=mean.shape) * mean
    return np.asarray(random.poisson(rate).astype(np.float64))
