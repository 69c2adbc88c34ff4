"""Families: what is assumed of a target, and how linear predictors become its mean.

Predictors (..., m) become `parts`, in which K models mix: means for the gaussian family, logarithms of means or of
class probabilities for the others, so that nothing is lost where a mean is tiny. All is torch, in double precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.errors import DataError, SettingError
from .grids import Grid

_LARGEST_LOG = 30.0  # a mean of e^30 is nobody's; beyond it the exponential is continued by its tangent
_TINY = 1e-300


Memberships = Tensor | Grid  # each row's own (n, 1, K), or all those of its client's grid


def combine(c: Memberships, parts: Tensor) -> Tensor:
    """Parts (n, K, p) of K models under memberships: (n, G, p)."""
    return c.combine(parts) if isinstance(c, Grid) else c @ parts


def combine_logs(c: Memberships, parts: Tensor) -> Tensor:
    """The same for logarithms of parts; unlike logsumexp(log c + parts) it has derivatives where c_k = 0."""
    top = parts.detach().amax(1, keepdim=True)
    return combine(c, (parts - top).exp()).clamp_min(_TINY).log() + top


def _exponential(eta: Tensor) -> Tensor:
    """exp, without overflow on the way to a minimum."""
    if eta.numel() == 0 or float(eta.detach().amax()) <= _LARGEST_LOG:
        return eta.exp()
    low = eta.clamp(max=_LARGEST_LOG)
    return low.exp() * (1 + (eta - low))


class _LogSigmoid(torch.autograd.Function):
    """log(1 / (1 + exp(-z))) to 1e-16, in a quarter of the time of torch's own, which also keeps tiny values apart."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clamp(max=0) - z.abs().neg_().exp_().add_(1).log_()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        z: Tensor = ctx.saved_tensors[0]
        return slope * (-z).sigmoid()


def _log_sigmoid(z: Tensor) -> Tensor:
    found: Tensor = _LogSigmoid.apply(z)  # type: ignore[no-untyped-call]
    return found


class Family(ABC):
    """One of `links` leads from predictors to means; the first is the usual one."""

    name: ClassVar[str]
    links: ClassVar[tuple[str, ...]]
    loss: ClassVar[str | None] = None  # of ppfl.core, where it has this family with its usual link
    has_dispersion: ClassVar[bool] = False
    outputs: int = 1

    def __init__(self, link: str | None = None) -> None:
        self.link = self.links[0] if link is None else link
        if self.link not in self.links:
            raise SettingError(f"family {self.name!r} has no link {link!r}; use one of {', '.join(self.links)}")

    def check(self, y: Tensor) -> None:  # noqa: B027
        """Refuse targets the family cannot have."""

    @abstractmethod
    def parts(self, eta: Tensor) -> Tensor:
        """From predictors (..., m) to what mixes (..., p)."""

    def mix(self, c: Memberships, parts: Tensor) -> Tensor:
        """Parts of the mean prediction, Eq. (7): (n, K, p) become (n, G, p)."""
        return combine_logs(c, parts)

    @abstractmethod
    def log_density(self, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Of y (n,) under parts (n, G, p), all constants included: (n, G)."""

    def log_density_at(self, eta: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Of y under predictors (n, G, m): (n, G)."""
        return self.log_density(self.parts(eta), y, log_dispersion)

    def mixed_log_density(self, c: Memberships, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Of y under the mean prediction of K models' parts (n, K, p): (n, G)."""
        return self.log_density(self.mix(c, parts), y, log_dispersion)

    @abstractmethod
    def mean(self, parts: Tensor) -> Tensor:
        """(...,) for one mean, (..., m) for class probabilities."""

    @abstractmethod
    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """Twice the log-likelihood that a perfect prediction would gain, (n,), for a dispersion of 1."""

    def first_dispersion(self, mean: Tensor, y: Tensor) -> float:
        """Logarithm of the dispersion that residuals suggest."""
        return 0.0


class Gaussian(Family):
    name = "gaussian"
    links = ("identity", "log")
    loss = "squared"
    has_dispersion = True

    def parts(self, eta: Tensor) -> Tensor:
        return eta if self.link == "identity" else _exponential(eta)

    def mix(self, c: Memberships, parts: Tensor) -> Tensor:
        return combine(c, parts)

    def log_density(self, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """The dispersion is the variance."""
        squares = (parts[..., 0] - y[:, None]).square()
        return -0.5 * (squares * torch.exp(-log_dispersion) + log_dispersion + math.log(2 * math.pi))

    def mean(self, parts: Tensor) -> Tensor:
        return parts[..., 0]

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return (mean - y).square()

    def first_dispersion(self, mean: Tensor, y: Tensor) -> float:
        return math.log(max(float((mean - y).square().mean()), 1e-12))


class _Positive(Family):
    """Means above 0, kept as logarithms."""

    def parts(self, eta: Tensor) -> Tensor:
        if self.link == "log":
            return eta
        return 2 * eta.abs().clamp_min(1e-12).log()  # sqrt

    def mean(self, parts: Tensor) -> Tensor:
        return _exponential(parts[..., 0])


class Poisson(_Positive):
    name = "poisson"
    links = ("log", "sqrt")
    loss = "poisson"

    def check(self, y: Tensor) -> None:
        if bool((y < 0).any()) or bool((y != y.round()).any()):
            fault = f"the smallest is {float(y.min()):g}" if bool((y < 0).any()) else "not all are whole"
            raise DataError(f"family 'poisson' needs counts 0, 1, 2, ... in y; {fault}: clean y, or use 'gaussian'")

    def log_density(self, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        log_mean = parts[..., 0]
        return y[:, None] * log_mean - _exponential(log_mean) - torch.lgamma(y + 1)[:, None]

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return 2 * (torch.xlogy(y, y / mean) - (y - mean))


class Gamma(_Positive):
    name = "gamma"
    links = ("log",)
    has_dispersion = True

    def check(self, y: Tensor) -> None:
        if bool((y <= 0).any()):
            raise DataError(f"family 'gamma' needs y > 0; the smallest is {float(y.min()):g}: use 'gaussian'")

    def log_density(self, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """The dispersion is one over the shape."""
        log_mean, shape = parts[..., 0], torch.exp(-log_dispersion)
        ratio = y.log()[:, None] - log_mean
        constant = shape * shape.log() - torch.lgamma(shape) - y.log()[:, None]
        return shape * (ratio - _exponential(ratio)) + constant

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return 2 * ((y - mean) / mean - (y / mean).log())

    def first_dispersion(self, mean: Tensor, y: Tensor) -> float:
        return math.log(max(float(((y - mean) / mean).square().mean()), 1e-12))


class Classes(Family):
    """Labels 0, 1, ...; parts are the logarithms of all class probabilities."""

    name = "multinomial"
    links = ("logit",)
    loss = "cross_entropy"

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.outputs = classes

    def parts(self, eta: Tensor) -> Tensor:
        return eta.log_softmax(-1)

    def log_density(self, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        chosen = y.long()[:, None, None].expand(*parts.shape[:-1], 1)
        return parts.gather(-1, chosen)[..., 0]

    def log_density_at(self, eta: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Of the one class that is asked for; sums over classes run along rows of memberships, which is quick."""
        by_class = eta.transpose(1, 2)
        return by_class[torch.arange(len(y)), y.long()] - torch.logsumexp(by_class, 1)

    def mixed_log_density(self, c: Memberships, parts: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        """Mixing commutes with looking at one class, and is cheaper after it."""
        return combine_logs(c, self.log_density(parts, y, log_dispersion)[..., None])[..., 0]

    def mean(self, parts: Tensor) -> Tensor:
        return parts.exp()

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return -2 * mean.gather(-1, y.long()[:, None])[:, 0].clamp_min(_TINY).log()


class Bernoulli(Classes):
    """Two classes need one predictor."""

    name = "bernoulli"
    loss = "logistic"

    def __init__(self) -> None:
        super().__init__(1)

    def parts(self, eta: Tensor) -> Tensor:
        return torch.cat([_log_sigmoid(-eta), _log_sigmoid(eta)], -1)

    def log_density_at(self, eta: Tensor, y: Tensor, log_dispersion: Tensor) -> Tensor:
        return _log_sigmoid((2 * y - 1)[:, None] * eta[..., 0])


REGRESSIONS: dict[str, Callable[[str | None], Family]] = {family.name: family for family in (Gaussian, Poisson, Gamma)}


def regression_family(name: str, link: str | None) -> Family:
    """By name.

    >>> regression_family("poisson", None).link
    'log'
    """
    if name not in REGRESSIONS:
        raise SettingError(f"there is no family {name!r}; use one of {', '.join(REGRESSIONS)}")
    return REGRESSIONS[name](link)
