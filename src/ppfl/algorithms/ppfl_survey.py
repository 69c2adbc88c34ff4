"""The server's part of PPFL's survey: what clients are sent before the first round, and what their answers change."""

from __future__ import annotations

from typing import Any

import torch

from ..core.trees import Params, tree_map
from .contract import Problem, Rows, Total
from .local.survey import Survey, merge_survey
from .ppfl_settings import PPFLServer


def one_network(problem: Problem, models: Params) -> Params:
    """The first canonical model, with the common part; canonical leaves (1, ...)."""
    canonical = problem.population.canonical_names
    return {name: leaf[:1] if name in canonical else leaf for name, leaf in models.items()}


def send_survey(problem: Problem, server: PPFLServer) -> dict[str, Any]:
    """One network, since all canonical models start equal, and what the private start has found so far."""
    so_far = ("mean", "directions", "centres") if server.survey else ()
    return {"models": one_network(problem, server.shared)} | {n: getattr(server.survey, n) for n in so_far}


def merge_answers(
    problem: Problem, server: PPFLServer, task: Survey, totals: dict[str, Total], rows: Rows
) -> PPFLServer:
    """The server after a message of the survey."""
    found = merge_survey(problem, task, server.survey, totals, rows)
    if found.start is None and not found.survey:
        return server
    memberships, placement = server.memberships.clone(), server.placement
    if found.memberships is not None:
        memberships[problem.roster.positions(rows.ids)] = found.memberships
    if found.start is not None and placement:
        start = tree_map(lambda new, old: new.to(old), found.start, placement.start)
        placement = placement._replace(start=start)
    started = torch.full_like(server.started, found.start is not None)
    return PPFLServer(server.shared, memberships, started, found.survey, placement, server.optimizer)
