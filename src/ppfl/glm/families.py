"""Families of numbers and of classes, and all families by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor

from ..core.losses import bernoulli_log_density, observed_class
from ..errors import DataError, SettingError
from .count_families import (
    NegativeBinomialFamily,
    PoissonFamily,
    ZeroInflatedNegativeBinomialFamily,
    ZeroInflatedPoissonFamily,
)
from .family import (
    LOG_DISPERSION,
    TINY,
    Derivatives,
    Family,
    Memberships,
    PositiveFamily,
    combine,
    combine_logs,
    derivatives_of_one,
    safe_exp,
    to_array,
)


class GaussianFamily(Family):
    name = "gaussian"
    link = "identity"
    loss: ClassVar[str | None] = "squared"
    nuisance: ClassVar[tuple[str, ...]] = (LOG_DISPERSION,)

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return eta

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

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        return [math.log(max(float((mean - y).square().mean()), 1e-12))]


class GammaFamily(PositiveFamily):
    name = "gamma"
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

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        return [math.log(max(float(((y - mean) / mean).square().mean()), 1e-12))]


class MultinomialFamily(Family):
    """Labels 0, 1, ...; the mean parameters are the logarithms of all class probabilities."""

    name = "multinomial"
    link = "logit"
    loss = "cross_entropy"

    def __init__(self, classes: int) -> None:
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


_REGRESSIONS: tuple[type[Family], ...] = (
    GaussianFamily, PoissonFamily, GammaFamily, NegativeBinomialFamily,
    ZeroInflatedPoissonFamily, ZeroInflatedNegativeBinomialFamily,
)  # fmt: skip
REGRESSIONS: dict[str, Callable[[], Family]] = {family.name: family for family in _REGRESSIONS}
_ALIASES = {  # what R's packages and statsmodels call them, and shorter names
    "nb": "negative binomial", "nb2": "negative binomial", "negbin": "negative binomial",
    "nbinom": "negative binomial", "nbinom2": "negative binomial",
    "zip": "zero-inflated poisson", "zinb": "zero-inflated negative binomial",
}  # fmt: skip
_NO_FAMILIES = {  # names that are asked for, and what to do instead
    "quasipoisson": "it has no likelihood to choose k by; use 'negative binomial'",
    "binomial": "use PopulationClassifier, with one row of successes and one of failures for counts of trials, and "
    "their numbers as sample_weight",
    "quasibinomial": "rows of 0 and 1 do not determine a dispersion; use PopulationClassifier",
}


def family_name(name: str) -> str:
    """The name of a regression family, from any usual spelling of it; unknown names stay as they are.

    >>> family_name("Negative_Binomial"), family_name("zip"), family_name("something")
    ('negative binomial', 'zero-inflated poisson', 'something')
    """
    plain = _plain(name)
    return _ALIASES.get(plain) or {_plain(known): known for known in REGRESSIONS}.get(plain, name)


def regression_family(name: str) -> Family:
    """The family with this name.

    >>> regression_family("poisson").link
    'log'
    """
    found = REGRESSIONS.get(family_name(name))
    if found is None:
        remedy = _NO_FAMILIES.get(_plain(name), f"use one of {', '.join(REGRESSIONS)}")
        raise SettingError(f"there is no family {name!r}; {remedy}")
    return found()


def is_positive_only(name: str) -> bool:
    """Whether the family of this name has no negative targets; False for unknown names."""
    return any(family.name == family_name(name) and family.positive_only for family in _REGRESSIONS)


def classification_family(classes: int) -> Family:
    """The family for this number of classes."""
    return BernoulliFamily() if classes == 2 else MultinomialFamily(classes)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", str(name)).lower()
