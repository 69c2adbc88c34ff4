"""What a loss is: the loss of one sample, how outputs become predictions, and what is reported.

Everything except `check_target` is pure tensor algebra, so that it works under torch.func.vmap and grad.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from . import links
from .errors import DataError, ModelError
from .links import Link


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

    def check_mixing(self) -> None:
        """Raise a ModelError if the loss of a mean prediction cannot be derived."""
        if self._own_inverse_link() and type(self).mixed is Loss.mixed:
            raise ModelError(
                f"the loss {self.name!r} has an inverse link of its own, so the loss of a mixed prediction does not "
                f"follow; give it a `link` of ppfl.core.links, write its `mixed`, or use mix='outputs'"
            )

    def check_target(self, y: Tensor, outputs: int | None = None) -> None:
        """Raise a DataError if y cannot be a target of this loss (with this number of outputs per sample)."""
        if y.dim() == 0:
            raise DataError(f"{self.name}: target is a single number; expected one per sample, (B,)")
        refuse_values(~y.isfinite(), y, "is not finite", "impute it or drop the sample")
        self._check(y, outputs)

    def _check(self, y: Tensor, outputs: int | None) -> None:
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


def check_one_column(name: str, y: Tensor, outputs: int | None, remedy: str) -> None:
    """Refuse targets or outputs with more than one number per sample."""
    if math.prod(y.shape[1:]) != 1:
        raise DataError(f"{name}: target has shape {tuple(y.shape)}; expected (B,): {remedy}")
    if outputs is not None and outputs != 1:
        raise DataError(f"{name}: the model has {outputs} outputs per sample; end it in a layer of width 1")


def refuse_values(wrong: Tensor, y: Tensor, what: str, remedy: str) -> None:
    """Refuse targets y that are wrong somewhere, naming the first."""
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise DataError(f"target{at} is {y[tuple(at)].item():g}, which {what}: {remedy}")
