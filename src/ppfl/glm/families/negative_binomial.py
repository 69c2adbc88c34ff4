"""The negative binomial family: counts that vary more than Poisson counts with the same mean."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .counts import CountFamily, draw_negative_binomial, negative_binomial_cdf
from .family_contract import TINY, Derivatives, derivatives_of_one, safe_exp, to_array

LOG_INVERSE_SIZE = "log 1/size"
_SMALLEST_LOG = -60.0  # of 1/size; nothing distinguishes smaller ones from a Poisson distribution
_LARGE_SIZE = 16.0  # from here on Stirling's series with five terms is exact in double precision
_CENTRE, _SCALE = -2.0, 5.0  # of the normal prior of log 1/size, which is weak: e^-12 to e^8 is within two deviations


class NegativeBinomialFamily(CountFamily):
    """The variance is mean + mean^2 / size. The nuisance parameter is log(1/size); at -inf this is the Poisson."""

    name = "negative binomial"
    nuisance = (LOG_INVERSE_SIZE,)

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        log_mean, log_inverse, counts = parameters[..., 0], _log_inverse_size(nuisance), y[:, None]
        log_share = F.logsigmoid(-log_inverse - log_mean)  # -log(1 + mean / size), also where this is tiny or huge
        constant = log_rising_ratio(counts, log_inverse) - torch.lgamma(counts + 1)
        return torch.addcmul(torch.addcmul(constant, counts, log_mean), counts + torch.exp(-log_inverse), log_share)

    def derivatives(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
        if self.link != "log":
            return super().derivatives(eta, y, nuisance)
        eta, log_inverse, counts = eta[..., 0], _log_inverse_size(nuisance), y[:, None]
        with torch.enable_grad():
            at = log_inverse.detach().expand(counts.shape).clone().requires_grad_()
            ratio = log_rising_ratio(counts, at)
            (ratio_slope,) = torch.autograd.grad(ratio.sum(), at, create_graph=True)
            (ratio_bend,) = torch.autograd.grad(ratio_slope.sum(), at)
        size = torch.exp(-log_inverse)
        excess = eta + log_inverse
        log_share, share = F.logsigmoid(-excess), torch.sigmoid(excess)  # of 1 / (1 + mean / size), and of the rest
        weighted = (counts + size) * share
        curvature = weighted * (1 - share)
        sized = size * share
        log = torch.addcmul((ratio - torch.lgamma(counts + 1)).detach() + counts * eta, counts + size, log_share)
        in_size = ratio_slope.detach() - size * log_share - weighted
        second = curvature - 2 * sized - size * log_share - ratio_bend
        return derivatives_of_one(log, counts - weighted, curvature, [in_size], [curvature - sized], [[second]])

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return mean + _log_inverse_size(nuisance).exp() * mean.square()

    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        if nuisance is None:
            return super().deviance(mean, y)
        inverse_size, positive = _log_inverse_size(nuisance).exp(), mean.clamp_min(TINY)
        growth = torch.log1p(inverse_size * y) - torch.log1p(inverse_size * positive)
        return 2 * (torch.xlogy(y, y) - torch.xlogy(y, positive) - (y + 1 / inverse_size) * growth)

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        mean, inverse_size = to_array(safe_exp(parameters[..., 0])), to_array(_log_inverse_size(nuisance).exp())
        return torch.from_numpy(negative_binomial_cdf(to_array(y)[:, None], mean, inverse_size))

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        mean, inverse_size = to_array(safe_exp(parameters[..., 0])), to_array(_log_inverse_size(nuisance).exp())
        return torch.from_numpy(draw_negative_binomial(mean, inverse_size, random))

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        """From the variance around means that are scaled to the average count, as the first means may be far away."""
        scaled = mean * (y.sum() / mean.sum())
        excess = float(((y - scaled).square() - scaled).sum() / scaled.square().sum().clamp_min(TINY))
        return [math.log(min(max(excess, 0.01), 10.0))]

    def nuisance_penalty(self, nuisance: Tensor) -> Tensor:
        """Without overdispersion the likelihood is flat towards -inf, and the parameter would have no best value."""
        return 0.5 * ((nuisance[0] - _CENTRE) / _SCALE).square().sum()

    def natural_parameters(self, nuisance: Tensor) -> dict[str, float]:
        return {"size": float(torch.exp(-nuisance[0]))}


def _log_inverse_size(nuisance: Tensor) -> Tensor:
    return nuisance[0].clamp(min=_SMALLEST_LOG)


def log_rising_ratio(y: Tensor, log_inverse: Tensor) -> Tensor:
    """The sum of log(1 + j / size) for j = 0, ..., y - 1. Differences of lgamma would cancel for large sizes."""
    size = torch.exp(-log_inverse)
    small, large = size.clamp(max=_LARGE_SIZE), size.clamp(min=_LARGE_SIZE)
    direct = torch.lgamma(y + small) - torch.lgamma(small) - torch.xlogy(y, small)
    stirling = (y + large - 0.5) * torch.log1p(y / large) - y + _stirling_rest(y + large) - _stirling_rest(large)
    return torch.where(size < _LARGE_SIZE, direct, stirling)


def _stirling_rest(x: Tensor) -> Tensor:
    """lgamma(x) - ((x - 0.5) log x - x + 0.5 log(2 pi)), for x >= 16."""
    square = x.square()
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / (1188 * square)) / square) / square) / square) / x
