"""Training with its record: what is measured on the way, what is kept at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms import PPFL
from ..algorithms.contract import Algorithm, Personal, Problem
from ..algorithms.descent import LocalTraining
from ..core.affinity import Affinity
from ..core.errors import SettingError
from ..core.population import Population
from ..data import Federation
from ..data.federation import Split
from .chunks import ENGINES, Engine
from .evaluate import Evaluation, evaluate, objective_value, stationarity_value
from .output import Kept, OutputRule, draw_output_round, keep, output_probabilities
from .ranks import ALONE, Ranks
from .train import Report, State, begin, pose, train, whole
from .tune import with_chosen_lr

Record = dict[str, Any]


@dataclass(frozen=True)
class Watch:
    """What is measured while training, and which state is returned."""

    every: int = 1  # rounds between evaluations; the last round is always evaluated
    objective: bool = False  # F, on all training data
    stationarity: bool = False  # the measure of Section 3.2, on full gradients
    output: OutputRule = "last"
    smoothness: tuple[float, float] = (0.0, 0.0)  # L_1, L_2 for the random output rule

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SettingError(f"evaluation every {self.every} rounds; set every >= 1")


class Moment(NamedTuple):
    """The end of a round."""

    state: State
    kept: Kept
    record: Record


def follow(
    algorithm: Algorithm,
    problem: Problem,
    federation: Federation,
    engine: Engine,
    watch: Watch,
    state: State,
    kept: Kept | None = None,
) -> Iterator[Moment]:
    """Train from `state`, measuring; the same records wherever it is stopped and taken up."""
    drawn = _drawn_round(algorithm, problem, watch)
    for now, report in train(algorithm, problem, federation, engine, state):
        record: Record = {name: value for name, value in report._asdict().items() if name != "lost" or value}
        if now.round == problem.rounds or now.round % watch.every == 0:
            record |= measure(algorithm, problem, federation, now, watch, engine.ranks)
        kept = keep(watch.output, kept, now, _criterion(record), drawn)
        yield Moment(now, kept, record)


def measure(
    algorithm: Algorithm,
    problem: Problem,
    federation: Federation,
    state: State,
    watch: Watch,
    ranks: Ranks = ALONE,
) -> Record:
    """Scores of the personal models on the clients' own test data, and F and stationarity on request."""
    personal = algorithm.personal(state.server, state.clients)
    record: Record = {}
    splits: tuple[Split, ...] = ("test", "validation")
    for split in splits:
        if split in federation.splits:
            record |= _summary(evaluate(problem, personal, federation, split, ranks=ranks), split, problem)
    penalty = getattr(algorithm, "penalty", 0.0)
    needs_objective = watch.objective or (watch.output == "best" and "validation" not in federation.splits)
    if needs_objective:
        record["objective"] = objective_value(problem, personal, federation, penalty, ranks)
    if watch.stationarity and isinstance(algorithm, PPFL) and personal.memberships is not None:
        eta = algorithm.membership_lr
        record["stationarity"] = stationarity_value(
            problem, personal.shared, personal.memberships, federation, penalty, eta, ranks
        )
    return record


def _summary(result: Evaluation, split: str, problem: Problem) -> Record:
    loss = problem.population.loss
    prefix = "" if split == "test" else f"{split}_"

    def metric(score: float) -> float:
        return float(loss.metric(torch.tensor(score, dtype=torch.float64)))

    return {
        f"{prefix}{loss.metric_name}": metric(result.pooled),
        f"{prefix}{loss.metric_name}_mean": metric(result.mean),
        f"{prefix}{loss.metric_name}_sd": float(loss.metric(result.per_client).std(correction=0)),
        f"{prefix}{loss.metric_name}_worst_tenth": metric(result.worst_tenth(loss.metric_name == "accuracy")),
        f"{split}_loss": result.pooled_loss,
        f"{prefix}per_client": [
            round(value, 6) if samples > 0 else None
            for value, samples in zip(loss.metric(result.score).tolist(), result.samples.tolist(), strict=True)
        ],
    }


def _criterion(record: Record) -> float:
    """What "best" means: the loss on validation data where there are some, else the training objective."""
    loss = float(record["validation_loss"] if "validation_loss" in record else record.get("objective", math.inf))
    return math.inf if math.isnan(loss) else loss


def _drawn_round(algorithm: Algorithm, problem: Problem, watch: Watch) -> int:
    if watch.output != "random":
        return problem.rounds
    if not isinstance(algorithm, LocalTraining):
        raise SettingError(f"{algorithm.name} has no steps to draw a round by; use output = 'last' or 'best'")
    etas = [algorithm.step_size(t, problem.rounds) for t in range(problem.rounds)]
    rho = getattr(algorithm, "block_probability", 0.5)
    return draw_output_round(output_probabilities(etas, rho, watch.smoothness), problem.seed)


@dataclass(frozen=True)
class Fitted:
    """A trained population: who the clients are, and a model for each."""

    problem: Problem
    algorithm: Algorithm
    state: State
    history: list[Record] = field(repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        return self.problem.ids

    @property
    def personal(self) -> Personal:
        return self.algorithm.personal(self.state.server, self.state.clients)

    @property
    def memberships(self) -> Tensor:
        """(M, K), rows in the order of `ids`."""
        c = self.personal.memberships
        return torch.ones(len(self.ids), 1) if c is None else c

    def membership(self, client: str) -> Tensor:
        """(K,) of one client, by name."""
        return self.memberships[self._position(client)]

    def predict(self, client: str, x: Tensor, *, hard: bool = False) -> Tensor:
        """Mean predictions (B, ...) of a client's own model on x (B, ...)."""
        at = self._position(client)
        personal = self.personal
        shared = personal.shared
        if personal.own:
            shared = type(shared)(*({name: leaf[at] for name, leaf in part.items()} for part in shared))
        c = self.memberships[at : at + 1].to(self.problem.weights)
        return self.problem.population.predict(shared, c, x[None], hard=hard)[0]

    def evaluate(self, federation: Federation, split: Split = "test", *, hard: bool = False) -> Evaluation:
        """Every client's model on its own data."""
        return evaluate(self.problem, self.personal, federation, split, hard=hard)

    def _position(self, client: str) -> int:
        if client not in self.ids:
            raise SettingError(f"there is no client {client!r}; ids look like {self.ids[0]!r}")
        return self.ids.index(client)


def fit(
    population: Population,
    federation: Federation,
    algorithm: Algorithm | None = None,
    *,
    rounds: int = 100,
    affinity: Affinity | None = None,
    engine: str | Engine = "stacked",
    seed: int = 0,
    watch: Watch | None = None,
    on_round: Callable[[Report | Record], None] | None = None,
) -> Fitted:
    """Train `population` on `federation`, by PPFL unless another algorithm is given.

    >>> from ppfl.data import digits_federation
    >>> net = torch.nn.Linear(64, 10)
    >>> fitted = fit(Population(net, k=4), digits_federation(), rounds=3)
    >>> fitted.memberships.shape
    torch.Size([40, 4])
    """
    if rounds < 1:
        raise SettingError(f"rounds is {rounds}; train for at least one round")
    algorithm = PPFL() if algorithm is None else algorithm
    problem = pose(population, federation, affinity, rounds, seed)
    engine = engine_by_name(engine)
    algorithm = with_chosen_lr(algorithm, problem, federation, engine)
    history: list[Record] = []
    moment = None
    for moment in follow(algorithm, problem, federation, engine, watch or Watch(), begin(algorithm, problem)):
        history.append(moment.record)
        if on_round is not None:
            on_round(moment.record)
    assert moment is not None
    returned = whole(algorithm, moment.kept.state, federation, engine.ranks)
    return Fitted(problem, algorithm, returned, history)


def engine_by_name(engine: str | Engine) -> Engine:
    """An engine, from its name or as it is."""
    if not isinstance(engine, str):
        return engine
    if engine not in ENGINES:
        raise SettingError(f"there is no engine {engine!r}; use one of {', '.join(map(repr, ENGINES))}")
    return ENGINES[engine]()
