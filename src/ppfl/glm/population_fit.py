"""What a fit found: parameters and the posterior of every client, without rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .family import Family
from .likelihood import Layout, Parameters, Vector
from .posterior import Posterior
from .regularization import Regularization


@dataclass(frozen=True)
class PopulationFit:
    """A population with its canonical models in the order of their share. Everything after a fit reads this.

    All numbers are in standardised units. The estimator knows the units of its table (`ColumnScaling`), and keeps the
    data beside the fit: what needs rows is in `marginal` (`curvature`, `precise_log_likelihood`, `find_posterior`).
    """

    family: Family
    mix: str  # "weights" or "predictions"
    layout: Layout
    vector: Vector  # (P,), see Layout
    posterior: Posterior  # of the clients of the fit
    prior: Posterior  # of one client without rows
    regularization: Regularization
    order: Tensor  # (K,), by which the canonical models of the search were sorted
    n_rows: int
    n_samples: float
    objective: float  # in nats: minus the log-likelihood over the points of the fit, plus the penalty
    path: Vector  # the objective after every one of the last steps; it never rises
    steps: int
    gradient: float  # its largest component at the end, per sample
    gain: float  # what one more Newton step would gain, in nats
    converged: bool

    @property
    def parameters(self) -> Parameters:
        return self.layout.unpack(self.vector)

    @property
    def k(self) -> int:
        return self.layout.k

    @property
    def alpha(self) -> Tensor:
        """(K,), of the Dirichlet distribution of memberships; (0,) with one canonical model."""
        return self.parameters.alpha

    @property
    def residual_covariance(self) -> Tensor:
        """Sigma (q, q) of u_i in standardised columns, 0 without a residual effect."""
        loadings = self.prior.loadings(self.parameters)
        return loadings.T @ loadings
