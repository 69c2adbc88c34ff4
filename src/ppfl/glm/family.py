"""What a family is: the distribution of the target, and the link from linear predictors to its mean.

A family turns predictors (..., m) into mean parameters (..., p): means for the gaussian family, and logarithms of means
or of class probabilities for all others, so that tiny means lose no precision. Predictions of K models are mixed in
this form. Everything is torch in double precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

TINY = 1e-300
LOG_DISPERSION = "log dispersion"
LARGEST_LOG = 30.0  # no real mean is as large as e^30; beyond it the exponential is replaced by its tangent

Array = np.ndarray[Any, np.dtype[np.float64]]
Memberships = Tensor  # (M, K, G): G memberships of every client


def combine(c: Memberships, values: Tensor) -> Tensor:
    """Sums over K models of values (n, K, p), weighted by memberships: (n, G, p).

    The n rows are those of M clients, with n / M rows each.

    >>> combine(torch.tensor([[[0.5], [0.5]]]), torch.tensor([[[1.0], [3.0]], [[0.0], [2.0]]]))[:, 0, 0]
    tensor([2., 1.])
    """
    m, k, g = c.shape
    n, _, p = values.shape
    rows = n // max(1, m)
    by_client = values.view(m, rows, k, p).transpose(2, 3).reshape(m, rows * p, k)
    return torch.bmm(by_client, c).view(n, p, g).transpose(1, 2)


def combine_logs(c: Memberships, logs: Tensor) -> Tensor:
    """The same for logarithms of values; unlike logsumexp(log c + logs) it has derivatives where c_k = 0."""
    top = logs.detach().amax(1, keepdim=True)
    return combine(c, (logs - top).exp()).clamp_min(TINY).log() + top


def safe_exp(eta: Tensor) -> Tensor:
    """exp that cannot overflow during optimisation."""
    if eta.numel() == 0 or float(eta.detach().amax()) <= LARGEST_LOG:
        return eta.exp()
    low = eta.clamp(max=LARGEST_LOG)
    return low.exp() * (1 + (eta - low))


def to_array(values: Tensor) -> Array:
    """For scipy and numpy."""
    return values.detach().numpy()


class Derivatives(NamedTuple):
    """The log density of each row at each point, and its derivatives in p linear predictors."""

    log: Tensor  # (n, G)
    slope: Tensor  # (n, p, G)
    curvature: Tensor  # (n, p, p, G), minus the second derivatives
    nuisance: list[Tensor] = []  # (n, G), the slopes in the nuisance parameters
    crosses: list[Tensor] = []  # (n, p, G), minus the second derivatives in the predictors and a nuisance parameter
    seconds: list[list[Tensor]] = []  # (n, G), minus the second derivatives in two nuisance parameters


def derivatives_of_one(
    log: Tensor, slope: Tensor, curvature: Tensor, nuisance: Sequence[Tensor] = (), crosses: Sequence[Tensor] = (),
    seconds: Sequence[Sequence[Tensor]] = (),
) -> Derivatives:  # fmt: skip
    """Derivatives in one predictor, from tensors (n, G)."""
    return Derivatives(
        log, slope[:, None], curvature[:, None, None], list(nuisance), [cross[:, None] for cross in crosses],
        [list(row) for row in seconds],
    )  # fmt: skip


def derivatives_of_mixture(family: Family, c: Memberships, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
    """Of mixed predictions, in the predictors (n, K, p) of all K models, by automatic differentiation.

    The p of the result is K times that of the family.
    """
    (n, k, p), g = eta.shape, c.shape[2]
    rows = n // max(1, len(c))
    own = c.repeat_interleave(rows, 0).permute(0, 2, 1).reshape(n * g, k, 1)  # one point for each row
    flat = eta.detach()[:, None].expand(n, g, k, p).reshape(n * g, k * p)

    def log_density(at: Tensor, each: Tensor) -> Tensor:
        parameters = family.mean_parameters(at.view(n * g, k, p))
        return family.mixed_log_density(own, parameters, y.repeat_interleave(g), each)

    log, slopes, seconds = _differentiate(log_density, flat, nuisance)
    heads = range(k * p)

    def arranged(values: Tensor) -> Tensor:
        return values.view(n, g, -1).mT

    return Derivatives(
        log.view(n, g),
        arranged(torch.cat([slopes[i] for i in heads], 1)),
        arranged(torch.cat([seconds[i][j] for i in heads for j in heads], 1)).reshape(n, k * p, k * p, g),
        [slope.view(n, g) for slope in slopes[k * p :]],
        [arranged(torch.cat([seconds[i][j] for i in heads], 1)) for j in range(k * p, len(slopes))],
        [[second.view(n, g) for second in row[k * p :]] for row in seconds[k * p :]],
    )


def _differentiate(
    log_density: Callable[[Tensor, Tensor], Tensor], eta: Tensor, nuisance: Tensor
) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
    """A log density (n, 1) with its slopes, and minus its second derivatives, in predictors (n, p) and nuisance."""
    with torch.enable_grad():
        parts = [part.detach().clone().requires_grad_() for part in torch.split(eta, 1, 1)]
        # one value of every nuisance parameter for each row, so that derivatives are elementwise
        parts += [value.expand(len(eta), 1).detach().clone().requires_grad_() for value in nuisance]
        heads = torch.cat(parts[: eta.shape[1]], 1)
        log = log_density(heads, torch.stack(parts[eta.shape[1] :]) if len(nuisance) else nuisance)
        slopes = torch.autograd.grad(log.sum(), parts, create_graph=True)
        seconds = [torch.autograd.grad(slope.sum(), parts, retain_graph=True, allow_unused=True) for slope in slopes]
    zero = torch.zeros_like(log)
    minus = [[zero if part is None else part.neg() for part in row] for row in seconds]
    return log.detach(), [slope.detach() for slope in slopes], minus


class Family(ABC):
    """A distribution of the target y, with the link from linear predictors to its mean.

    `mean`, `variance` and `cdf` are those of y. `nuisance` has the parameters (r,) named by the
    attribute of the same name.
    """

    name: ClassVar[str]
    link: ClassVar[str]
    loss: ClassVar[str | None] = None  # the loss of ppfl.core that is this family if any
    nuisance: ClassVar[tuple[str, ...]] = ()  # parameters of the density besides the mean, such as a log dispersion
    positive_only: ClassVar[bool] = False  # whether y may not be negative
    outputs: int = 1

    def check(self, y: Tensor) -> None:  # noqa: B027
        """Raise a DataError for targets that the family cannot have."""

    @abstractmethod
    def mean_parameters(self, eta: Tensor) -> Tensor:
        """From predictors (..., m) to mean parameters (..., p)."""

    def mix(self, c: Memberships, parameters: Tensor) -> Tensor:
        """Mean parameters of the mixed prediction, Eq. (7): (n, K, p) become (n, G, p)."""
        return combine_logs(c, parameters)

    @abstractmethod
    def log_density(self, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """Log density of y (n,) under mean parameters (n, G, p), with all constants: (n, G)."""

    def log_density_of_predictors(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """Log density of y (n,) under predictors (n, G, m): (n, G)."""
        return self.log_density(self.mean_parameters(eta), y, nuisance)

    def derivatives(self, eta: Tensor, y: Tensor, nuisance: Tensor) -> Derivatives:
        """Of the log density under predictors (n, G, p), here for p = 1 by automatic differentiation."""
        n, g, _ = eta.shape

        def log_density(at: Tensor, each: Tensor) -> Tensor:
            return self.log_density_of_predictors(at[:, None], y.repeat_interleave(g), each)

        log, slopes, seconds = _differentiate(log_density, eta.reshape(n * g, 1), nuisance)
        log, *slopes = (part.view(n, g) for part in (log, *slopes))
        minus = [[part.view(n, g) for part in row] for row in seconds]
        return derivatives_of_one(log, slopes[0], minus[0][0], slopes[1:], minus[0][1:], [row[1:] for row in minus[1:]])

    def mixed_log_density(self, c: Memberships, parameters: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
        """Log density of y (n,) under the mixed prediction of K models with mean parameters (n, K, p): (n, G)."""
        return self.log_density(self.mix(c, parameters), y, nuisance)

    @abstractmethod
    def mean(self, parameters: Tensor, nuisance: Tensor) -> Tensor:
        """Means (...,) of y, or class probabilities (..., m)."""

    @abstractmethod
    def variance(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        """The variance of y, or of each class indicator, with this mean; the same shape."""

    def typical_deviation(self, mean: Tensor, nuisance: Tensor) -> Tensor:
        """How far y usually is from this mean: the standard deviation, unless that may be infinite."""
        return self.variance(mean, nuisance).sqrt()

    @abstractmethod
    def deviance(self, mean: Tensor, y: Tensor, nuisance: Tensor | None = None) -> Tensor:
        """Twice the log-likelihood that a perfect prediction would gain, (n,), for a dispersion of 1.

        Without nuisance parameters, that of all counts is the Poisson deviance, which compares means of any origin.
        """

    @abstractmethod
    def cdf(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        """P(Y <= y) for y (n,) under mean parameters (n, G, p): (n, G), without a gradient. Classes have an order."""

    def cdf_below(self, y: Tensor, parameters: Tensor, nuisance: Tensor) -> Tensor:
        """P(Y < y), which differs from `cdf` for counts and classes."""
        return self.cdf(y, parameters, nuisance)

    @property
    def has_dispersion(self) -> bool:
        """Whether the first nuisance parameter is a log dispersion, which falls without end if a model fits exactly."""
        return self.nuisance[:1] == (LOG_DISPERSION,)

    def initial_nuisance(self, mean: Tensor, y: Tensor) -> list[float]:
        """The nuisance parameters that the residuals suggest."""
        return []

    def nuisance_penalty(self, nuisance: Tensor) -> Tensor:
        """Added to the negative log-likelihood of all data, so that nuisance parameters stay finite."""
        return nuisance.new_zeros(())

    def natural_parameters(self, nuisance: Tensor) -> dict[str, float]:
        """The nuisance parameters as people report them: a dispersion rather than its logarithm."""
        return {"dispersion": float(nuisance[0].exp())} if self.has_dispersion else {}


class PositiveFamily(Family):
    """Families with positive means, stored as logarithms."""

    positive_only = True
    link = "log"

    def mean_parameters(self, eta: Tensor) -> Tensor:
        return eta

    def mean(self, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return safe_exp(parameters[..., 0])
