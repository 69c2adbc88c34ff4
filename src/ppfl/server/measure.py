"""Training with its record: what is measured on the way, and which state is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..algorithms.contract import Method, Plan, Problem
from ..errors import SettingError
from ..sites import Keep, Metrics, PredictionMetric, as_metrics
from .evaluation import evaluate, summary
from .loop import MAIN, ServerState, ask_clients, make_request, train
from .output import Kept, OutputRule, draw_output_round, keep, output_probabilities
from .transports import Transport

Record = dict[str, Any]


@dataclass(frozen=True)
class Watch:
    """What is measured while training, and which state is returned.

    >>> from torch import nn
    >>> from ppfl import FedAvg, Population, fit
    >>> from ppfl.data import digits_federation
    >>> population = Population(nn.Linear(64, 10), k=1)
    >>> fitted = fit(population, digits_federation(), FedAvg(lr=0.1), rounds=4, watch=Watch(every=2))
    >>> ["accuracy" in record for record in fitted.history]
    [False, True, False, True]
    """

    every: int = 1  # rounds between evaluations; the last round is always evaluated
    objective: bool = False  # F, on all training data
    stationarity: bool = False  # the measure of Section 3.2, on full gradients
    output: OutputRule = "last"
    smoothness: tuple[float, float] = (0.0, 0.0)  # L_1, L_2 for the random output rule
    report_clients: bool = True  # whether clients' own scores and memberships are reported; else sums alone
    share: float = 1.0  # of the clients that are evaluated, the same ones every time; below 1 sums alone are reported
    metrics: Metrics = ()  # of predictions: {"f1": f1}, functions (prediction, target) -> number or of torchmetrics

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", as_metrics(self.metrics))
        if self.every < 1:
            raise SettingError(f"evaluation every {self.every} rounds; set every >= 1")
        if not 0 < self.share <= 1:
            raise SettingError(f"share is {self.share}; it is the part of the clients to evaluate: set 0 < share <= 1")

    @property
    def known_metrics(self) -> dict[str, PredictionMetric]:
        """The metrics by name, as sites take them."""
        return as_metrics(self.metrics)


class RoundEnd(NamedTuple):
    """The end of a round."""

    state: ServerState
    kept: Kept
    record: Record  # the round's report, and what was measured
    measured: Measurement | None  # where the round was evaluated


class Measurement(NamedTuple):
    """What was measured of a state."""

    record: Record
    memberships: Tensor | None  # (M, K), where clients report them


def train_and_measure(
    method: Method,
    problem: Problem,
    transport: Transport,
    watch: Watch,
    state: ServerState,
    kept: Kept | None = None,
    before_measuring: Callable[[ServerState], None] | None = None,
) -> Iterator[RoundEnd]:
    """Train from `state`, measuring; the same records wherever it is stopped and resumed."""
    drawn = _drawn_round(method, problem, watch)
    for now, report in train(method, problem, transport, state):
        record: Record = {k: v for k, v in report._asdict().items() if v or k not in ("lost", "refused", "refusals")}
        measured = None
        if now.round == problem.rounds or now.round % watch.every == 0:
            if before_measuring is not None:
                before_measuring(now)
            measured = measure(method, problem, transport, now, watch)
            record |= measured.record
        chosen = keep(watch.output, kept, now, _criterion(record), drawn)
        if chosen is not kept and watch.output != "last":
            transport.ask([Keep(MAIN)])
        kept = chosen
        yield RoundEnd(now, kept, record, measured)


def measure(method: Method, problem: Problem, transport: Transport, state: ServerState, watch: Watch) -> Measurement:
    """Scores of the personal models on the clients' own test data, and F and stationarity on request."""
    splits = tuple(split for split in ("test", "validation") if split in problem.splits)
    needs_objective = watch.objective or (watch.output == "best" and "validation" not in splits)
    asked = (*splits, "train") if needs_objective else splits
    found = evaluate(
        method, problem, transport, state.server, asked,
        per_client=watch.report_clients, metrics=watch.known_metrics, share=watch.share,
    )  # fmt: skip
    record: Record = {}
    for split in splits:
        record |= summary(found.splits[split], split, problem.population.loss)
    if needs_objective:
        # F of Eq. (9)
        record["objective"] = found.splits["train"].loss.weighted + method.penalty_value(problem, state.server)
    if watch.stationarity and (task := method.stationarity_task(problem)) is not None:
        plan = Plan(None, task)
        request = make_request(method, problem, state.server, plan, state.round, state.exchange, keep_states=False)
        reply = ask_clients(transport, request)
        sums = {name: float(v) for name, v in reply.metrics.items() if v.dim() == 0}
        record["stationarity"] = method.stationarity(reply.totals, sums)
    return Measurement(record, found.memberships)


def _criterion(record: Record) -> float:
    """What "best" means: the loss on validation data where there are some, else the training objective."""
    loss = float(record["validation_loss"] if "validation_loss" in record else record.get("objective", math.inf))
    return math.inf if math.isnan(loss) else loss


def _drawn_round(method: Method, problem: Problem, watch: Watch) -> int:
    if watch.output != "random":
        return problem.rounds
    etas = [method.local.step_size(t, problem.rounds) for t in range(problem.rounds)]
    rho = getattr(method.local, "block_probability", 0.5)  # of the theta block
    return draw_output_round(output_probabilities(etas, rho, watch.smoothness), problem.seed)
