"""Memberships as functions of independent normal scores, so that a Dirichlet distribution becomes a standard normal.

A Dirichlet membership breaks a stick: the first share is a beta variable, the second one is a beta variable times what
is left, and so on. Each beta variable is a function of one normal score. So if x ~ N(0, I) has K - 1 entries, then
c(x) ~ Dirichlet(alpha). In these coordinates the distribution of a client's membership given its data is the standard
normal times a bounded likelihood: it has no poles at the faces of the simplex, and no tail heavier than a normal one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from scipy import special
from torch import Tensor

_LARGEST_SCORE = 7.0
_KNOTS = 513
_TINY = 1e-200  # below it the quantile of a beta distribution is taken from its power law

Array = np.ndarray[Any, np.dtype[np.float64]]


class StickBreaking(NamedTuple):
    """The map from normal scores (M, K - 1, G) to log memberships (M, K, G), for one alpha."""

    alpha: Tensor  # (K,)
    logs: Tensor  # (K - 1, knots, 2): the log of each stick's share, and of what it leaves, at equally spaced scores

    @classmethod
    def of(cls, alpha: Tensor, knots: int = _KNOTS) -> Self:
        a = alpha.detach().numpy()
        rest = np.cumsum(a[::-1])[::-1][1:]
        scores = np.linspace(-_LARGEST_SCORE, _LARGEST_SCORE, knots)
        logits = [_beta_logit(float(x), float(y), scores) for x, y in zip(a[:-1], rest, strict=True)]
        logit = torch.from_numpy(np.array(logits).reshape(len(a) - 1, knots))
        return cls(alpha.detach(), torch.nn.functional.logsigmoid(torch.stack([logit, -logit], -1)))

    def log_memberships(self, scores: Tensor) -> Tensor:
        """
        >>> breaking = StickBreaking.of(torch.ones(2, dtype=torch.float64))  # c_1 is uniform, so c_1 = Phi(x)
        >>> breaking.log_memberships(torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)).exp()[0, 0]
        tensor([0.5000, 0.8413], dtype=torch.float64)
        """
        last = self.logs.shape[1] - 1
        position = (scores + _LARGEST_SCORE).mul_(last / (2 * _LARGEST_SCORE)).clamp_(0, last - 0.001)
        left = position.long()
        fraction = position.sub_(left)
        m, d, g = scores.shape
        found = scores.new_zeros(m, d + 1, g)
        for j, knots in enumerate(self.logs):
            at = left[:, j]
            logs = torch.lerp(knots[at], knots[at + 1], fraction[:, j, :, None])
            torch.add(found[:, j], logs[..., 1], out=found[:, j + 1])
            found[:, j] += logs[..., 0]
        return found


def _beta_logit(a: float, b: float, scores: Array) -> Array:
    """log(v / (1 - v)), where v is the quantile of beta(a, b) at the probability of each score."""
    is_low = special.ndtr(scores) < special.betainc(a, b, 0.5)
    return np.concatenate([_lower_logit(a, b, scores[is_low]), -_lower_logit(b, a, -scores[~is_low])])


def _lower_logit(a: float, b: float, scores: Array) -> Array:
    """The same for v below 1/2, where log v keeps its precision."""
    v = special.betaincinv(a, b, special.ndtr(scores))
    with np.errstate(divide="ignore"):
        power_law = (special.log_ndtr(scores) + np.log(a) + special.betaln(a, b)) / a
        return np.asarray(np.where(v > _TINY, np.log(v) - np.log1p(-v), power_law))
