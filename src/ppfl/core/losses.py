"""Losses: negative log-likelihoods per sample, for one model and for the mean prediction of K models, Eq. (7).

Terms that do not depend on the model (log y!, log 2 pi) are dropped. The caller gives padded samples the weight 0.
Everything except `check_target` is pure tensor algebra, so that it works under torch.func.vmap and grad.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import DataError, ModelError


class Loss(ABC):
    """What training minimises and testing reports. B samples, K canonical models.

    >>> loss = loss_by_name("cross_entropy")
    >>> loss.per_sample(torch.zeros(2, 4), torch.tensor([0, 3])).exp()  # four classes that are equally likely
    tensor([4., 4.])
    """

    name: ClassVar[str]
    metric_name: ClassVar[str]

    @abstractmethod
    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss (B,) of outputs (B, ...) before the link."""

    @abstractmethod
    def inverse_link(self, output: Tensor) -> Tensor:
        """Mean prediction g^-1(output), with the same shape."""

    @abstractmethod
    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """Loss (B,) of the mean prediction sum_k c_k g^-1(o_k), Eq. (7): outputs (K, B, ...), c (K,)."""

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """d loss / d output (C, out, B) and losses (C, B) of many clients, from outputs (C, out, B) and targets (C, B).

        `columns` has one column per sample. The losses below override this with a formula: with a canonical link the
        derivative is g^-1(output) - y.
        """
        with torch.enable_grad():
            at = columns.detach().requires_grad_()
            losses = self.per_sample(at.transpose(1, 2).flatten(0, 1), target.flatten(0, 1))
            (slope,) = torch.autograd.grad(losses.sum(), at)
        return slope, losses.detach().reshape(target.shape[:2])

    def model_slopes(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """`slopes` for each of K models separately: outputs (C, K, out, B), target (C, B), losses (C, K, B)."""
        clients, k = outputs.shape[:2]
        slopes, losses = self.slopes(outputs.flatten(0, 1), target.repeat_interleave(k, dim=0))
        return slopes.reshape(outputs.shape), losses.reshape(clients, k, -1)

    @abstractmethod
    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Contribution (B,) of each sample to the metric; prediction is a mean, after the link."""

    def metric(self, mean_score: Tensor) -> Tensor:
        """The metric, from the mean of the scores."""
        return mean_score

    def check_target(self, y: Tensor, outputs: int | None = None) -> None:
        """Raise a DataError if y cannot be a target of this loss (with this number of outputs per sample)."""
        if y.dim() == 0:
            raise DataError(f"{self.name}: target is a single number; expected one per sample, (B,)")
        _refuse(~y.isfinite(), y, "is not finite", "impute it or drop the sample")
        self._check(y, outputs)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        """Check finite targets for this particular loss; without one of its own, all are accepted."""
        return


class Classification(Loss):
    """Losses for labels: the likelihood of the mean prediction is the mean of the likelihoods."""

    metric_name = "accuracy"

    @abstractmethod
    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        """log p_k(y) of outputs (K, B, ...), shape (K, B)."""

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """-log p(y), (B,)."""
        return -self._log_likelihood(output[None], target)[0]

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """-log sum_k c_k p_k(y), (B,)."""
        return -log_mix(self._log_likelihood(outputs, target), c)


class CrossEntropy(Classification):
    """Integer labels (B,), outputs (B, classes), softmax.

    >>> cross_entropy.mixed(torch.zeros(2, 1, 4), torch.tensor([0.5, 0.5]), torch.tensor([3])).exp()
    tensor([4.])
    """

    name = "cross_entropy"

    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[:-1] != (len(outputs), *target.shape):
            raise ModelError(_unfit(self.name, outputs[0], target, "outputs (B, classes) for labels (B,)"))
        label = target.long().expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.log_softmax(-1).gather(-1, label).squeeze(-1)

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """softmax(output) - 1_y."""
        label = target.long()[:, None]
        log_p = columns.log_softmax(1)
        losses = log_p.gather(1, label)
        slope = log_p.exp_()
        slope.scatter_(1, label, torch.expm1(losses))
        return slope, losses.neg_()[:, 0]

    def inverse_link(self, output: Tensor) -> Tensor:
        """Class probabilities."""
        return output.softmax(-1)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """1 if the most probable class is the label."""
        return (prediction.argmax(-1) == target).to(prediction.dtype)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
            raise DataError(
                f"cross_entropy: target has shape {tuple(y.shape)} and type {y.dtype}; "
                f"expected integer labels (B,): use y.long().reshape(-1)"
            )
        top = torch.iinfo(y.dtype).max if outputs is None else outputs - 1
        _refuse((y < 0) | (y > top), y, f"is not in 0 to {top}", "number the labels from 0, with one output per label")


class Logistic(Classification):
    """Labels 0 or 1 (B,) of any type, one output per sample (B,) or (B, 1), sigmoid."""

    name = "logistic"

    def _log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        y = target.flatten()
        return F.logsigmoid((2 * y.to(outputs.dtype) - 1) * _scalar(outputs, y, self.name))

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """sigmoid(output) - y."""
        y = target.to(columns.dtype).reshape(columns.shape)
        return columns.sigmoid() - y, F.softplus((1 - 2 * y) * columns)[:, 0]

    def inverse_link(self, output: Tensor) -> Tensor:
        """Probability of label 1."""
        return output.sigmoid()

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """1 if the more probable label is correct; at equal probabilities the prediction is 0."""
        y = target.flatten()
        return ((_scalar(prediction[None], y, self.name)[0] > 0.5) == (y > 0.5)).to(prediction.dtype)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        _one_column(self.name, y, outputs)
        _refuse((y != 0) & (y != 1), y, "is not 0 or 1", "use (y > 0) for -1 and 1, cross_entropy for more")


class Squared(Loss):
    """Numbers (B,) or vectors (B, d), identity link: |output - y|^2 / 2, a Gaussian of unit variance."""

    name = "squared"
    metric_name = "rmse"

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """|output - y|^2 / 2, (B,)."""
        return self._errors(output, target).sum(1) / 2

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """output - y."""
        slope = columns - target.to(columns.dtype).reshape(*target.shape[:2], -1).transpose(1, 2)
        return slope, slope.square().sum(1) / 2

    def inverse_link(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """|sum_k c_k o_k - y|^2 / 2, (B,)."""
        return self.per_sample(torch.tensordot(c.to(outputs.dtype), outputs, dims=1), target)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Squared error, averaged over the d coordinates."""
        return self._errors(prediction, target).mean(1)

    def metric(self, mean_score: Tensor) -> Tensor:
        """Root of the mean squared error."""
        return mean_score.sqrt()

    def _errors(self, output: Tensor, target: Tensor) -> Tensor:
        # (B, d), or (B, 1) for a single number; reshaped so that (B,) - (B, 1) does not broadcast to (B, B)
        if output.shape[0] != target.shape[0] or output.numel() != target.numel():
            raise ModelError(_unfit(self.name, output, target, "one output per number of the target"))
        return (output - target.to(output.dtype).reshape(output.shape)).square().unsqueeze(-1).flatten(1)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        width = math.prod(y.shape[1:])
        if outputs is not None and width != outputs:
            raise DataError(f"squared: a target has {width} numbers but the model {outputs}; make them equal")


class Poisson(Loss):
    """Counts or rates >= 0 (B,), one output per sample (B,) or (B, 1), log link; log y! is dropped."""

    name = "poisson"
    metric_name = "deviance"

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """exp(o) - y o, (B,)."""
        y = target.flatten().to(output.dtype)
        o = _scalar(output[None], y, self.name)[0]
        return o.exp() - y * o

    def slopes(self, columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """exp(output) - y."""
        y, rate = target.to(columns.dtype).reshape(columns.shape), columns.exp()
        return rate - y, (rate - y * columns)[:, 0]

    def inverse_link(self, output: Tensor) -> Tensor:
        """The rate."""
        return output.exp()

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        """r - y log r, (B,), of the mean rate r = sum_k c_k exp(o_k)."""
        return self.per_sample(log_mix(_scalar(outputs, target.flatten(), self.name), c), target)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Unit deviance 2 (y log(y / r) - y + r)."""
        y = target.flatten().to(prediction.dtype)
        r = _scalar(prediction[None], y, self.name)[0]
        return 2 * (torch.xlogy(y, y) - torch.xlogy(y, r) - y + r)

    def _check(self, y: Tensor, outputs: int | None) -> None:
        _one_column(self.name, y, outputs)
        _refuse(y < 0, y, "is negative", "a count or rate is at least 0; use squared for other numbers")


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


def _scalar(outputs: Tensor, y: Tensor, name: str) -> Tensor:
    """Outputs (K, B) or (K, B, 1) as (K, B), given y (B,)."""
    if outputs.shape[1:] not in ((len(y),), (len(y), 1)):
        raise ModelError(_unfit(name, outputs[0], y, "one output per sample: end in a layer of width 1"))
    return outputs.reshape(outputs.shape[:2])


def _unfit(name: str, output: Tensor, target: Tensor, expected: str) -> str:
    return f"{name}: outputs {tuple(output.shape)} do not fit targets {tuple(target.shape)}; expected {expected}"


def _one_column(name: str, y: Tensor, outputs: int | None) -> None:
    if math.prod(y.shape[1:]) != 1:
        raise DataError(f"{name}: target has shape {tuple(y.shape)}; expected (B,): fit columns one by one")
    if outputs is not None and outputs != 1:
        raise DataError(f"{name}: the model has {outputs} outputs per sample; end it in a layer of width 1")


def _refuse(wrong: Tensor, y: Tensor, what: str, remedy: str) -> None:
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise DataError(f"target{at} is {y[tuple(at)].item():g}, which {what}: {remedy}")


cross_entropy, logistic, squared, poisson = CrossEntropy(), Logistic(), Squared(), Poisson()
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (cross_entropy, logistic, squared, poisson)}


def loss_by_name(name: str) -> Loss:
    """The loss of that name, or a ModelError that lists them.

    >>> loss_by_name("squared").metric_name
    'rmse'
    """
    if name not in LOSSES:
        raise ModelError(f"there is no loss {name!r}; use one of {', '.join(map(repr, sorted(LOSSES)))}")
    return LOSSES[name]
