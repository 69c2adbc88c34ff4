"""The survey before the first round, in which PPFL finds where memberships start (`start.py` has the mathematics).

Open: one message, in which clients send their sketches as rows ("sketch"). Private: sums over clients alone, first
their moments ("moments"), then steps of k-means ("assign"), then clients place themselves among the corners ("place").

Where not all clients take part in a round, the survey asks those who do, or SURVEYED clients per canonical model where
these are more. Whoever comes for the first time in a later round is placed among the same corners, by a sketch at the
same network, in a message before that round's work ("late"). It would be lock-in to let it train with an even
membership first: it would pull all models to where it is, while they hardly differ.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.backends import Backend
from ...core.trees import Params
from ...io.codec import message
from ..contract import (
    Problem,
    Roster,
    Rows,
    Sum,
    Total,
    Upload,
    Who,
    participants,
)
from .batches import LocalData
from .sgd import TrainingLoss
from .start import (
    WIDTH,
    PrivateStart,
    Start,
    gradient_sketch,
    nearest_cells,
    start_from_sketches,
    start_memberships,
)

LAST_STAGES = ("sketch", "place")  # those that end the round
NEVER = torch.iinfo(torch.int32).max
SURVEYED = 10  # clients per canonical model that a survey asks at least: k-means among fewer misses corners


@message
class Survey(NamedTuple):
    """The task of a client in a survey."""

    stage: str
    seed: int
    round: int


class Placement(NamedTuple):
    """What places clients that come after the survey; without values until that has been made."""

    network: Params  # at which sketches are taken; canonical leaves (1, ...)
    start: Start
    surveyed: Tensor  # (), the round of the survey
    placed: Tensor  # (), the last round in which newcomers were asked

    @classmethod
    def empty(cls, network: Params, sketched: int, k: int) -> Placement:
        """For models with so many canonical parameters each."""
        s, d = min(WIDTH, sketched), max(1, k - 1)
        zeros = [torch.zeros(shape, dtype=torch.float64) for shape in ((s,), (s, d), (k, d))]
        return cls(network, Start(*zeros), torch.tensor(-1), torch.tensor(-1))


# ---------------------------------------------------------------------- server


class SurveyResult(NamedTuple):
    """What the server knows after a message of the survey."""

    survey: Any = {}  # a PrivateStart that is not finished
    memberships: Tensor | None = None  # of those who came back
    start: Start | None = None  # once it is found


def next_stage(survey: Any, *, private: bool) -> str:
    """What to ask next."""
    if not private:
        return "sketch"
    if not survey:
        return "moments"
    return "assign" if survey.corners is None else "place"


def surveyed_clients(problem: Problem, participation: float, round: int) -> Who:
    """Whom a survey asks: all, or a round's participants."""
    return participants(problem, participation, round, at_least=SURVEYED * problem.population.k)


def late_clients(problem: Problem, placement: Any, participation: float, round: int) -> tuple[str, ...]:
    """Those of a round's participants who come for the first time, unless this round has asked them already."""
    if not placement or participation >= 1 or int(placement.placed) == round:
        return ()
    arrivals = _arrivals(problem.roster, problem.seed, participation, int(placement.surveyed), problem.population.k)
    return arrivals.new_in(problem, round)


class _Arrivals:
    """In which round since the survey each client was first asked: a function of the seed, so that no server state
    grows with the number of clients."""

    def __init__(self, participation: float, surveyed: int, clients: int) -> None:
        self.participation, self.surveyed, self.until = participation, surveyed, surveyed - 1
        self.first = torch.full((clients,), NEVER, dtype=torch.int32)  # (M,)

    def new_in(self, problem: Problem, round: int) -> tuple[str, ...]:
        """The participants of a round who were not asked before."""
        for at in range(self.until + 1, round + 1):
            asked = self._asked(problem, at)
            self.first[asked] = self.first[asked].clamp_max(at)
        self.until = max(self.until, round)
        asked = self._asked(problem, round)
        return tuple(problem.roster.ids[at] for at in asked[self.first[asked] == round].tolist())

    def _asked(self, problem: Problem, round: int) -> Tensor:
        """Positions of a round's participants."""
        at_least = SURVEYED * problem.population.k if round == self.surveyed else 1
        who = participants(problem, self.participation, round, at_least)
        return torch.arange(problem.n_clients)[problem.roster.positions(who)]


@lru_cache(maxsize=8)
def _arrivals(roster: Roster, seed: int, participation: float, surveyed: int, k: int) -> _Arrivals:
    return _Arrivals(participation, surveyed, len(roster))


def merge_survey(problem: Problem, task: Survey, survey: Any, totals: dict[str, Total], rows: Rows) -> SurveyResult:
    """After a message; the survey begins again where fewer than K clients came back."""
    k = problem.population.k
    if task.stage == "sketch":
        if rows.n_clients < k:
            return SurveyResult()
        ids = problem.roster.ids if rows.ids is None else rows.ids
        start, found = start_from_sketches(rows.values["sketch"], rows.values["importance"], ids, k, problem.seed)
        return SurveyResult(memberships=found, start=start)
    if task.stage == "place":
        return SurveyResult(start=Start(survey.mean, survey.directions, survey.corners))
    if task.stage == "assign":
        cells = totals["cells"]
        return SurveyResult(survey.moved(cells.weight, cells.value["point"], cells.value["square"]))
    moments, clients = totals["moments"], totals["clients"]
    if round(float(clients.value["count"][0])) < k:
        return SurveyResult()
    weight = clients.weight[0].double()
    return SurveyResult(PrivateStart.from_moments(weight, moments.weight, moments.value["sketch"], k, problem.seed))


# ---------------------------------------------------------------------- client


class SurveyAnswer(NamedTuple):
    membership: Tensor  # (C, K)
    point: Tensor  # (C, d), the sketch along the main directions of all, for the private start
    upload: Upload


def answer_survey(
    backend: Backend, task: Survey, shared: dict[str, Any], membership: Tensor, point: Tensor, data: LocalData
) -> SurveyAnswer:
    """One message of a chunk of clients."""
    if task.stage == "place":
        placed = start_memberships(point.double(), shared["centres"][0].double())
        return SurveyAnswer(placed.to(membership), point, Upload())
    if task.stage == "assign":
        private = PrivateStart(shared["mean"], shared["directions"], shared["centres"])
        if bool((point == 0).all(1).any()):  # the first step for some of them
            sketch, _ = gradient_sketch(backend, shared["models"], data, task.seed)
            point = private.points(sketch)
        values = {"point": point, "square": point.square().sum(1)}
        return SurveyAnswer(membership, point, Upload({"cells": Sum(nearest_cells(point, private.centres), values)}))
    sketch, losses = gradient_sketch(backend, shared["models"], data, task.seed)
    if task.stage == "late":
        if "centres" in shared:  # private: what was sent is enough to place oneself
            start = Start(shared["mean"], shared["directions"], shared["centres"][0])
            return SurveyAnswer(start.memberships(sketch).to(membership), point, Upload())
        return SurveyAnswer(membership, point, Upload({}, {"sketch": sketch}))
    metrics = TrainingLoss(losses, data.sizes.to(losses)).metrics()
    if task.stage == "sketch":
        return SurveyAnswer(membership, point, Upload({}, {"sketch": sketch, "importance": data.weight}, metrics))
    count = Sum(None, {"count": 1 / data.weight})  # p_i / p_i: how many clients there are
    sums = {"moments": Sum(sketch, {"sketch": sketch}), "clients": count}
    return SurveyAnswer(membership, torch.zeros_like(point), Upload(sums, metrics=metrics))
