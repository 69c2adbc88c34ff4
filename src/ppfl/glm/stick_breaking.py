"""Memberships as functions of independent normal scores, so that a Dirichlet distribution becomes a standard normal.

A Dirichlet membership breaks a stick: the first share is a beta variable, the second one is a beta variable times what
is left, and so on. Each beta variable is a function of one normal score. So if x ~ N(0, I) has K - 1 entries, then
c(x) ~ Dirichlet(alpha). In these coordinates the distribution of a client's membership given its data is the standard
normal times a bounded likelihood: it has no poles at the faces of the simplex, and no tail heavier than a normal one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from scipy import special
from torch import Tensor

_LARGEST_SCORE = 7.0
_KNOTS = 2049
_CUBIC_STEP = 32  # knots for each quantile that is computed
_TINY = 1e-200  # below it the quantile of a beta distribution is taken from its power law

Array = np.ndarray[Any, np.dtype[np.float64]]


class StickBreaking(NamedTuple):
    """The map from normal scores (M, K - 1, G) to log memberships (M, K, G), for one alpha."""

    alpha: Tensor  # (K,)
    # (K - 1, knots - 1, 4): between equally spaced scores, the logs of each stick's share and of what it leaves are
    # lines; their values on the left, and how much they rise to the right
    lines: Tensor

    @property
    def k(self) -> int:
        return max(1, len(self.alpha))

    @classmethod
    def of(cls, alpha: Tensor, knots: int = _KNOTS) -> Self:
        """For alpha (K,), or (0,) with one canonical model."""
        if len(alpha) < 2:
            return cls(alpha.detach(), torch.zeros(0, knots - 1, 4, dtype=torch.float64))
        a = alpha.detach().numpy()
        rest = np.cumsum(a[::-1])[::-1][1:]
        logit = torch.from_numpy(_beta_logits(a[:-1], rest, knots))
        logs = torch.nn.functional.logsigmoid(torch.stack([logit, -logit], -1))
        return cls(alpha.detach(), torch.cat([logs[:, :-1], logs.diff(dim=1)], -1))

    def log_memberships(self, scores: Tensor) -> Tensor:
        """
        >>> breaking = StickBreaking.of(torch.ones(2, dtype=torch.float64))  # c_1 is uniform, so c_1 = Phi(x)
        >>> breaking.log_memberships(torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)).exp()[0, 0]
        tensor([0.5000, 0.8413], dtype=torch.float64)
        """
        last = self.lines.shape[1]
        position = (scores + _LARGEST_SCORE).mul_(last / (2 * _LARGEST_SCORE)).clamp_(0, last - 0.001)
        left = position.int()
        fraction = position.sub_(left)
        m, d, g = scores.shape
        found = scores.new_zeros(m, d + 1, g)
        for j, lines in enumerate(self.lines):
            share, rest, share_slope, rest_slope = torch.nn.functional.embedding(left[:, j], lines).unbind(-1)
            at = fraction[:, j]
            torch.add(found[:, j], torch.addcmul(rest, at, rest_slope), out=found[:, j + 1])
            found[:, j] += torch.addcmul(share, at, share_slope)
        return found


def _beta_logits(a: Array, b: Array, knots: int) -> Array:
    """log(v / (1 - v)), where v is the quantile of beta(a, b) at the probability of each score: (K - 1, knots).

    Quantiles are slow to compute, so there are few, and cubic polynomials with the right slopes between them.
    """
    scores = np.linspace(-_LARGEST_SCORE, _LARGEST_SCORE, (knots - 1) // _CUBIC_STEP + 1)
    logit = _exact_logits(a[:, None], b[:, None], scores)
    log_v, log_rest = special.log_expit(logit), special.log_expit(-logit)
    log_density = a[:, None] * log_v + b[:, None] * log_rest - special.betaln(a, b)[:, None]  # of the logit
    slope = np.exp(-0.5 * scores**2 - 0.5 * math.log(2 * math.pi) - log_density) * (scores[1] - scores[0])
    left, right = np.stack([logit, slope], -1)[:, :-1], np.stack([logit, slope], -1)[:, 1:]
    found = (np.concatenate([left, right], -1) @ _CUBIC).reshape(len(a), knots - 1)
    return np.concatenate([found, logit[:, -1:]], 1)


def _exact_logits(a: Array, b: Array, scores: Array) -> Array:
    """The same exactly, for a and b (K - 1, 1). Both halves keep their precision: v near 0, and 1 - v near 0."""
    is_low = special.ndtr(scores) < special.betainc(a, b, 0.5)
    a, b, scores = np.where(is_low, a, b), np.where(is_low, b, a), np.where(is_low, scores, -scores)
    v = special.betaincinv(a, b, special.ndtr(scores))
    with np.errstate(divide="ignore"):
        power_law = (special.log_ndtr(scores) + np.log(a) + special.betaln(a, b)) / a
        lower = np.where(v > _TINY, np.log(v) - np.log1p(-v), power_law)
    return np.asarray(np.where(is_low, lower, -lower))


def _cubic(at: Array) -> Array:
    """How much the values and slopes at both ends of an interval count at these places in it: (4, places)."""
    return np.stack([(1 + 2 * at) * (1 - at) ** 2, at * (1 - at) ** 2, at**2 * (3 - 2 * at), at**2 * (at - 1)])


_CUBIC = _cubic(np.arange(_CUBIC_STEP) / _CUBIC_STEP)
