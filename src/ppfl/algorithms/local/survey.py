"""The survey before the first round, in which PPFL finds where memberships start (`start.py` has the mathematics).

Open: one message, in which every client sends its sketch as a row ("sketch"). Private: sums over clients alone, first
their moments ("moments"), then steps of k-means ("assign"), then clients place themselves among the corners ("place").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.backends import Backend
from ..contract import Problem, Rows, Sum, Total, Upload, message
from .batches import LocalData
from .sgd import TrainingLoss
from .start import PrivateStart, gradient_sketch, memberships_from_sketches, nearest_cells, start_memberships

LAST_STAGES = ("sketch", "place")  # those that end the round


@message
class Survey(NamedTuple):
    """The task of a client in a survey."""

    stage: str
    seed: int


# ---------------------------------------------------------------------- server


class SurveyResult(NamedTuple):
    """What the server knows after a message of the survey."""

    survey: Any = {}  # a PrivateStart that is not finished
    memberships: Tensor | None = None  # of those who came back
    done: bool = False


def next_stage(survey: Any, *, private: bool) -> str:
    """What to ask next."""
    if not private:
        return "sketch"
    if not survey:
        return "moments"
    return "assign" if survey.corners is None else "place"


def merge_survey(problem: Problem, task: Survey, survey: Any, totals: dict[str, Total], rows: Rows) -> SurveyResult:
    """After a message; the survey begins again where fewer than K clients came back."""
    k = problem.population.k
    if task.stage == "sketch":
        if rows.n_clients < k:
            return SurveyResult()
        ids = problem.roster.ids if rows.ids is None else rows.ids
        sketches, weights = rows.values["sketch"], rows.values["importance"]
        found = memberships_from_sketches(sketches, weights, ids, k, problem.seed)
        return SurveyResult(memberships=found, done=True)
    if task.stage == "place":
        return SurveyResult(done=True)
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
        start = PrivateStart(shared["mean"], shared["directions"], shared["centres"])
        if bool((point == 0).all(1).any()):  # the first step for some of them
            sketch, _ = gradient_sketch(backend, shared["models"], data, task.seed)
            point = start.points(sketch)
        values = {"point": point, "square": point.square().sum(1)}
        return SurveyAnswer(membership, point, Upload({"cells": Sum(nearest_cells(point, start.centres), values)}))
    sketch, losses = gradient_sketch(backend, shared["models"], data, task.seed)
    metrics = TrainingLoss(losses, data.sizes.to(losses)).metrics()
    if task.stage == "sketch":
        return SurveyAnswer(membership, point, Upload({}, {"sketch": sketch, "importance": data.weight}, metrics))
    count = Sum(None, {"count": 1 / data.weight})  # p_i / p_i: how many clients there are
    sums = {"moments": Sum(sketch, {"sketch": sketch}), "clients": count}
    return SurveyAnswer(membership, torch.zeros_like(point), Upload(sums, metrics=metrics))
