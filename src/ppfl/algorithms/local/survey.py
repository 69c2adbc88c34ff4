"""The survey before the first round, in which PPFL finds where memberships start (`start.py` has the mathematics).

Open: one message, in which clients send their sketches as rows ("sketch"). Private: sums over clients alone, first
their moments ("moments"), then steps of k-means ("assign"), then clients place themselves among the corners ("place").

Where not all clients take part in a round, the survey asks those who do, or SURVEYED clients per canonical model where
these are more. All tasks then come with the corners and the network of the survey, and a client that works for the
first time places itself by a sketch of its own. It would be lock-in to let it train with an even membership first: it
would pull all models to where it is, while they hardly differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.trees import Params
from ...io.codec import message
from ..contract import (
    Problem,
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
SURVEYED = 10  # clients per canonical model that a survey asks at least: k-means among fewer misses corners


@message
class Survey(NamedTuple):
    """The task of a client in a survey."""

    stage: str


@message
class Placement(NamedTuple):
    """What clients that come after the survey place themselves by; without values until that has been made."""

    network: Params  # at which sketches are taken; canonical leaves (1, ...)
    start: Start

    @classmethod
    def empty(cls, network: Params, sketched: int, k: int) -> Placement:
        """For models with so many canonical parameters each."""
        s, d = min(WIDTH, sketched), max(1, k - 1)
        return cls(network, Start(*(torch.zeros(shape, dtype=torch.float64) for shape in ((s,), (s, d), (k, d)))))


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
    task: Survey, shared: dict[str, Any], membership: Tensor, point: Tensor, data: LocalData
) -> SurveyAnswer:
    """One message of a chunk of clients."""
    if task.stage == "place":
        placed = start_memberships(point.double(), shared["centres"][0].double())
        return SurveyAnswer(placed.to(membership), point, Upload())
    if task.stage == "assign":
        private = PrivateStart(shared["mean"], shared["directions"], shared["centres"])
        if bool((point == 0).all(1).any()):  # the first step for some of them
            sketch, _ = gradient_sketch(shared["models"], data)
            point = private.points(sketch)
        values = {"point": point, "square": point.square().sum(1)}
        return SurveyAnswer(membership, point, Upload({"cells": Sum(nearest_cells(point, private.centres), values)}))
    sketch, losses = gradient_sketch(shared["models"], data)
    metrics = TrainingLoss(losses, data.sizes.to(losses)).metrics()
    if task.stage == "sketch":
        return SurveyAnswer(membership, point, Upload({}, {"sketch": sketch, "importance": data.weight}, metrics))
    count = Sum(None, {"count": 1 / data.weight})  # p_i / p_i: how many clients there are
    sums = {"moments": Sum(sketch, {"sketch": sketch}), "clients": count}
    return SurveyAnswer(membership, torch.zeros_like(point), Upload(sums, metrics=metrics))


def place_newcomers(placement: Placement, membership: Tensor, placed: Tensor, data: LocalData) -> Tensor:
    """Memberships (C, K), in which those who are not placed yet stand where a sketch of their own puts them."""
    new = (placed == 0).nonzero().flatten()
    if len(new) == 0:
        return membership
    with data.space.frame():
        sketch, _ = gradient_sketch(placement.network, data.select(new))
    return membership.index_copy(0, new, placement.start.memberships(sketch).to(membership))
