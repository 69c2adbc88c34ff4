"""Losses for numbers and counts."""

import math

from torch import Tensor

from . import links
from .densities import poisson_deviance, poisson_log_density
from .errors import DataError, ModelError
from .loss_contract import Loss, check_one_column, one_output, refuse_values, unfit


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

    def _check(self, y: Tensor, outputs: int | None) -> None:
        width = math.prod(y.shape[1:])
        if outputs is not None and width != outputs:
            raise DataError(f"squared: a target has {width} numbers but the model {outputs}; make them equal")


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

    def _check(self, y: Tensor, outputs: int | None) -> None:
        check_one_column(self.name, y, outputs, "fit columns one by one")
        refuse_values(y < 0, y, "is negative", "a count or rate is at least 0; use squared for other numbers")
