"""Losses by name: negative log-likelihoods per sample, for one model and for the mean prediction of K models, Eq. (7).

Terms that do not depend on the model (log y!, log 2 pi) are dropped. The caller gives padded samples the weight 0.
`criteria.py` makes losses of torch's own criteria and of plain functions.
"""

from .errors import ModelError
from .label_losses import IGNORED, Classification, CrossEntropy, Logistic, MultiLabel
from .loss_contract import Loss
from .number_losses import Poisson, Squared

__all__ = [
    "IGNORED", "LOSSES", "Classification", "Loss",
    "cross_entropy", "logistic", "loss_by_name", "multilabel", "poisson", "squared",
]  # fmt: skip

cross_entropy, logistic, multilabel, squared, poisson = CrossEntropy(), Logistic(), MultiLabel(), Squared(), Poisson()
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (cross_entropy, logistic, multilabel, squared, poisson)}


def loss_by_name(name: str) -> Loss:
    """The loss of that name, or a ModelError that lists them.

    >>> loss_by_name("squared").metric_name
    'rmse'
    """
    if name not in LOSSES:
        raise ModelError(f"there is no loss {name!r}; use one of {', '.join(map(repr, sorted(LOSSES)))}")
    return LOSSES[name]
