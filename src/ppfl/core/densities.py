"""Log densities and deviances that the losses and the families of GLMs have in common.

Everything is pure tensor algebra, so that it works under torch.func.vmap and grad.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bernoulli_log_density(log_odds: Tensor, y: Tensor) -> Tensor:
    """log p(y) of labels y, 0 or 1, given log odds of label 1.

    >>> bernoulli_log_density(torch.tensor(0.0), torch.tensor(1)).exp()
    tensor(0.5000)
    """
    return F.logsigmoid((2 * y.to(log_odds.dtype) - 1) * log_odds)


def observed_class(log_probabilities: Tensor, label: Tensor) -> Tensor:
    """log p(label), from the log probabilities (..., m) of all classes and labels (...).

    >>> observed_class(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([1])).exp()
    tensor([0.1000])
    """
    return log_probabilities.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def poisson_log_density(log_mean: Tensor, mean: Tensor, y: Tensor) -> Tensor:
    """y log(mean) - mean, without log y!. The caller has both forms of the mean, and may have bounded the second."""
    return y * log_mean - mean


def poisson_deviance(mean: Tensor, y: Tensor) -> Tensor:
    """2 (y log(y / mean) - y + mean): twice what a perfect prediction would gain. Finite also for a mean of 0.

    >>> poisson_deviance(torch.tensor([3.0, 2.0]), torch.tensor([3.0, 0.0]))
    tensor([0., 4.])
    """
    positive = mean.clamp_min(torch.finfo(mean.dtype).tiny)
    return 2 * (torch.xlogy(y, y) - torch.xlogy(y, positive) - y + mean)
