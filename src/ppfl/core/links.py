"""Links: how an output becomes a mean prediction, and the output that K mixed predictions would have.

Everything is pure tensor algebra, so that it works under torch.func.vmap and grad.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Link(Protocol):
    """g, between outputs and mean predictions."""

    def inverse(self, output: Tensor) -> Tensor:
        """g^-1(output): the mean prediction that belongs to an output, with the same shape."""

    def mixed(self, outputs: Tensor, c: Tensor) -> Tensor:
        """g(sum_k c_k g^-1(o_k)): the output whose prediction is the mean one; outputs (K, ...), c (K,)."""


class IdentityLink:
    """Outputs are predictions."""

    def inverse(self, output: Tensor) -> Tensor:
        return output

    def mixed(self, outputs: Tensor, c: Tensor) -> Tensor:
        mixed: Tensor = torch.tensordot(c.to(outputs.dtype), outputs, dims=1)
        return mixed


class LogLink:
    """Outputs are logarithms, of rates or of probabilities."""

    def inverse(self, output: Tensor) -> Tensor:
        return output.exp()

    def mixed(self, outputs: Tensor, c: Tensor) -> Tensor:
        return log_mix(outputs, c)


class LogitLink:
    """Outputs are log odds, each by itself.

    >>> logit.mixed(torch.tensor([-1000.0, 0.0]), torch.tensor([0.5, 0.5])).sigmoid()
    tensor(0.2500)
    """

    def inverse(self, output: Tensor) -> Tensor:
        return output.sigmoid()

    def mixed(self, outputs: Tensor, c: Tensor) -> Tensor:
        return log_mix(F.logsigmoid(outputs), c) - log_mix(F.logsigmoid(-outputs), c)


class SoftmaxLink:
    """Outputs along the last dimension are log probabilities of classes, up to a constant."""

    def inverse(self, output: Tensor) -> Tensor:
        return output.softmax(-1)

    def mixed(self, outputs: Tensor, c: Tensor) -> Tensor:
        return log_mix(outputs.log_softmax(-1), c)


identity, log, logit, softmax = IdentityLink(), LogLink(), LogitLink(), SoftmaxLink()


def log_mix(log_values: Tensor, c: Tensor) -> Tensor:
    """log sum_k c_k exp(l_k) over the first dimension, log_values (K, ...), c (K,).

    The same as logsumexp(l + log c), but its gradient in c is also correct at c_k = 0 (there logsumexp gives nan).

    >>> log_mix(torch.tensor([-1000.0, 5.0]), torch.tensor([1.0, 0.0]))
    tensor(-1000.)
    """
    c = c.reshape(-1, *[1] * (log_values.dim() - 1))
    number = torch.finfo(log_values.dtype)
    # The largest term with c_k > 0 becomes exp(0). Terms with c_k = 0 may be larger and must not overflow.
    top = torch.where(c > 0, log_values, -torch.inf).amax(0).clamp_min(number.min).detach()
    terms = (log_values - top).clamp_max(math.log(number.max) / 2).exp()
    return (c * terms).sum(0).log() + top
