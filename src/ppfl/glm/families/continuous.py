"""Families of numbers: gaussian, and gamma for positive ones."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from ...errors import DataError
from .family_contract import LOG_DISPERSION, Family, Memberships, PositiveFamily, combine, safe_exp, to_array


class GaussianFamily(Family):
    name = "gaussian"
    links: ClassVar[tuple[str, ...]] = ("identity", "log")
    loss: ClassVar[str | None] = "squared"
    nuisance: ClassVar[tuple[str, ...]] = (LOG_DISPERSION,)

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return eta if self.link == "identity" else safe_exp(eta)

    def mix(self, c: Memberships, parameters: Tensor) -> Tensor:
        return combine(c, parameters)

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """The dispersion is the variance."""
        log_dispersion = nuisance[0]
        squares = (parameters[..., 0] - y[:, None]).square()
        return -0.5 * (squares * torch.exp(-log_dispersion) + log_dispersion + math.log(2 * math.pi))

    def mean(self, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return parameters[..., 0]

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return nuisance[0].exp() * torch.ones_like(mean)

    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        return (mean - y).square()

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        standard = (y[:, None] - parameters[..., 0]) * torch.exp(-0.5 * nuisance[0])
        return torch.from_numpy(np.asarray(special.ndtr(to_array(standard))))

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        mean = parameters[..., 0].detach()
        return mean + torch.exp(0.5 * nuisance[0]).detach() * torch.from_numpy(random.normal(size=mean.shape))

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        return [math.log(max(float((mean - y).square().mean()), 1e-12))]


class GammaFamily(PositiveFamily):
    name = "gamma"
    links = ("log",)
    nuisance = (LOG_DISPERSION,)

    def check(self, y: Tensor) -> None:
        if bool((y <= 0).any()):
            raise DataError(f"family 'gamma' needs y > 0; the smallest is {float(y.min()):g}: use 'gaussian'")

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """The dispersion is one over the shape."""
        log_mean, shape = parameters[..., 0], torch.exp(-nuisance[0])
        ratio = y.log()[:, None] - log_mean
        constant = shape * shape.log() - torch.lgamma(shape) - y.log()[:, None]
        return shape * (ratio - safe_exp(ratio)) + constant

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return nuisance[0].exp() * mean.square()

    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        return 2 * ((y - mean) / mean - (y / mean).log())

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        shape = torch.exp(-nuisance[0])
        scaled = shape * y[:, None] / self.mean(parameters, nuisance)
        return torch.from_numpy(np.asarray(special.gammainc(to_array(shape), to_array(scaled))))

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        mean, dispersion = to_array(self.mean(parameters, nuisance)), to_array(nuisance[0].exp())
        return torch.from_numpy(np.asarray(random.gamma(1 / dispersion, dispersion, size=mean.shape) * mean))

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        return [math.log(max(float(((y - mean) / mean).square().mean()), 1e-12))]
