"""Marginal likelihoods of population GLMs by integration methods that ppfl does not use, in numpy and scipy only.

log p(y_i) = log of the integral over c ~ Dirichlet(alpha) of the product over rows j of p(y_ij | x_ij c theta)

Two canonical models: adaptive quadrature (scipy.integrate.quad) over the log-ratio of the memberships. More: importance
sampling around the mode in log-ratio coordinates. The proposal is a mixture of t distributions, adapted to each client,
and the prior; the points are randomised quasi-Monte Carlo, and repetitions give the standard error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.special as special
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import qmc

Array = np.ndarray[Any, Any]
LogLikelihood = Callable[[Array], Array]  # memberships (S, K) to log-likelihoods (S,)

FREEDOM = 5.0  # degrees of freedom of the t distributions
COMPONENTS = 3  # of the proposal, for each dimension
ADAPTING = 2048  # points for each dimension in a step of adapting the proposal
PRIOR_WEIGHT = 0.1  # of the prior in the proposal: it covers the tails, however long they are
REPETITIONS = 8
CHUNK = 4_000_000  # numbers (points x rows) at a time


class Integral(NamedTuple):
    value: float
    error: float  # the standard error, or the error bound of quadrature


def log_density(family: str, eta: Array, y: Array, dispersion: float = 1.0) -> Array:
    """Log density of y (n,) for predictors (S, n), with all constants."""
    if family == "gaussian":
        return -0.5 * ((y - eta) ** 2 / dispersion + np.log(2 * np.pi * dispersion))
    if family == "binomial":
        return y * eta - np.logaddexp(0.0, eta)
    if family == "poisson":
        return y * eta - np.exp(eta) - special.gammaln(y + 1)
    raise ValueError(f"no family {family!r}; use gaussian, binomial or poisson")


def client_log_likelihood(family: str, x: Array, y: Array, theta: Array, dispersion: float = 1.0) -> LogLikelihood:
    """The log-likelihood of one client's rows (n, q) as a function of its membership. theta: (K, q)."""
    constant = 0.0
    if family == "gaussian" and len(y) > x.shape[1] + 1:  # the same sum of squares from the triangle of [x, y]
        triangle = np.linalg.qr(np.column_stack([x, y]), mode="r")
        constant = -0.5 * (len(y) - len(triangle)) * np.log(2 * np.pi * dispersion)
        x, y = triangle[:, :-1], triangle[:, -1]
    each = theta @ x.T  # (K, n)

    def evaluate(c: Array) -> Array:
        size = max(1, CHUNK // max(1, len(y)))
        parts = [log_density(family, c[i : i + size] @ each, y, dispersion).sum(1) for i in range(0, len(c), size)]
        return np.concatenate(parts) + constant

    return evaluate


def marginal_log_likelihood(
    family: str, x: Array, y: Array, clients: Array, theta: Array, alpha: Array, dispersion: float = 1.0, seed: int = 0,
    max_error: float = 0.0015,
) -> Integral:  # fmt: skip
    """Sum over clients, with its standard error. `max_error` is wanted for each client, and reached if possible."""
    random = np.random.default_rng(seed)
    found = []
    for client in np.unique(clients):
        rows = clients == client
        log_likelihood = client_log_likelihood(family, x[rows], y[rows], theta, dispersion)
        found.append(integrate(log_likelihood, alpha, random, max_error))
    values, errors = np.array(found).T
    # errors of quadrature are bounds that may all have the same sign; errors of sampling are independent
    return Integral(float(values.sum()), float(errors.sum() if len(alpha) == 2 else np.sqrt((errors**2).sum())))


def integrate(log_likelihood: LogLikelihood, alpha: Array, random: np.random.Generator, max_error: float) -> Integral:
    """The log of the integral for one client."""
    if len(alpha) == 1:
        return Integral(float(log_likelihood(np.ones((1, 1)))[0]), 0.0)
    if len(alpha) == 2:
        return quadrature(log_likelihood, alpha)
    return importance_sampling(log_likelihood, alpha, random, max_error)


# ---------------------------------------------------------------------- two canonical models


def quadrature(log_likelihood: LogLikelihood, alpha: Array, end: float = 36.0) -> Integral:
    """Over u = log(c_1 / c_2): panels from -end to end, and beyond them exponential tails, which are exact."""
    log_beta = special.gammaln(alpha).sum() - special.gammaln(alpha.sum())

    def log_joint(u: Array) -> Array:
        logs = np.stack([-np.logaddexp(0.0, -u), -np.logaddexp(0.0, u)], 1)
        return log_likelihood(np.exp(logs)) + logs @ alpha - log_beta

    grid = np.linspace(-end, end, 40 * round(2 * end) + 1)
    on_grid = log_joint(grid)
    top = float(on_grid.max())

    def relative(u: float) -> float:
        return float(np.exp(log_joint(np.array([u]))[0] - top))

    total, error = 0.0, 0.0
    edges = grid[::20]
    for left, right in itertools.pairwise(edges):
        inside = on_grid[(grid >= left) & (grid <= right)].max()
        if inside > top - 60:
            value, bound = quad(relative, left, right, epsabs=1e-11, epsrel=1e-9, limit=200)
            total, error = total + value, error + bound
    tails = np.exp(on_grid[[0, -1]] - top) / alpha  # at u = -end the membership is (0, 1) and c_1 falls as exp(u)
    total += float(tails.sum())
    return Integral(top + float(np.log(total)), error / total)


# ---------------------------------------------------------------------- more canonical models


class Proposal(NamedTuple):
    """A mixture of t distributions and the prior, in log-ratio coordinates."""

    weight: Array  # (J + 1,), the last one of the prior
    mean: Array  # (J, d)
    factor: Array  # (J, d, d), lower triangular factors of the scales
    alpha: Array

    def sample(self, uniform: Array) -> Array:
        """Points (S, d) from uniform numbers (S, d + 2)."""
        j = np.searchsorted(np.cumsum(self.weight), uniform[:, 0]).clip(max=len(self.weight) - 1)
        d = self.mean.shape[1]
        points = np.empty((len(uniform), d))
        for i in range(len(self.mean)):
            chosen = uniform[j == i]
            normal = special.ndtri(chosen[:, 2:])
            scale = np.sqrt(2 * special.gammaincinv(FREEDOM / 2, chosen[:, 1]) / FREEDOM)
            points[j == i] = self.mean[i] + (normal @ self.factor[i].T) / scale[:, None]
        chosen = uniform[j == len(self.mean)]
        # log of a gamma variable; for small shapes the logarithm of the inverse is exact where the inverse underflows
        logs = _log_gamma_quantile(self.alpha, chosen[:, 1:])
        points[j == len(self.mean)] = logs @ basis(d + 1)
        return points

    def log_density(self, points: Array) -> Array:
        logs = [np.log(self.weight[-1]) + log_prior(log_memberships(points), self.alpha)]
        d = points.shape[1]
        for weight, mean, factor in zip(self.weight, self.mean, self.factor, strict=False):
            z = scipy.linalg.solve_triangular(factor, (points - mean).T, lower=True)
            constant = special.gammaln((FREEDOM + d) / 2) - special.gammaln(FREEDOM / 2)
            constant -= 0.5 * d * np.log(FREEDOM * np.pi) + np.log(np.diag(factor)).sum()
            tail = np.log1p((z**2).sum(0) / FREEDOM)
            logs.append(np.log(weight) + constant - 0.5 * (FREEDOM + d) * tail)
        return log_sum_exp(np.array(logs), 0)


def _log_gamma_quantile(alpha: Array, uniform: Array) -> Array:
    with np.errstate(divide="ignore"):
        logs = np.log(special.gammaincinv(alpha, uniform))
    tiny = (np.log(uniform) + special.gammaln(alpha + 1)) / alpha  # P(a, x) = x^a / gamma(a + 1) for small x
    return np.where(tiny < -20, tiny, logs)


def basis(k: int) -> Array:
    """Orthonormal columns (K, K - 1) that are orthogonal to the ones."""
    return np.asarray(scipy.linalg.helmert(k).T)


def log_memberships(points: Array) -> Array:
    logs = points @ basis(points.shape[1] + 1).T
    return np.asarray(logs - log_sum_exp(logs, 1)[:, None])


def log_prior(log_c: Array, alpha: Array) -> Array:
    """The Dirichlet density in log-ratio coordinates: the Jacobian is sqrt(K) times the product of memberships."""
    constant = special.gammaln(alpha.sum()) - special.gammaln(alpha).sum() + 0.5 * np.log(len(alpha))
    return np.asarray(log_c @ alpha + constant)


def log_sum_exp(logs: Array, axis: int) -> Array:
    """scipy's handles more cases, and takes most of the time of this file."""
    top = logs.max(axis, keepdims=True)
    return np.asarray(np.log(np.exp(logs - top).sum(axis)) + top.squeeze(axis))


def importance_sampling(
    log_likelihood: LogLikelihood, alpha: Array, random: np.random.Generator, max_error: float
) -> Integral:
    def log_joint(points: Array) -> Array:
        log_c = log_memberships(points)
        return log_likelihood(np.exp(log_c)) + log_prior(log_c, alpha)

    proposal = adapt(log_joint, alpha, random)
    for exponent in (10, 12, 14, 16, 18):
        sobol = qmc.Sobol(len(alpha) + 1, scramble=True, rng=random).random_base2(exponent)
        logs = []
        for _ in range(REPETITIONS):  # random shifts of one net are independent, unbiased repetitions
            uniform = np.clip((sobol + random.random(sobol.shape[1])) % 1, 1e-12, 1 - 1e-12)
            points = proposal.sample(uniform)
            logs.append(special.logsumexp(log_joint(points) - proposal.log_density(points)) - np.log(len(points)))
        value = special.logsumexp(logs) - np.log(REPETITIONS)
        error = float(np.std(np.exp(logs - value), ddof=1) / np.sqrt(REPETITIONS))
        if error < max_error:
            break
    return Integral(float(value), error)


def adapt(log_joint: Callable[[Array], Array], alpha: Array, random: np.random.Generator) -> Proposal:
    """Start with t distributions at the modes, then fit the mixture to weighted samples of itself, a few times."""
    d = len(alpha) - 1
    proposal = _at_modes(log_joint, alpha)
    for _ in range(4):
        points = proposal.sample(np.clip(random.random((ADAPTING * d, d + 2)), 1e-12, 1 - 1e-12))
        logs = log_joint(points) - proposal.log_density(points)
        weight = np.exp(logs - special.logsumexp(logs))
        # weights are cut so that one lucky point does not decide on the next proposal
        weight = np.minimum(weight, 20 * np.sort(weight)[-len(weight) // 10 :].mean())
        proposal = _fit_mixture(points, weight / weight.sum(), alpha, random)
    return proposal


def _at_modes(log_joint: Callable[[Array], Array], alpha: Array) -> Proposal:
    """A t distribution at the mode, and wide ones in the middle and most of the way to each corner."""
    d = len(alpha) - 1
    found = minimize(lambda v: -log_joint(v[None])[0], np.zeros(d), method="BFGS", options={"gtol": 1e-3})
    values, vectors = np.linalg.eigh((found.hess_inv + found.hess_inv.T) / 2)
    at_mode = np.linalg.cholesky((vectors * np.clip(values, 1e-4, 25.0)) @ vectors.T * 2.0)
    mean = np.array([found.x, found.x, np.zeros(d), *(2.0 * basis(d + 1))])
    factor = np.array([at_mode, 3 * at_mode, *[2.0 * np.eye(d)] * (d + 2)])
    weight = np.append(np.full(len(mean), (1 - PRIOR_WEIGHT) / len(mean)), PRIOR_WEIGHT)
    return Proposal(weight, mean, factor, alpha)


def _fit_mixture(points: Array, weight: Array, alpha: Array, random: np.random.Generator) -> Proposal:
    """EM for a normal mixture of weighted points."""
    d = points.shape[1]
    count = COMPONENTS * d
    mean = points[random.choice(len(points), count, p=weight)]
    centre = weight @ points
    whole = ((points - centre).T * weight) @ (points - centre) + 1e-6 * np.eye(d)
    covariance, share = np.tile(whole, (count, 1, 1)), np.full(count, 1 / count)
    for _ in range(5):
        factor = np.linalg.cholesky(covariance)
        logs = np.empty((count, len(points)))
        for j in range(count):
            z = scipy.linalg.solve_triangular(factor[j], (points - mean[j]).T, lower=True)
            logs[j] = np.log(share[j]) - np.log(np.diag(factor[j])).sum() - 0.5 * (z**2).sum(0)
        belongs = np.exp(logs - log_sum_exp(logs, 0)) * weight
        share = belongs.sum(1) + 1e-3 / count
        for j in range(count):
            part = belongs[j] / share[j]
            mean[j] = part @ points + (1 - part.sum()) * centre
            covariance[j] = ((points - mean[j]).T * part) @ (points - mean[j]) + (0.02 + 1 - part.sum()) * whole
        share = share / share.sum()
    weights = np.append(share * (1 - PRIOR_WEIGHT), PRIOR_WEIGHT)
    return Proposal(weights, mean, np.linalg.cholesky(covariance), alpha)
