"""From smaller models to the best minimum for K canonical models and a residual effect.

Every model contains smaller ones: a canonical model twice, no residual effect, or columns that do not vary within
clients shared by all. The fits of these are its starts, and it never ends below one of them. All ends are compared by
the same points. With many clients a part of them finds the region first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .likelihood import Layout, Residual, Subset, Vector, log_concentration
from .nested import embedded, embedded_many, is_diagonal, root_of_differences, splitting_axes, tied_basis
from .newton import Asking, Effort, Solution, Task, evaluate, minimize, together
from .points import points_each
from .regularization import Regularization

_FEW_CLIENTS = 1000  # up to here all smaller models are fitted to all clients
_CLIENTS_TO_COMPARE = 400
_MORE_CLIENTS = (2500, 16000)  # before all of them, because steps are cheaper with fewer
_CLIENTS_TO_TRY, _CLIENTS_OF_RANDOM_STARTS = 64, 100
ROUGHLY = Effort(1e-5, 150, 0.1)
_STEP, _LONG_STEP = 0.3, 1.0  # between copies that move apart: standardised columns have coefficients of order 1
_CORNERS = 2  # splits to try
_START_OF_RESIDUAL = 0.5
_NARROW_SHARE = 0.2  # of clients with well-known memberships, above which simplices of other sizes are tried
_STRETCHES = (0.7, 0.85, 1.2, 1.5)  # of the distance of a canonical model from the middle of all
_STEPS_OF_RANDOM_STARTS = 5
_SAME, _CLOSE = 0.3, 10.0  # nats between ends in the same minimum, and between those of which each may be the best


class Facts(NamedTuple):
    """What a search knows of the data: numbers that sites agree on, and no rows."""

    layout: Layout  # for one canonical model, with the columns that can have a residual effect
    regularization: Regularization
    clients: float
    samples: float
    nuisance: Vector  # (r,), to begin with
    closed_form: bool  # whether residual effects need no points
    tied: tuple[int, ...] = ()  # varying columns that are constant within every client

    def layout_of(self, k: int, residual: Residual) -> Layout:
        effects = self.layout.effects
        if residual == "intercept":
            effects = (self.layout.intercept,)
        return self.layout._replace(k=k, residual=residual, effects=effects if residual != "none" else ())

    def dimensions(self, layout: Layout) -> int:
        return layout.k - 1 + (0 if self.closed_form else layout.n_effects)


class Node(NamedTuple):
    """A model: `tied` if columns that are constant within clients have one coefficient for all canonical models."""

    k: int
    residual: Residual = "none"
    tied: bool = False


def final_name(node: Node) -> str:
    """The task of the last steps for all clients, whose points an estimator can keep."""
    return f"all {node.k} {node.residual}"


class Fit(NamedTuple):
    layout: Layout
    solution: Solution


class Starts(NamedTuple):
    """Random starts."""

    number: int = 0
    seed: int = 0


class Chain:
    """The fits of one part of the rows, smaller ones first. Every node is fitted once."""

    def __init__(self, facts: Facts, fold: int, fraction: float, effort: Effort, starts: Starts = Starts()) -> None:  # noqa: B008
        self.facts, self.fold, self.fraction, self.effort, self.starts = facts, fold, fraction, effort, starts
        self.is_large = facts.clients > _FEW_CLIENTS
        self.share = _CLIENTS_TO_COMPARE / facts.clients if self.is_large else 1.0
        self._found: dict[Node, Fit] = {}
        self._finished: dict[Node, Fit] = {}
        self._others: dict[Node, list[Vector]] = {}  # where other starts ended

    def fit(self, node: Node) -> Asking:
        """The best fit to all clients: it is no worse than the fits of smaller models that are known."""
        if node in self._finished:
            return self._finished[node]
        small = yield from self.search(node)
        if self.effort.small_step and not self.is_large:
            return small
        vector = small.solution.vector
        if self.is_large:  # what is best for a part may not be best for more
            more = self._task(node, "more", _MORE_CLIENTS[0] / self.facts.clients)
            if self._others[node]:
                vector, _ = yield from self._best(more, [vector, *self._others[node]])
        for count in _MORE_CLIENTS:
            if self.is_large and 2 * count < self.facts.clients:
                task = self._task(node, "more", count / self.facts.clients)
                vector = (yield from minimize(task, vector, ROUGHLY)).vector
        task = self._task(node, final_name(node), 1.0, roughly=self.effort.small_step > 0)
        solution = yield from minimize(task, vector, self.effort)
        for guard in self._guards(node, self._finished):
            solution = yield from self._guarded(task, solution, guard)
        self._finished[node] = Fit(task.layout, solution)
        return self._finished[node]

    def _guarded(self, task: Task, solution: Solution, guard: Vector) -> Asking:
        """A solution that is no worse than a guard, both with fresh points."""
        mine, theirs = yield from together(
            [
                evaluate(_named(task, f"compare {i}"), each, "fresh", once=True)
                for i, each in enumerate((solution.vector, guard))
            ]
        )
        if mine.value <= theirs.value + max(mine.error, 1e-3):
            return solution
        again = yield from minimize(task, guard, self.effort)
        return min(solution, again, key=lambda each: float(each.found.value))

    def search(self, node: Node) -> Asking:
        """The region of the best fit, from smaller models, for a part of the clients if they are many."""
        if node in self._found:
            return self._found[node]
        for smaller in self._contained(node):
            yield from self.search(smaller)
        task = self._task(node, "rough", self.share)
        starts = yield from self._starts(node, task)
        tasks = [_named(task, f"start {i}") for i in range(len(starts))]
        ends = yield from together([minimize(each, start, ROUGHLY) for each, start in zip(tasks, starts, strict=True)])
        best = ends[0]
        if node != Node(1):
            guards = self._guards(node, self._found)
            precise = self._task(node, "compare", self.share, roughly=self.is_large)
            vector, found = yield from self._best(precise, [*(end.vector for end in ends), *guards])
            if node.k > 1 and self.fold < 0:
                more = yield from self._rescaled(task, vector)
                vector, found = yield from self._best(precise, [vector, *(end.vector for end in more)])
                ends = [*ends, *more]
            if found.narrow > _NARROW_SHARE * task.clients and node.k > 1:
                vector = yield from self._stretched(precise, vector)
            known = [end for end in ends if end.vector is vector]
            best = known[0] if known else (yield from minimize(task, vector, ROUGHLY))
        apart = [(abs(end.found.value - best.found.value), end.vector) for end in ends]
        self._others[node] = [vector for gap, vector in apart if _SAME < gap < _CLOSE]
        self._found[node] = Fit(task.layout, best)
        return self._found[node]

    def _contained(self, node: Node) -> list[Node]:
        """The largest models that this one contains."""
        if node.k == 1:
            simpler: dict[Residual, Residual] = {"full": "diagonal", "diagonal": "intercept", "intercept": "none"}
            below = simpler.get(node.residual)
            if below == "intercept" and self.facts.layout.intercept not in self.facts.layout.effects:
                below = "none"
            return [Node(1, below)] if below else []
        found = [Node(node.k - 1, node.residual, node.tied and node.k > 2)]
        if node.residual != "none":
            found.append(Node(node.k, "none", node.tied))
        if self.facts.tied and not node.tied:
            found.append(Node(node.k, node.residual, tied=True))
        return found

    def _guards(self, node: Node, known: dict[Node, Fit]) -> list[Vector]:
        """The fits of smaller models, as parameters of this one."""
        layout = self.facts.layout_of(node.k, node.residual)
        found = []
        for smaller in self._contained(node):
            if smaller in known:
                fit = known[smaller]
                corner = _largest_corner(fit) if smaller.k < node.k else None
                found.append(embedded(fit.layout, fit.solution.vector, layout, corner))
        return found

    def _starts(self, node: Node, task: Task) -> Asking:
        layout, facts = task.layout, self.facts
        starts: list[Vector] = []
        for smaller in self._contained(node):
            fit = self._found[smaller]
            if smaller.k < node.k:
                starts += yield from self._split(node, fit)
            elif smaller.residual == node.residual:
                starts.append(embedded(fit.layout, fit.solution.vector, layout))
            else:
                vector = embedded(fit.layout, fit.solution.vector, layout)
                place = layout.places["residual"]
                if not fit.layout.n_residual:
                    vector[place] = _START_OF_RESIDUAL * is_diagonal(layout)
                starts.append(vector)
        if not starts:
            start = np.zeros(layout.size)
            start[layout.places["nuisance"]] = facts.nuisance
            starts.append(start)
        if node.k > 1 and self.starts.number and not node.tied:
            starts.append((yield from self._random_start(node)))
        return starts

    def _best(self, task: Task, vectors: Sequence[Vector]) -> Asking:
        """The vector with the lowest objective, with the points that each of them needs."""
        if len(vectors) == 1:
            found = yield from evaluate(task, vectors[0], "fresh", once=True)
            return vectors[0], found
        asked = [evaluate(_named(task, f"compare {i}"), vector, "fresh", once=True) for i, vector in enumerate(vectors)]
        found = yield from together(asked)
        best = min(range(len(vectors)), key=lambda i: float(found[i].value))
        return vectors[best], found[best]

    def _task(self, node: Node, name: str, share: float, *, roughly: bool = True) -> Task:
        facts, share = self.facts, min(1.0, share)
        layout = facts.layout_of(node.k, node.residual)
        clients, d = share * facts.clients, facts.dimensions(layout)
        fine = points_each(d, round(clients))
        many = 256 if clients <= 25 else 128 if clients <= 75 else 64  # with few clients points are cheap
        few = min(fine, many if self.fold < 0 else 64)
        return Task(
            f"fold {self.fold} {name}", layout, Subset(self.fold, share), few if roughly else fine, d,
            facts.regularization.scaled(share * self.fraction), share * self.fraction * facts.samples, clients,
            tied_basis(layout, facts.tied) if node.tied else None,
        )  # fmt: skip

    # ------------------------------------------------------------------ starts

    def _split(self, node: Node, smaller: Fit) -> Asking:
        """Starts from the fit with one canonical model fewer: one of them becomes two, which move apart.

        From one canonical model there are two starts, because the first direction is not always the best.
        """
        fewer = _CLIENTS_TO_TRY / self.facts.clients
        task = self._task(node, "split", min(self.share, fewer))
        layout, vector = smaller.layout, smaller.solution.vector
        axes = splitting_axes(layout, vector, smaller.solution.found, self.facts.tied if node.tied else ())

        def start(corner: int, axis: Vector, step: float) -> Vector:
            found = embedded(layout, vector, task.layout, corner)
            size = layout.varying * layout.outputs
            found[corner * size : (corner + 1) * size] += step * axis
            found[layout.k * size : (layout.k + 1) * size] -= step * axis
            return found

        tried = [[start(corner, axis, step) for step in (_STEP, _LONG_STEP)] for corner, axis in axes[:_CORNERS]]
        if node.k > 2:
            tried = [[each for both in tried for each in both]]
        found = []
        for each in tried:
            found.append((yield from self._best(task, each))[0])
        return found

    def _rescaled(self, rough: Task, best: Vector) -> Asking:
        """Fits that start from simplices of other sizes with memberships of the same covariance.

        Clients between distant canonical models differ as much as those near the corners of a small simplex, if
        sum(alpha) + 1 is larger by the square of the size. The data tell these by the shape of the differences alone,
        so they are optima of their own.
        """
        at = rough.layout.unpack(best)
        total = float(at.alpha.sum())
        starts = []
        for other in (0.25, 1.0, 4.0):
            if not 0.6 < other / total < 1.6:
                alpha = at.alpha * (other / total)
                stretch = math.sqrt((other + 1) / (total + 1))
                middle = (at.alpha[:, None, None] * at.canonical).sum(0) / total
                moved = at._replace(canonical=middle + stretch * (at.canonical - middle))
                starts.append(rough.layout.pack(moved._replace(log_alpha=log_concentration(alpha.clamp(max=9.0)))))
        tasks = [_named(rough, f"size {i}") for i in range(len(starts))]
        searches = [minimize(task, start, ROUGHLY) for task, start in zip(tasks, starts, strict=True)]
        return (yield from together(searches))

    def _stretched(self, task: Task, best: Vector) -> Asking:
        """The same fit with other sizes of its simplex.

        If clients determine their memberships well, simplices of all sizes are local optima of the likelihood, because
        a simplex can only change together with all memberships. So every canonical model is tried nearer to the middle
        of all and farther away.
        """
        layout = task.layout
        for _ in range(2):
            at = layout.unpack(best)
            middle = (at.alpha[:, None, None] * at.canonical).sum(0) / at.alpha.sum()
            tried = [best]
            for k in range(layout.k):
                for stretch in _STRETCHES:
                    canonical = at.canonical.clone()
                    canonical[k] = middle + stretch * (canonical[k] - middle)
                    tried.append(layout.pack(at._replace(canonical=canonical)))
            before = best
            best, _ = yield from self._best(task, tried)
            if best is before:
                break
        return best

    def _random_start(self, node: Node) -> Asking:
        """The best of several random starts after a few steps on some clients."""
        one = self._found[Node(1)]
        random = np.random.default_rng([self.starts.seed, node.k])
        root = root_of_differences(one.layout, one.solution.found)
        task = self._task(node, "random", min(self.share, _CLIENTS_OF_RANDOM_STARTS / self.facts.clients))
        starts = []
        for _ in range(self.starts.number):
            vector = embedded_many(one.layout, one.solution.vector, task.layout)
            at = task.layout.unpack(vector)
            noise = random.normal(size=(node.k, len(root))) @ root.T * random.uniform(1.0, 3.0)
            moved = at.canonical + torch.from_numpy(noise).view_as(at.canonical)
            starts.append(task.layout.pack(at._replace(canonical=moved)))
        effort = ROUGHLY._replace(max_iter=_STEPS_OF_RANDOM_STARTS)
        tasks = [_named(task, f"random {i}") for i in range(len(starts))]
        ends = yield from together([minimize(each, start, effort) for each, start in zip(tasks, starts, strict=True)])
        best, _ = yield from self._best(task, [end.vector for end in ends])
        return best


def _named(task: Task, name: str) -> Task:
    return task._replace(name=f"{task.name} {name}")


def _largest_corner(fit: Fit) -> int:
    return int(fit.layout.unpack(fit.solution.vector).alpha.argmax()) if fit.layout.k > 1 else 0
