"""Zero-inflated counts: a share of the rows is 0 whatever the mean is."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .counts import CountFamily, PoissonFamily
from .family_contract import TINY
from .negative_binomial import LOG_INVERSE_SIZE, NegativeBinomialFamily

LOGIT_ZEROS = "logit of extra zeros"
_CENTRE, _SCALE = -2.0, 5.0  # of the normal prior of the logit, which is weak


class ZeroInflatedFamily(CountFamily):
    """y is 0 in a share of the rows, and a count of `count_family` in all others.

    The mean parameter is the logarithm of the mean of these counts. The last nuisance parameter is the logit of the
    share; those before it belong to the counts.
    """

    count_family: ClassVar[type[CountFamily]]

    def __init__(self, link: str | None = None) -> None:
        super().__init__(link)
        self.counts = self.count_family(link)

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

    def draw(self, parameters: Tensor, nuisance: Tensor, random: np.random.Generator) -> Tensor:
        counts = self.counts.draw(parameters, nuisance[:-1], random)
        return counts * (torch.from_numpy(random.random(counts.shape)) >= nuisance[-1].sigmoid())

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        """Half of the zeros that Poisson counts with these means, scaled to the average count, would not have."""
        scaled = mean * (y.sum() / mean.sum())
        missing = float((y == 0).double().mean() - torch.exp(-scaled).mean())
        share = min(max(0.5 * missing, 0.02), 0.5)
        return [*self.counts.initial_nuisance(mean, y), math.log(share / (1 - share))]

    def nuisance_penalty(self, nuisance: Tensor) -> Tensor:
        """Without extra zeros the likelihood is flat towards -inf, and the logit would have no best value."""
        own = 0.5 * ((nuisance[-1] - _CENTRE) / _SCALE).square().sum()
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
