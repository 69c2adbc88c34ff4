"""Losses from torch's own criteria, such as nn.HuberLoss(), and from plain functions (output, target) -> losses.

A criterion runs on a copy of it with reduction="none". The loss of a sample is then the mean over its own numbers, and
training takes the mean over samples. With class weights this is not torch's mean, which divides by the sum of weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DataError, ModelError
from . import links
from .links import Link
from .losses import (
    IGNORED,
    Loss,
    loss_by_name,
    mean_of_labels,
    poisson_deviance,
    refuse_nothing_but_padding,
    unfit,
)

LossFunction = Callable[[Tensor, Tensor], Tensor]
_OTHER_INPUTS = (
    nn.CTCLoss, nn.CosineEmbeddingLoss, nn.GaussianNLLLoss, nn.MarginRankingLoss, nn.TripletMarginLoss,
    nn.TripletMarginWithDistanceLoss, nn.AdaptiveLogSoftmaxWithLoss,
)  # fmt: skip


def as_loss(loss: Any) -> Loss:
    """A loss from its name, a criterion of torch, a function, or as it is.

    >>> huber = as_loss(nn.HuberLoss(delta=0.5))
    >>> huber.name, huber.metric_name, huber.per_sample(torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, 0.0]))
    ('HuberLoss', 'mae', tensor([0.0000, 0.8750]))
    """
    if isinstance(loss, str):
        return loss_by_name(loss)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        raise ModelError(f"loss is the class {loss.__name__}; give an object of it: {loss.__name__}()")
    if isinstance(loss, nn.Module):
        return _of_criterion(loss)
    if callable(loss):
        return FunctionLoss(loss)
    raise ModelError(
        f"loss is {loss!r}; give the name of a loss, a criterion such as nn.HuberLoss(), a function (output, target) "
        f"-> losses, or an object of a subclass of ppfl.core.Loss"
    )


class Score(NamedTuple):
    """What a criterion is reported by: `each` gives values shaped as the target, or one per sample."""

    name: str
    each: Callable[[Tensor, Tensor], Tensor]
    of_mean: Callable[[Tensor], Tensor] = lambda mean: mean


MAE = Score("mae", lambda prediction, y: (prediction - y).abs())
RMSE = Score("rmse", lambda prediction, y: (prediction - y).square(), torch.sqrt)
DEVIANCE = Score("deviance", poisson_deviance)
HALF = Score("accuracy", lambda prediction, y: ((prediction > 0.5) == (y > 0.5)).to(prediction.dtype))
SIGN = Score("accuracy", lambda prediction, y: ((prediction > 0.5) == (y > 0)).to(prediction.dtype))


class FunctionLoss(Loss):
    """The loss of a function (output, target) -> losses (B, ...), whose mean over the other dimensions is taken.

    Outputs (B, ..., 1) for targets (B, ...) lose the last dimension. Without a score, the loss itself is reported.
    """

    def __init__(
        self,
        function: LossFunction,
        *,
        name: str | None = None,
        link: Link = links.identity,
        score: Score | None = None,
    ) -> None:
        self.function, self.link, self._score = function, link, score
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.metric_name = score.name if score else self.name

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """Losses (B,)."""
        losses = self._losses(*_aligned(output, target))
        if losses.dim() == 0:
            raise ModelError(
                f"the loss {self.name!r} gives one number for the whole batch; "
                f"return one loss per sample, such as with reduction='none'"
            )
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Scores (B,)."""
        if self._score is None:
            return super().score(prediction, target)
        scores = self._score.each(*_aligned(prediction, target))
        return scores.flatten(1).mean(1) if scores.dim() > 1 else scores

    def metric(self, mean_score: Tensor) -> Tensor:
        """The metric, from the mean of the scores."""
        return mean_score if self._score is None else self._score.of_mean(mean_score)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output, target)


class CriterionLoss(FunctionLoss):
    """The loss of a criterion of torch."""

    def __init__(self, criterion: nn.Module, link: Link = links.identity, score: Score | None = None) -> None:
        self.criterion = copy.deepcopy(criterion)
        if hasattr(criterion, "reduction"):
            vars(self.criterion)["reduction"] = "none"
        self._placed: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        super().__init__(self.criterion, name=type(criterion).__name__, link=link, score=score)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        kind = output.device, output.dtype  # weights of classes follow the outputs
        if kind not in self._placed:
            self._placed[kind] = copy.deepcopy(self.criterion).to(*kind)
        losses: Tensor = self._placed[kind](output, target)
        return losses


class LabelCriterion(CriterionLoss):
    """Criteria that take integer labels (B, ...) and outputs (B, ..., classes): classes are last here."""

    def __init__(self, criterion: nn.Module, link: Link) -> None:
        super().__init__(criterion, link)
        self.metric_name = "accuracy"
        self.ignored = int(getattr(criterion, "ignore_index", IGNORED))

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """Losses (B,): the mean over labels that count."""
        soft = target.is_floating_point()
        if output.shape[: len(target.shape)] != target.shape or output.dim() != target.dim() + (not soft):
            expected = "outputs (B, classes) for labels (B,), and (B, T, classes) for (B, T): classes are last"
            raise ModelError(unfit(self.name, output, target, expected))
        if soft:  # probabilities of classes
            losses = self._losses(output.movedim(-1, 1), target.to(output.dtype).movedim(-1, 1))
            return losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        return mean_of_labels(self._losses(output.movedim(-1, 1), target), target, self.ignored)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """1 if the most probable class is the label; the mean over several labels."""
        label = target.argmax(-1) if target.is_floating_point() else target
        return mean_of_labels((prediction.argmax(-1) == label).to(prediction.dtype), label, self.ignored)

    def _check(self, y: Tensor) -> None:
        if y.is_floating_point():
            return
        if y.dim() == 1 and bool((y == self.ignored).any()):
            raise DataError(f"{self.name}: a sample has the label {self.ignored}, which is not counted; drop it")
        refuse_nothing_but_padding(y, self.ignored)


def _of_criterion(criterion: nn.Module) -> Loss:
    name = type(criterion).__name__
    if isinstance(criterion, _OTHER_INPUTS):
        raise ModelError(
            f"{name} takes other inputs than (output, target), so it cannot be the loss of a sample; "
            f"write a function (output, target) -> losses"
        )
    if any(True for _ in criterion.parameters()):
        raise ModelError(f"{name} has parameters of its own, which would not be trained; make them part of the network")
    if isinstance(criterion, nn.CrossEntropyLoss):
        return LabelCriterion(criterion, links.softmax)
    if isinstance(criterion, nn.NLLLoss):
        return LabelCriterion(criterion, links.log)
    if isinstance(criterion, nn.MultiMarginLoss):
        return LabelCriterion(criterion, links.identity)
    if isinstance(criterion, nn.PoissonNLLLoss):
        return CriterionLoss(criterion, links.log if criterion.log_input else links.identity, DEVIANCE)
    link, score = _KNOWN.get(type(criterion), (links.identity, None))
    return CriterionLoss(criterion, link, score)


_KNOWN: dict[type[nn.Module], tuple[Link, Score | None]] = {
    nn.MSELoss: (links.identity, RMSE),
    nn.L1Loss: (links.identity, MAE),
    nn.SmoothL1Loss: (links.identity, MAE),
    nn.HuberLoss: (links.identity, MAE),
    nn.BCELoss: (links.identity, HALF),
    nn.BCEWithLogitsLoss: (links.logit, HALF),
    nn.MultiLabelSoftMarginLoss: (links.logit, HALF),
    nn.SoftMarginLoss: (links.logit, SIGN),
}


def _aligned(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs shaped as targets where they have one number each: (B,) against (B, 1) would be taken as (B, B)."""
    if output.shape == (*target.shape, 1):
        output = output.squeeze(-1)
    elif target.shape == (*output.shape, 1):
        output = output.unsqueeze(-1)
    # targets of labels stay integers only where outputs have classes
    return output, target.to(output.dtype) if output.shape == target.shape else target
