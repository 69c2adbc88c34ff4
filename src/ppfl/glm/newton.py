"""Newton's method in a trust region, for an objective whose points move with the parameters.

Everything here is a generator that yields the evaluations it needs and is sent their sums. So several searches can go
side by side, and the clients may be at one site or at many.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .likelihood import Ask, Layout, LikelihoodSums, Matrix, Objective, Points, Subset, Vector
from .regularization import Regularization

Asking = Generator[Sequence[Ask], Sequence[LikelihoodSums], Any]

SMALL_GAIN = 0.05  # of the log-likelihood: less is left to gain where a fit has converged
_SMALLEST_CURVATURE = 1e-10  # relative to the largest; along flatter directions the step would leave the data behind
_NARROW_SHARE = 0.2  # of clients with well-known memberships, above which points are adapted after every step
_MAX_REJECTED, _PATIENCE = 5, 3  # steps in a row, and steps that gain no more than the points' own error
_LITTLE = 0.02  # of the log-likelihood
_SHORT_STEP = 0.3  # of any parameter: points stand for the integral only near where they were drawn
_SHORTEST, _LAST_STEP = 2.0**-12, 1e-5
_ROUNDS = 6
_MANY_CLIENTS = 2000  # keep the points that they have for the last steps


class Task(NamedTuple):
    """What is minimised."""

    name: str
    layout: Layout
    subset: Subset
    points_each: int
    dimensions: int  # of the points
    regularization: Regularization
    samples: float
    clients: float
    basis: Matrix | None = None  # (P, P'), of the directions in which the parameters may move

    def ask(self, vector: Vector, points: Points, *, accept: bool = True, once: bool = False) -> Ask:
        return Ask(self.name, self.layout, self.subset, self.points_each, vector, points, accept, once)

    def add_penalty(self, vector: Vector, sums: LikelihoodSums) -> LikelihoodSums:
        value, gradient, hessian = self.regularization.derivatives(self.layout, vector)
        return sums._replace(
            value=sums.value + value, gradient=sums.gradient + gradient, hessian=sums.hessian + hessian
        )


class Effort(NamedTuple):
    """When to stop."""

    tol: float = 1e-6  # of the largest component of the gradient per sample
    max_iter: int = 500
    small_step: float = 0.0  # a gain in nats that is small enough to stop; 0 for a minimum on points that stay


class Solution(NamedTuple):
    vector: Vector
    found: LikelihoodSums  # with the penalty
    path: list[float]  # the objective in nats after every step on the last points; it never rises
    steps: int
    gradient: float  # the largest component per sample
    gain: float  # what the next step would gain, in nats
    converged: bool


class Step(NamedTuple):
    direction: Vector
    gain: float  # by the quadratic model, in nats
    curvature: float  # the smallest eigenvalue of the Hessian


def newton_step(found: LikelihoodSums, basis: Matrix | None, radius: float, least: float = SMALL_GAIN) -> Step:
    """The minimum of the quadratic model where it curves upwards, at most `radius` away in any parameter.

    Directions in which it curves downwards are followed downhill, with the same length as if they curved upwards, but
    at least so far that the gain shows: the gradient may vanish there, as it does where a canonical model is split.
    """
    gradient, hessian = found.gradient, found.hessian
    if basis is not None:
        gradient, hessian = basis.T @ gradient, basis.T @ hessian @ basis
    size, axes = np.linalg.eigh(hessian)
    slope = axes.T @ gradient
    bent = np.maximum(np.abs(size), _SMALLEST_CURVATURE * np.abs(size).max())
    length = np.abs(slope) / bent
    escapes = -0.5 * size * _SHORT_STEP**2 > least
    length[escapes] = np.maximum(length[escapes], _SHORT_STEP)
    step = axes @ (np.where(slope > 0, -1.0, 1.0) * length)
    step = step * min(1.0, radius / max(float(np.abs(step).max()), 1e-300))
    gain = -float(gradient @ step + 0.5 * step @ hessian @ step)
    return Step(step if basis is None else basis @ step, gain, float(size[0]))


def minimize(task: Task, start: Vector, effort: Effort) -> Asking:
    """Steps with points that follow every step, until no more is left to gain than the points' own error.

    Gradient and Hessian are those of the integral itself, so a step may be larger than the points reach. The last steps
    keep the points, so that they end in a minimum. Returns a Solution.
    """
    vector = start
    found = yield from evaluate(task, vector, "fresh")
    radius, rejected, stalled, best, steps, accept = 1.0, 0, 0, found.value, 0, True
    while _largest(task, found) > effort.tol and steps < effort.max_iter:
        enough = max(effort.small_step, _LITTLE if task.dimensions else 1e-3, found.error)
        step = newton_step(found, task.basis, radius, max(SMALL_GAIN, found.error))
        if step.gain <= enough or rejected == _MAX_REJECTED or stalled == _PATIENCE:
            break
        # points cannot follow memberships that are known much better than a step changes them
        is_narrow = found.narrow > _NARROW_SHARE * task.clients
        tried = yield from evaluate(task, vector + step.direction, "adapt" if is_narrow else "move", accept=accept)
        accept = tried.value <= found.value + found.error + tried.error or _is_closer(task, tried, step.gain)
        if accept:
            rejected, steps, longest = 0, steps + 1, float(np.abs(step.direction).max())
            radius = 2 * radius if longest > 0.9 * radius else radius
            vector, found = vector + step.direction, tried
            stalled = 0 if found.value < best - found.error else stalled + 1
            best = min(best, found.value)
        else:
            rejected += 1
            radius = float(np.abs(step.direction).max()) / 3
    if effort.small_step:
        return _solution(task, vector, found, [found.value], steps, effort.tol)
    return (yield from _settle(task, vector, found, effort, steps, accept=accept))


def _settle(task: Task, vector: Vector, found: LikelihoodSums, effort: Effort, steps: int, *, accept: bool) -> Asking:
    """Steps on points that stay, each of which lowers the objective.

    Where they leave the region in which the points stand for the integral, points are adapted again, as long as that
    lowers the objective of adapted points too.
    """
    for _ in range(_ROUNDS):
        if task.clients <= _MANY_CLIENTS and task.dimensions:
            adapted, accept = (yield from evaluate(task, vector, "fresh")), True
            found = adapted
        # points that stay cannot stand for memberships that are known much better than a step changes them
        how: Points = "adapt" if found.narrow > _NARROW_SHARE * task.clients else "keep"
        path, left = [found.value], False
        least = max(_LAST_STEP, 0.01 * found.error if task.clients > _MANY_CLIENTS else 0.0)
        while _largest(task, found) > effort.tol and len(path) <= effort.max_iter:
            step = newton_step(found, task.basis, _SHORT_STEP if task.dimensions else 2.0)
            if step.gain <= max(least, 1e-13 * abs(found.value)):
                break
            left = how == "keep" and path[0] - found.value > SMALL_GAIN + found.error
            length = 0.0 if left else 1.0
            while length > _SHORTEST:
                tried = yield from evaluate(task, vector + length * step.direction, how, accept=accept)
                accept = how == "keep" or tried.value < found.value
                if tried.value < found.value:
                    break
                length /= 2
            if length <= _SHORTEST:
                break
            vector, found = vector + length * step.direction, tried
            path.append(found.value)
        steps += len(path) - 1
        if not left:
            break
    return _solution(task, vector, found, path, steps, effort.tol)


def evaluate(task: Task, vector: Vector, points: Points, *, accept: bool = True, once: bool = False) -> Asking:
    """One evaluation, with the penalty."""
    (sums,) = yield [task.ask(vector, points, accept=accept, once=once)]
    return task.add_penalty(vector, sums)


def _solution(
    task: Task, vector: Vector, found: LikelihoodSums, path: list[float], steps: int, tol: float
) -> Solution:  # fmt: skip
    left = newton_step(found, task.basis, math.inf)
    gradient = _largest(task, found)
    is_minimum = gradient <= tol and left.curvature > 0
    return Solution(vector, found, path, steps, gradient, left.gain, is_minimum or left.gain < SMALL_GAIN)


def _largest(task: Task, found: LikelihoodSums) -> float:
    gradient = found.gradient if task.basis is None else task.basis.T @ found.gradient
    return float(np.abs(gradient).max()) / task.samples


def _is_closer(task: Task, tried: LikelihoodSums, before: float) -> bool:
    """Whether less is left to gain, where the errors of different points hide what a step has gained."""
    return newton_step(tried, task.basis, math.inf).gain < 0.5 * before < 1.0


def together(searches: Sequence[Asking]) -> Asking:
    """Several searches side by side: in every round they ask together. Returns the list of their results."""
    results: list[Any] = [None] * len(searches)
    waiting: dict[int, Sequence[Ask]] = {}
    for i, search in enumerate(searches):
        _advance(search, None, i, waiting, results)
    while waiting:
        order = list(waiting)
        answers = iter((yield [ask for i in order for ask in waiting[i]]))
        for i in order:
            own = [next(answers) for _ in waiting.pop(i)]
            _advance(searches[i], own, i, waiting, results)
    return results


def _advance(
    search: Asking, answers: Any, i: int, waiting: dict[int, Sequence[Ask]], results: list[Any]
) -> None:  # fmt: skip
    try:
        waiting[i] = search.send(answers)
    except StopIteration as end:
        results[i] = end.value


def run(objective: Objective, search: Asking) -> Any:
    """The result of a search whose evaluations an objective answers."""
    answers: Any = None
    while True:
        try:
            asks = search.send(answers)
        except StopIteration as end:
            return end.value
        answers = objective.evaluate(asks)
