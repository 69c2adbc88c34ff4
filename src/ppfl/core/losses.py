"""Losses: negative log-likelihoods per sample, for one model and for the mean prediction of K models, Eq. (7).

Terms that do not depend on the model (log y!, log 2 pi) are dropped. The caller gives padded samples the weight 0.
Everything except `check_target` is pure tensor algebra, so that it works under torch.func.vmap and grad. `criteria.py`
makes losses of torch's own criteria and of plain functions.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError, ModelError
from . import links
from .links import Link, log_mix
from .registry import did_you_mean

IGNORED = -100  # a label that does not count, such as padding of a sequence; torch's ignore_index


SCORES = {"accuracy": True, "rmse": False, "mae": False, "deviance": False}  # whether higher is better


class Loss(ABC):
    """What training minimises and testing reports. B samples, K canonical models.

    Write `per_sample`, and whatever of the rest differs from its default:

    - `link` (the identity) says how outputs become predictions. `inverse_link`, and `mixed` for mix="predictions",
      follow from it.
    - `score` is what the metric is the mean of; by default the loss itself, where outputs are predictions.
    - `slopes` is by autograd; a formula is faster for chains of linear layers.

    >>> class Absolute(Loss):
    ...     name, metric_name = "absolute", "mae"
    ...
    ...     def per_sample(self, output, target):
    ...         return (output[:, 0] - target).abs()
    >>> Absolute().per_sample(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 5.0]))
    tensor([1., 3.])
    """

    name: str
    metric_name: str
    link: Link = links.identity

    @abstractmethod
    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss (B,) of outputs (B, ...) before the link."""

    def inverse_link(self, output: Tensor) -> Tensor:
        """Mean prediction g^-1(output), with the same shape."""
        return self.link.inverse(output)

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """Loss (B,) of the mean prediction sum_k c_k g^-1(o_k), Eq. (7): outputs (K, B, ...), c (K,)."""
        return self.per_sample(self.link.mixed(outputs, c), target)

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """d loss / d output (C, ..., B) and losses (C, B) of many clients, from outputs (C, ..., B) and targets
        (C, B, ...).

        `columns` has the samples in its last dimension. Losses override this where there is a formula: with a
        canonical link the derivative is g^-1(output) - y.
        """
        with torch.enable_grad():
            at = columns.detach().requires_grad_()
            losses = self.per_sample(at.movedim(-1, 1).flatten(0, 1), target.flatten(0, 1))
            (slope,) = torch.autograd.grad(losses.sum(), at)
        return slope, losses.detach().reshape(target.shape[:2])

    def model_slopes(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """`slopes` for each of K models separately: outputs (C, K, ..., B), target (C, B, ...), losses (C, K, B)."""
        clients, k = outputs.shape[:2]
        slopes, losses = self.slopes(outputs.flatten(0, 1), target.repeat_interleave(k, dim=0))
        return slopes.reshape(outputs.shape), losses.reshape(clients, k, -1)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Contribution (B,) of each sample to the metric; prediction is a mean, after the link."""
        if self.link is not links.identity or self._own_inverse_link():
            raise ModelError(f"the loss {self.name!r} does not say how a prediction is scored; write its `score`")
        return self.per_sample(prediction, target)

    def metric(self, mean_score: Tensor) -> Tensor:
        """The metric, from the mean of the scores."""
        return mean_score

    @property
    def higher_is_better(self) -> bool | None:
        """Whether a higher score is better; None where the name of the score does not say. A loss with a score of its
        own may set it."""
        return False if self.metric_name == self.name else SCORES.get(self.metric_name)

    def check_mixing(self) -> None:
        """Raise a ModelError if the loss of a mean prediction cannot be derived."""
        if self._own_inverse_link() and type(self).mixed is Loss.mixed:
            raise ModelError(
                f"the loss {self.name!r} has an inverse link of its own, so the loss of a mixed prediction does not "
                f"follow; give it a `link` of ppfl.core.links, write its `mixed`, or use mix='outputs'"
            )

    def check_target(self, y: Tensor) -> None:
        """Raise a DataError if y cannot be a target of this loss."""
        if y.dim() == 0:
            raise DataError(f"{self.name}: target is a single number; expected one per sample, (B,)")
        refuse_values(~y.isfinite(), y, "is not finite", "impute it or drop the sample")
        self._check(y)

    def _check(self, y: Tensor) -> None:
        """Check finite targets for this particular loss; without one of its own, all are accepted."""
        return

    def _own_inverse_link(self) -> bool:
        return type(self).inverse_link is not Loss.inverse_link


def one_output(outputs: Tensor, y: Tensor, name: str) -> Tensor:
    """Outputs (K, B) or (K, B, 1) as (K, B), given y (B,)."""
    if outputs.shape[1:] not in ((len(y),), (len(y), 1)):
        raise ModelError(unfit(name, outputs[0], y, "one output per sample: end in a layer of width 1"))
    return outputs.reshape(outputs.shape[:2])


def unfit(name: str, output: Tensor, target: Tensor, expected: str) -> str:
    """The message for outputs that do not fit their targets."""
    return f"{name}: outputs {tuple(output.shape)} do not fit targets {tuple(target.shape)}; expected {expected}"


def check_one_column(name: str, y: Tensor, remedy: str) -> None:
    """Refuse targets with more than one number per sample."""
    if math.prod(y.shape[1:]) != 1:
        raise DataError(f"{name}: target has shape {tuple(y.shape)}; expected (B,): {remedy}")


def refuse_values(wrong: Tensor, y: Tensor, what: str, remedy: str) -> None:
    """Refuse targets y that are wrong somewhere, naming the first."""
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise DataError(f"target{at} is {y[tuple(at)].item():g}, which {what}: {remedy}")


# ---------------------------------------------------------------------- labels


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

    def _check(self, y: Tensor) -> None:
        if y.is_floating_point() or y.dtype == torch.bool:
            raise DataError(f"cross_entropy takes integer labels (B,), and y has {_other_targets(y)}")
        refuse_values((y < 0) & ~_ignored(y), y, "is negative", "number the labels from 0, with one output per label")
        refuse_nothing_but_padding(y)


def _other_targets(y: Tensor) -> str:
    """What targets that are no integer labels are, and what to do."""
    found = f"{str(y.dtype).removeprefix('torch.')} values of shape {tuple(y.shape)}"
    if y.dtype == torch.bool:
        return f"{found}; use y.long() for two classes, or the loss 'multilabel' for several labels per sample"
    if y.dim() == 2 and bool(((y == 0) | (y == 1)).all() & (y.sum(1) == 1).all()):
        return f"{found} that look like one-hot labels; use y.argmax(1)"
    classes = " For classes, give them as integers or text." if bool((y == y.floor()).all()) else ""
    return f"{found}; to predict numbers use Population(..., loss='squared').{classes}"


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
        """sigmoid(output) - y, times the share of a label in its sample's mean."""
        y = target.to(columns.dtype).clamp_min(0).movedim(1, -1).reshape(columns.shape)
        slope, losses = columns.sigmoid() - y, F.softplus((1 - 2 * y) * columns)
        if target.dim() == 2:
            return slope, losses[:, 0]
        share = _shares(target).to(columns.dtype).movedim(1, -1).reshape(columns.shape)
        return slope.mul_(share), losses.mul_(share).flatten(1, -2).sum(1)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The share of the labels whose more probable value is correct."""
        right = (prediction.reshape(target.shape) > 0.5) == (target > 0.5)
        return mean_of_labels(right.to(prediction.dtype), target)

    def _check(self, y: Tensor) -> None:
        wrong = (y != 0) & (y != 1) & ~_ignored(y)
        refuse_values(wrong, y, "is not 0 or 1", f"use {IGNORED} for a label that is not known")
        refuse_nothing_but_padding(y)


class Logistic(MultiLabel):
    """Labels 0 or 1 (B,) of any type, one output per sample (B,) or (B, 1), sigmoid."""

    name = "logistic"

    def _check(self, y: Tensor) -> None:
        check_one_column(self.name, y, "use the loss 'multilabel' for several labels per sample")
        refuse_values((y != 0) & (y != 1), y, "is not 0 or 1", "use (y > 0) for -1 and 1, cross_entropy for more")


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


# ---------------------------------------------------------------------- numbers and counts


class Squared(Loss):
    """Numbers (B,) or vectors (B, d), identity link: |output - y|^2 / 2, a Gaussian of unit variance."""

    name = "squared"
    metric_name = "rmse"

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """|output - y|^2 / 2, (B,)."""
        return self._errors(output, target).sum(1) / 2

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """output - y."""
        y = target.to(columns.dtype).reshape(*target.shape[:2], -1).transpose(1, 2)
        slope = columns - y.reshape(columns.shape)
        return slope, slope.square().flatten(1, -2).sum(1) / 2

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Squared error, averaged over the d coordinates."""
        return self._errors(prediction, target).mean(1)

    def metric(self, mean_score: Tensor) -> Tensor:
        """Root of the mean squared error."""
        return mean_score.sqrt()

    def _errors(self, output: Tensor, target: Tensor) -> Tensor:
        # (B, d), or (B, 1) for a single number; reshaped so that (B,) - (B, 1) does not broadcast to (B, B)
        if output.shape[0] != target.shape[0] or output.numel() != target.numel():
            raise ModelError(unfit(self.name, output, target, "one output per number of the target"))
        return (output - target.to(output.dtype).reshape(output.shape)).square().unsqueeze(-1).flatten(1)


class Poisson(Loss):
    """Counts or rates >= 0 (B,), one output per sample (B,) or (B, 1), log link; log y! is dropped."""

    name = "poisson"
    metric_name = "deviance"
    link = links.log

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """exp(o) - y o, (B,)."""
        y = target.flatten().to(output.dtype)
        o = one_output(output[None], y, self.name)[0]
        return -poisson_log_density(o, o.exp(), y)

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """exp(output) - y."""
        y, rate = target.to(columns.dtype).reshape(columns.shape), columns.exp()
        return rate - y, (rate - y * columns)[:, 0]

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Unit deviance 2 (y log(y / r) - y + r)."""
        y = target.flatten().to(prediction.dtype)
        r = one_output(prediction[None], y, self.name)[0]
        return poisson_deviance(r, y)

    def _check(self, y: Tensor) -> None:
        check_one_column(self.name, y, "fit columns one by one")
        refuse_values(y < 0, y, "is negative", "a count or rate is at least 0; use squared for other numbers")


# ---------------------------------------------------------------------- log densities and deviances, also of GLMs


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


# ---------------------------------------------------------------------- losses by name

cross_entropy, logistic, multilabel, squared, poisson = CrossEntropy(), Logistic(), MultiLabel(), Squared(), Poisson()
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (cross_entropy, logistic, multilabel, squared, poisson)}
_ELSEWHERE = {"mse": "squared", "l2": "squared", "bce": "logistic", "ce": "cross_entropy", "nll": "cross_entropy"}


def loss_by_name(name: str) -> Loss:
    """The loss of that name, or a ModelError that lists them.

    >>> loss_by_name("squared").metric_name
    'rmse'
    """
    if name not in LOSSES:
        other = _ELSEWHERE.get(name.lower())
        near = f"did you mean {other!r}? " if other else did_you_mean(name, LOSSES)
        raise ModelError(f"there is no loss {name!r}; {near}use one of {', '.join(map(repr, sorted(LOSSES)))}")
    return LOSSES[name]
