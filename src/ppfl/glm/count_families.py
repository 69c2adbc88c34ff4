"""Families of counts: Poisson, negative binomial, and both with extra zeros."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor

from ..core.losses import poisson_deviance, poisson_log_density
from ..errors import DataError
from .family import LARGEST_LOG, TINY, Array, Derivatives, PositiveFamily, derivatives_of_one, safe_exp, to_array


class CountFamily(PositiveFamily):
    """Counts 0, 1, 2, ... whose means are stored as logarithms."""

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
        eta = eta[..., 0]
        mean = safe_exp(eta)
        log = (y[:, None] * eta).sub_(mean).sub_(torch.lgamma(y + 1)[:, None])
        return derivatives_of_one(log, y[:, None] - mean, mean.clamp(max=math.exp(LARGEST_LOG)))

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        return mean

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        mean = to_array(safe_exp(parameters[..., 0]))
        return torch.from_numpy(np.asarray(special.pdtr(to_array(y)[:, None], mean)))


def negative_binomial_cdf(y: Array, mean: Array, inverse_size: Array) -> Array:
    """P(Y <= y) for counts with variance mean + inverse_size mean^2."""
    # With the success probability q near 0 rather than 1 - q near 1, nothing is lost near the Poisson limit.
    excess = inverse_size * mean
    return np.asarray(special.betaincc(y + 1, 1 / inverse_size, excess / (1 + excess)))


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


LOGIT_ZEROS = "logit of extra zeros"
_ZEROS_CENTRE, _ZEROS_SCALE = -2.0, 5.0  # of the normal prior of the logit, which is weak


class ZeroInflatedFamily(CountFamily):
    """y is 0 in a share of the rows, and a count of `count_family` in all others.

    The mean parameter is the logarithm of the mean of these counts. The last nuisance parameter is the logit of the
    share; those before it belong to the counts.
    """

    count_family: ClassVar[type[CountFamily]]

    def __init__(self) -> None:
        self.counts = self.count_family()

    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        logs, logit = self.counts.log_density(parameters, y, nuisance[:-1]), nuisance[-1]
        # for zeros, logaddexp(logs, logit) - logs, which is slower to compute directly
        added = F.logsigmoid(logs - logit) * -(y == 0).to(logs.dtype)[:, None]
        return logs + added + F.logsigmoid(-logit)

    def mean(self, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return (-nuisance[-1]).sigmoid() * self.counts.mean(parameters, nuisance[:-1])

    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        """Of the counts, and between them and the zeros."""
        kept, of_counts = self._split(mean, nuisance)
        return kept * self.counts.variance(of_counts, nuisance[:-1]) + kept * (1 - kept) * of_counts.square()

    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        """For the given share of zeros. A perfect prediction has the mean y in the counts."""
        if nuisance is None:
            return super().deviance(mean, y)
        _, of_counts = self._split(mean, nuisance)
        positive = of_counts.clamp_min(TINY)
        at_zero = self.log_density(positive.log()[:, None, None], torch.zeros_like(y), nuisance)[:, 0]
        return torch.where(y == 0, -2 * at_zero, self.counts.deviance(positive, y, nuisance[:-1]))

    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        share = nuisance[-1].sigmoid().detach()
        return share + (1 - share) * self.counts.cdf(y, parameters, nuisance[:-1])

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        """Half of the zeros that Poisson counts with these means, scaled to the average count, would not have."""
        scaled = mean * (y.sum() / mean.sum())
        missing = float((y == 0).double().mean() - torch.exp(-scaled).mean())
        share = min(max(0.5 * missing, 0.02), 0.5)
        return [*self.counts.initial_nuisance(mean, y), math.log(share / (1 - share))]

    def nuisance_penalty(self, nuisance: Tensor) -> Tensor:
        """Without extra zeros the likelihood is flat towards -inf, and the logit would have no best value."""
        own = 0.5 * ((nuisance[-1] - _ZEROS_CENTRE) / _ZEROS_SCALE).square().sum()
        return own + self.counts.nuisance_penalty(nuisance[:-1])

    def natural_parameters(self, nuisance: Tensor) -> dict[str, float]:
        share = float(nuisance[-1].sigmoid())
        return self.counts.natural_parameters(nuisance[:-1]) | {"share of extra zeros": share}

    def _split(self, mean: Tensor, nuisance: Tensor) -> tuple[Tensor, Tensor]:
        """The share of rows that are counts, and the mean of these, from the mean of all."""
        kept = (-nuisance[-1]).sigmoid()
        return kept, mean / kept


class ZeroInflatedPoissonFamily(ZeroInflatedFamily):
    name = "zero-inflated poisson"
    count_family = PoissonFamily
    nuisance = (LOGIT_ZEROS,)


class ZeroInflatedNegativeBinomialFamily(ZeroInflatedFamily):
    name = "zero-inflated negative binomial"
    count_family = NegativeBinomialFamily
    nuisance = (LOG_INVERSE_SIZE, LOGIT_ZEROS)
