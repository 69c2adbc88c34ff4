"""How well memberships recover the truth, where a population was made and its truth is known."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.simplex import harden, match, total_variation


class Agreement(NamedTuple):
    """Memberships against the truth, canonical models matched to true ones."""

    share: float  # of the clients whose largest membership is their largest true one
    distance: float  # mean total variation: the share of a membership that is in the wrong place


def group_agreement(memberships: Tensor, truth: Tensor) -> Agreement:
    """Agreement of memberships (M, K) with the truth (M, Kt), under the matching that is best for each measure.

    >>> import torch
    >>> truth = torch.eye(3)[[0, 0, 1, 2]]
    >>> group_agreement(truth[:, [2, 0, 1]], truth)
    Agreement(share=1.0, distance=0.0)
    >>> group_agreement(torch.eye(2)[[0, 0, 1, 1]], truth).share
    0.75
    """
    same = (torch.mul(*align(harden(memberships), harden(truth)))).sum(1)
    return Agreement(float(same.mean()), float(total_variation(*align(memberships, truth)).mean()))


def told_apart(memberships: Tensor, truth: Tensor) -> float:
    """The share of clients whose membership is nearest to the mean membership of the others in their true group.

    Groups can be told apart by their memberships also where each mixes several canonical models.

    >>> truth = torch.eye(2)[[0, 0, 1, 1]]
    >>> memberships = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> told_apart(memberships, truth), group_agreement(memberships, truth).share
    (1.0, 0.5)
    """
    c, group = memberships.double().cpu(), harden(truth.double().cpu())
    sizes, sums = group.sum(0), group.T @ c
    others = sums - group[:, :, None] * c[:, None]  # (M, Kt, K): sums without the client itself
    left = sizes - group
    distance = (others / left[:, :, None] - c[:, None]).norm(dim=2)
    distance[left == 0] = torch.inf  # nobody else is in that group
    near = distance.min(dim=1, keepdim=True)
    return float((group.gather(1, near.indices) * near.values.isfinite()).mean())


def align(memberships: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Both with max(K, Kt) columns, those of the truth in the order of the canonical models they match.

    The side with fewer columns gets empty ones: then every column counts, and the matching is the best there is.
    """
    k = max(memberships.shape[1], truth.shape[1])
    found, true = (pad(c.double().cpu(), (0, k - c.shape[1])) for c in (memberships, truth))
    return found, true[:, match(found, true)]
