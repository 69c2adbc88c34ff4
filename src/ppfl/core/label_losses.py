"""Losses for labels: one per sample, or several that may be unknown or padding."""

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from . import links
from .densities import bernoulli_log_density, observed_class
from .errors import DataError, ModelError
from .links import log_mix
from .loss_contract import Loss, check_one_column, one_output, refuse_values, unfit

IGNORED = -100  # a label that does not count, such as padding of a sequence; torch's ignore_index


class Classification(Loss):
    """Losses for labels: the likelihood of the mean prediction is the mean of the likelihoods.

    A sample has one label, or several: the words of a sequence, the labels of a picture. Its loss and score are then
    means over those of its labels that are not IGNORED.
    """

    metric_name = "accuracy"

    @abstractmethod
    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        """log p_k(y) of every label, (K, *target.shape), from outputs (K, B, ...)."""

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """-log p(y), (B,)."""
        return -mean_of_labels(self._log_likelihood(output[None], target)[0], target)

    def log_likelihoods(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """log p_k(y) (C, K, L) of all labels of many clients, and the share (C, L) of each in its sample's mean, from
        outputs (C, K, ..., B) and targets (C, B, ...)."""
        if target.dim() == 2:  # each sample has one
            return -self.model_slopes(outputs, target)[1], torch.ones_like(target, dtype=outputs.dtype)
        found = torch.vmap(self._log_likelihood)(outputs.movedim(-1, 2), target)
        return found.flatten(2), _shares(target).to(outputs.dtype).flatten(1)

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """-log sum_k c_k p_k(y), (B,)."""
        return -mean_of_labels(log_mix(self._log_likelihood(outputs, target), c), target)


class CrossEntropy(Classification):
    """Integer labels (B,) and outputs (B, classes), or labels (B, ...) and outputs (B, ..., classes); softmax.

    >>> cross_entropy = CrossEntropy()
    >>> cross_entropy.mixed(torch.zeros(2, 1, 4), torch.tensor([0.5, 0.5]), torch.tensor([3])).exp()
    tensor([4.])
    >>> words = torch.tensor([[3, 1, IGNORED]])  # a sequence of two, padded
    >>> cross_entropy.per_sample(torch.zeros(1, 3, 4), words).exp()
    tensor([4.])
    """

    name = "cross_entropy"
    link = links.softmax

    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[:-1] != (len(outputs), *target.shape):
            expected = "outputs (B, classes) for labels (B,), and (B, T, classes) for (B, T)"
            raise ModelError(unfit(self.name, outputs[0], target, expected))
        label = _numbered(target, 1).expand(outputs.shape[:-1])
        return observed_class(outputs.log_softmax(-1), label)

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """softmax(output) - 1_y, times the share of a label in its sample's mean."""
        label = _numbered(target, 2).movedim(1, -1).unsqueeze(-2)  # (C, ..., 1, B)
        log_p = columns.log_softmax(-2)
        losses = log_p.gather(-2, label)
        slope = log_p.exp_()
        slope.scatter_(-2, label, torch.expm1(losses))
        if target.dim() == 2:
            return slope, losses.neg_()[:, 0]
        share = _shares(target).to(slope.dtype).movedim(1, -1).unsqueeze(-2)
        return slope.mul_(share), losses.mul_(share).neg_().flatten(1, -2).sum(1)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """1 if the most probable class is the label; the mean over several labels."""
        return mean_of_labels((prediction.argmax(-1) == target).to(prediction.dtype), target)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        if y.is_floating_point() or y.dtype == torch.bool:
            raise DataError(
                f"cross_entropy: target has shape {tuple(y.shape)} and type {y.dtype}; "
                f"expected integer labels (B,): use y.long().reshape(-1)"
            )
        top = torch.iinfo(y.dtype).max if outputs is None else outputs - 1
        wrong = ((y < 0) | (y > top)) & ~_ignored(y)
        refuse_values(wrong, y, f"is not in 0 to {top}", "number the labels from 0, with one output per label")
        refuse_nothing_but_padding(y)


class Logistic(Classification):
    """Labels 0 or 1 (B,) of any type, one output per sample (B,) or (B, 1), sigmoid."""

    name = "logistic"
    link = links.logit

    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        y = target.flatten()
        return bernoulli_log_density(one_output(outputs, y, self.name), y).reshape(-1, *target.shape)

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """sigmoid(output) - y."""
        y = target.to(columns.dtype).reshape(columns.shape)
        return columns.sigmoid() - y, F.softplus((1 - 2 * y) * columns)[:, 0]

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """1 if the more probable label is correct; at equal probabilities the prediction is 0."""
        y = target.flatten()
        return ((one_output(prediction[None], y, self.name)[0] > 0.5) == (y > 0.5)).to(prediction.dtype)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        check_one_column(self.name, y, outputs, "use the loss 'multilabel' for several labels per sample")
        refuse_values((y != 0) & (y != 1), y, "is not 0 or 1", "use (y > 0) for -1 and 1, cross_entropy for more")


class MultiLabel(Classification):
    """Labels 0 or 1 (B, L) of any type, one output for each, sigmoid: the mean of L logistic losses.

    >>> MultiLabel().per_sample(torch.zeros(1, 3), torch.tensor([[1, 0, IGNORED]])).exp()  # the third is not known
    tensor([2.])
    """

    name = "multilabel"
    link = links.logit

    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs[0].numel() != target.numel():
            raise ModelError(unfit(self.name, outputs[0], target, "one output per label"))
        return bernoulli_log_density(outputs.reshape(-1, *target.shape), target.to(outputs.dtype).clamp_min(0))

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(sigmoid(output) - y) / L."""
        share = _shares(target).to(columns.dtype).movedim(1, -1).reshape(columns.shape)
        y = target.to(columns.dtype).clamp_min(0).movedim(1, -1).reshape(columns.shape)
        losses = F.softplus((1 - 2 * y) * columns).mul_(share)
        return (columns.sigmoid() - y).mul_(share), losses.flatten(1, -2).sum(1)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The share of the labels whose more probable value is correct."""
        right = (prediction.reshape(target.shape) > 0.5) == (target > 0.5)
        return mean_of_labels(right.to(prediction.dtype), target)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        width = math.prod(y.shape[1:])
        if outputs is not None and width != outputs:
            raise DataError(f"multilabel: a sample has {width} labels but the model {outputs} outputs; make them equal")
        wrong = (y != 0) & (y != 1) & ~_ignored(y)
        refuse_values(wrong, y, "is not 0 or 1", f"use {IGNORED} for a label that is not known")
        refuse_nothing_but_padding(y)


def mean_of_labels(values: Tensor, target: Tensor, ignored: int = IGNORED) -> Tensor:
    """Means (B,) of values (B, ...) over the labels of each sample that count; values (B,) as they are."""
    return values if target.dim() == 1 else (values * _shares(target, 1, ignored).to(values.dtype)).flatten(1).sum(1)


def _shares(target: Tensor, samples_end: int = 2, ignored: int = IGNORED) -> Tensor:
    """The part of every label in its sample's mean, shaped as target, whose first dimensions are those of samples."""
    counts = target != ignored
    real = counts.flatten(samples_end).sum(-1).clamp_min(1)
    return counts / real.reshape(*real.shape, *[1] * (target.dim() - samples_end))


def _ignored(y: Tensor) -> Tensor:
    """Labels that do not count. The only label of a sample always counts."""
    return (y == IGNORED) if y.dim() > 1 else torch.zeros_like(y, dtype=torch.bool)


def _numbered(target: Tensor, samples_end: int) -> Tensor:
    """Labels as indices; 0 for those that are ignored."""
    return target.long() if target.dim() == samples_end else target.long().clamp_min(0)


def refuse_nothing_but_padding(y: Tensor, ignored: int = IGNORED) -> None:
    """Refuse a sample without a single label that counts: it would have no loss."""
    if y.dim() > 1 and len(empty := (y == ignored).flatten(1).all(1).nonzero()):
        raise DataError(f"target[{int(empty[0])}] has no label but {ignored}, which is not counted; drop the sample")
