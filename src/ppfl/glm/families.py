"""Families: the distribution of the target, and the link from linear predictors to its mean.

A family turns predictors (..., m) into mean parameters (..., p): means for the gaussian family, and logarithms of means
or of class probabilities for all others, so that tiny means lose no precision. Predictions of K models are mixed in
this form. Everything is torch in double precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.errors import DataError, SettingError
from .membership_grid import Grid

_LARGEST_LOG = 30.0  # no real mean is as large as e^30; beyond it the exponential is replaced by its tangent
_TINY = 1e-300


Memberships = Tensor | Grid  # one membership per row (n, 1, K), or the grid of each row's client


def combine(c: Memberships, values: Tensor) -> Tensor:
    """Sums over K models of values (n, K, p), weighted by memberships: (n, G, p)."""
    return c.combine(values) if isinstance(c, Grid) else c @ values


def combine_logs(c: Memberships, logs: Tensor) -> Tensor:
    """The same for logarithms of values; unlike logsumexp(log c + logs) it has derivatives where c_k = 0."""
    top = logs.detach().amax(1, keepdim=True)
    return combine(c, (logs - top).exp()).clamp_min(_TINY).log() + top


def _safe_exp(eta: Tensor) -> Tensor:
    """exp that cannot overflow during optimisation."""
    if eta.numel() == 0 or float(eta.detach().amax()) <= _LARGEST_LOG:
        return eta.exp()
    low = eta.clamp(max=_LARGEST_LOG)
    return low.exp() * (1 + (eta - low))


class _LogSigmoid(torch.autograd.Function):
    """log(1 / (1 + exp(-z))) to 1e-16, four times as fast as torch's own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clamp(max=0) - z.abs().neg_().exp_().add_(1).log_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        z: Tensor = ctx.saved_tensors[0]
        return gradient * (-z).sigmoid()


def _log_sigmoid(z: Tensor) -> Tensor:
    found: Tensor = _LogSigmoid.apply(z)  # type: ignore[no-untyped-call]
    return found


class Family(ABC):
    """A distribution with one of several links. The first of `links` is the default."""

    name: ClassVar[str]
    links: ClassVar[tuple[str, ...]]
    loss: ClassVar[str | None] = None  # the loss of ppfl.core that is this family with its default link, if any
    has_dispersion: ClassVar[bool] = False
    outputs: int = 1

    def __init__(self, link: str | None = None) -> None:
        self.link = self.links[0] if link is None else link
        if self.link not in self.links:
            raise SettingError(f"family {self.name!r} has no link {link!r}; use one of {', '.join(self.links)}")

    def check(self, y: Tensor) -> None:  # noqa: B027
        """Raise a DataError for targets that the family cannot have."""

    @abstractmethod
    def mean_parameters(self, eta: Tensor) -> Tensor:
        """From predictors (..., m) to mean parameters (..., p)."""

    def mix(self, c: Memberships, parameters: Tensor) -> Tensor:
        """Mean parameters of the mixed prediction, Eq. (7): (n, K, p) become (n, G, p)."""
        return combine_logs(c, parameters)

    @abstractmethod
    def log_density(self, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Log density of y (n,) under mean parameters (n, G, p), with all constants: (n, G)."""

    def log_density_of_predictors(self, eta: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Log density of y (n,) under predictors (n, G, m): (n, G)."""
        return self.log_density(self.mean_parameters(eta), y, log_dispersion)

    def mixed_log_density(self, c: Memberships, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Log density of y (n,) under the mixed prediction of K models with mean parameters (n, K, p): (n, G)."""
        return self.log_density(self.mix(c, parameters), y, log_dispersion)

    @abstractmethod
    def mean(self, parameters: Tensor) -> Tensor:
        """Means (...,), or class probabilities (..., m)."""

    @abstractmethod
    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """Twice the log-likelihood that a perfect prediction would gain, (n,), for a dispersion of 1."""

    def initial_log_dispersion(self, mean: Tensor, y: Tensor) -> float:
        """The log dispersion that the residuals suggest."""
        return 0.0


class GaussianFamily(Family):
    name = "gaussian"
    links = ("identity", "log")
    loss = "squared"
    has_dispersion = True

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return eta if self.link == "identity" else _safe_exp(eta)

    def mix(self, c: Memberships, parameters: Tensor) -> Tensor:
        return combine(c, parameters)

    def log_density(self, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """The dispersion is the variance."""
        squares = (parameters[..., 0] - y[:, None]).square()
        return -0.5 * (squares * torch.exp(-log_dispersion) + log_dispersion + math.log(2 * math.pi))

    def mean(self, parameters: Tensor) -> Tensor:
        return parameters[..., 0]

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return (mean - y).square()

    def initial_log_dispersion(self, mean: Tensor, y: Tensor) -> float:
        return math.log(max(float((mean - y).square().mean()), 1e-12))


class _PositiveFamily(Family):
    """Families with positive means, stored as logarithms."""

    def mean_parameters(self, eta: Tensor) -> Tensor:
        if self.link == "log":
            return eta
        return 2 * eta.abs().clamp_min(1e-12).log()  # sqrt

    def mean(self, parameters: Tensor) -> Tensor:
        return _safe_exp(parameters[..., 0])


class PoissonFamily(_PositiveFamily):
    name = "poisson"
    links = ("log", "sqrt")
    loss = "poisson"

    def check(self, y: Tensor) -> None:
        if bool((y < 0).any()) or bool((y != y.round()).any()):
            fault = f"the smallest is {float(y.min()):g}" if bool((y < 0).any()) else "not all are whole"
            raise DataError(f"family 'poisson' needs counts 0, 1, 2, ... in y; {fault}: clean y, or use 'gaussian'")

    def log_density(self, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        log_mean = parameters[..., 0]
        return y[:, None] * log_mean - _safe_exp(log_mean) - torch.lgamma(y + 1)[:, None]

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return 2 * (torch.xlogy(y, y / mean.clamp_min(_TINY)) - (y - mean))


class GammaFamily(_PositiveFamily):
    name = "gamma"
    links = ("log",)
    has_dispersion = True

    def check(self, y: Tensor) -> None:
        if bool((y <= 0).any()):
            raise DataError(f"family 'gamma' needs y > 0; the smallest is {float(y.min()):g}: use 'gaussian'")

    def log_density(self, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """The dispersion is one over the shape."""
        log_mean, shape = parameters[..., 0], torch.exp(-log_dispersion)
        ratio = y.log()[:, None] - log_mean
        constant = shape * shape.log() - torch.lgamma(shape) - y.log()[:, None]
        return shape * (ratio - _safe_exp(ratio)) + constant

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return 2 * ((y - mean) / mean - (y / mean).log())

    def initial_log_dispersion(self, mean: Tensor, y: Tensor) -> float:
        return math.log(max(float(((y - mean) / mean).square().mean()), 1e-12))


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

    def log_density(self, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        observed = y.long()[:, None, None].expand(*parameters.shape[:-1], 1)
        return parameters.gather(-1, observed)[..., 0]

    def log_density_of_predictors(self, eta: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Of the observed class only. Summing over classes with memberships in the last dimension is fast."""
        by_class = eta.transpose(1, 2)
        return by_class[torch.arange(len(y)), y.long()] - torch.logsumexp(by_class, 1)

    def mixed_log_density(self, c: Memberships, parameters: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Selecting the observed class first gives the same result, and mixing one class is cheaper than all."""
        return combine_logs(c, self.log_density(parameters, y, log_dispersion)[..., None])[..., 0]

    def mean(self, parameters: Tensor) -> Tensor:
        return parameters.exp()

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return -2 * mean.gather(-1, y.long()[:, None])[:, 0].clamp_min(_TINY).log()


class BernoulliFamily(MultinomialFamily):
    """Two classes, with one predictor."""

    name = "bernoulli"
    loss = "logistic"

    def __init__(self) -> None:
        super().__init__(1)

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return torch.cat([_log_sigmoid(-eta), _log_sigmoid(eta)], -1)

    def log_density_of_predictors(self, eta: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        return _log_sigmoid((2 * y - 1)[:, None] * eta[..., 0])


REGRESSIONS: dict[str, Callable[[str | None], Family]] = {
    family.name: family for family in (GaussianFamily, PoissonFamily, GammaFamily)
}


def regression_family(name: str, link: str | None) -> Family:
    """The family with this name and link.

    >>> regression_family("poisson", None).link
    'log'
    """
    if name not in REGRESSIONS:
        raise SettingError(f"there is no family {name!r}; use one of {', '.join(REGRESSIONS)}")
    return REGRESSIONS[name](link)


def classification_family(classes: int) -> Family:
    """The family for this number of classes."""
    return BernoulliFamily() if classes == 2 else MultinomialFamily(classes)
