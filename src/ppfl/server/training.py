"""Training from the first round to what is returned. Every door makes one `Training`: `fit`, runs of experiments, runs
over sites, tuning and estimators. Nothing else puts these parts together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ..algorithms.contract import Method, Plan, Problem, Roster
from ..core.affinity import Affinity, nothing
from ..core.draws import uniform
from ..core.ids import ClientIds
from ..core.population import Population
from ..core.registry import find_function
from ..core.settings import Count, NonNegative, Settings
from ..core.trees import Tree
from ..data.sample_spec import SampleSpec
from ..errors import SettingError
from ..io.codec import message
from ..sites import Engine, Keep, Restore, SavedStates, UseKept, as_metrics
from .evaluation import evaluate, summary
from .loop import (
    MAIN,
    ServerState,
    ask_clients,
    begin,
    client_states,
    first_server,
    make_problem,
    make_request,
    next_request,
    run_round,
    setup_sites,
)
from .newcomers import replace_rows
from .step_size import choose_lr
from .transports import Transport

Record = dict[str, Any]
OutputRule = Literal["last", "best", "random"]
FindAffinity = Callable[[Roster], Affinity | None]


class Watch(Settings):
    """What is measured while training, and which state is returned; in experiment files it is `[watch]`.

    >>> from torch import nn
    >>> from ppfl import FedAvg, Population, fit
    >>> from ppfl.data import digits_federation
    >>> population = Population(nn.Linear(64, 10), k=1)
    >>> fitted = fit(population, digits_federation(), FedAvg(lr=0.1), rounds=4, watch=Watch(every=2))
    >>> ["accuracy" in record for record in fitted.history]
    [False, True, False, True]
    """

    every: Count = 1  # rounds between evaluations; the last round is always evaluated
    objective: bool = False  # F, on all training data
    stationarity: bool = False  # the measure of Section 3.2, on full gradients
    output: OutputRule = "last"
    smoothness: tuple[NonNegative, NonNegative] = (0.0, 0.0)  # L_1, L_2 for the random output rule
    report_clients: bool = True  # whether clients' own scores and memberships are reported; else sums alone
    # of the clients that are evaluated, the same ones every time; below 1 sums alone are reported
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    # of predictions: {"f1": f1}, functions (prediction, target) -> number or of torchmetrics; or names of such
    # functions, "module:function", as files have them
    metrics: Any = Field(default_factory=dict)

    @field_validator("metrics")
    @classmethod
    def _are_names_or_functions(cls, given: Any) -> Any:
        if isinstance(given, list | tuple) and given and all(isinstance(metric, str) for metric in given):
            if odd := [name for name in given if ":" not in name]:
                raise ValueError(f'{odd[0]!r} names no function; write "module:function"')
            return tuple(given)
        return as_metrics(given)

    def with_functions(self, base: Path | None = None) -> Watch:
        """A copy with functions in the place of their names. base: the folder in which modules are looked for first.

        >>> list(Watch(metrics=["torch.nn.functional:l1_loss"]).with_functions().metrics)
        ['l1_loss']
        """
        if isinstance(self.metrics, dict):
            return self
        found = as_metrics({name.rpartition(":")[2]: _find_metric(name, base) for name in self.metrics})
        return self.model_copy(update={"metrics": found})


def _find_metric(name: str, base: Path | None) -> Any:
    """A function, an object of torchmetrics, or an object of a class that needs no arguments."""
    found = find_function(name, base, "watch")
    if not isinstance(found, type):
        return found
    try:
        return found()
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"metric {name!r} is a class that needs arguments ({str(error).splitlines()[0]}); make an object of it in "
            f"a module of yours, and name that"
        ) from error


@message
class Kept(NamedTuple):
    """The state to return, and the criterion by which it was kept (smaller is better)."""

    state: ServerState
    criterion: float


class Measurement(NamedTuple):
    """What was measured of a state."""

    record: Record
    memberships: Tensor | None  # (M, K), where clients report them


class RoundEnd(NamedTuple):
    """The end of a round."""

    state: ServerState
    kept: Kept
    record: Record  # the round's report, and what was measured
    measured: Measurement | None  # where the round was evaluated


@message
class Checkpoint(NamedTuple):
    """Where training can be resumed: after a round that is recorded in full."""

    state: ServerState
    clients: SavedStates
    kept: Kept  # the state to return so far
    kept_clients: SavedStates


@dataclass(frozen=True)
class Trained:
    """What training leaves behind."""

    problem: Problem
    method: Method
    state: ServerState
    ids: ClientIds = field(repr=False)  # of all known clients: those that were trained with, and those that came later
    clients: SavedStates = field(repr=False)
    spec: SampleSpec = field(repr=False)  # what a sample is
    engine: Engine = field(repr=False)
    history: list[Record] = field(repr=False)


class Training:
    """Training of a population by a method, over the sites of a transport.

    First one of `begin`, `resume` and `go_on`, then `rounds` until it ends, then `trained`, or `finish` for the scores
    of what is returned.
    """

    state: ServerState  # after the last round
    end: RoundEnd  # of the last round

    def __init__(
        self,
        transport: Transport,
        population: Population,
        method: Method,
        *,
        rounds: int,
        seed: int = 0,
        affinity: Affinity | FindAffinity | None = None,
        watch: Watch | None = None,
        dropout: float = 0.0,
    ) -> None:
        """affinity: between the clients, or a function that finds it, which is called again when sites join."""
        self.transport, self.method, self.dropout = transport, method, dropout
        self.watch = (watch or Watch()).with_functions()
        self._affinity = affinity
        self.problem = make_problem(population, transport, self._find_affinity(), rounds=rounds, seed=seed)
        self.kept: Kept | None = None
        self.measured: Measurement | None = None  # of `state`
        self.history: list[Record] = []
        self._before: Trained | None = None

    # ------------------------------------------------------------------ where it starts

    def begin(self) -> Self:
        """From the first round on, with an lr found by trials where the method says "auto"."""
        self.method = choose_lr(self.method, self.problem, self.transport, self.dropout)
        self.state = begin(self.method, self.problem, self.transport, dropout=self.dropout)
        return self

    def resume(self, saved: Checkpoint) -> Self:
        """From a checkpoint of the same training on."""
        self.method.check(self.problem)
        setup_sites(self.method, self.problem, self.transport, dropout=self.dropout)
        now = Restore(MAIN, saved.state.exchange, saved.clients)
        self.transport.ask([now, Restore(MAIN, saved.state.exchange, saved.kept_clients, "kept")])
        self.state, self.kept = saved.state, saved.kept
        return self

    def go_on(self, trained: Trained) -> Self:
        """From what other training left behind, for so many more rounds. Rounds are counted on, so that no draw is
        repeated. The clients of the transport are known; they keep their states."""
        before = trained.state
        self.problem = self.problem._replace(rounds=before.round + self.problem.rounds)
        self.method.check(self.problem)
        setup_sites(self.method, self.problem, self.transport, dropout=self.dropout)
        self.transport.ask([Restore(MAIN, before.exchange, trained.clients)])
        server = self.method.move_server(before.server, trained.problem.roster, self.problem.roster)
        self.state, self.history, self._before = before._replace(server=server), [*trained.history], trained
        return self

    @property
    def first_states(self) -> tuple[Tree, Tree]:
        """What the server and a client begin with; saved states look like them."""
        return first_server(self.method, self.problem), self.method.init_client(self.problem.population)

    # ------------------------------------------------------------------ rounds

    def rounds(self) -> Iterator[RoundEnd]:
        """To the last round; the same records wherever it is stopped and resumed."""
        watch, problem = self.watch, self.problem
        drawn = self._drawn_round()
        warned: set[str] = set()
        while self.state.round < problem.rounds:
            problem = self.problem  # sites may have joined
            state, report = run_round(self.method, problem, self.transport, self.state, warned)
            record: Record = {
                name: value
                for name, value in report._asdict().items()
                if value or name not in ("lost", "refused", "refusals")
            }
            measured = None
            if state.round == problem.rounds or state.round % watch.every == 0:
                # where client states of another round may be returned, training waits until it is known which
                if watch.output == "last" and not watch.stationarity:
                    self.transport.look_ahead(partial(next_request, self.method, problem, state))
                measured = measure(self.method, problem, self.transport, state, watch)
                record |= measured.record
            kept = _keep(watch.output, self.kept, state, _criterion(record), drawn)
            if kept is not self.kept and watch.output != "last":
                self.transport.ask([Keep(MAIN)])
            self.state, self.kept, self.measured = state, kept, measured
            self.history.append(record)
            self.end = RoundEnd(state, kept, record, measured)
            yield self.end

    def add_clients(self) -> None:
        """Go on with the clients that the transport has now; new ones begin as every client does."""
        before, after = self.problem.roster, self.transport.roster
        affinity = (self._find_affinity() or nothing(after.ids)).check(after.ids).to(self.problem.device)
        self.problem = self.problem._replace(roster=after, affinity=affinity)

        def moved(state: ServerState) -> ServerState:
            return state._replace(server=self.method.move_server(state.server, before, after))

        self.state = moved(self.state)
        if self.kept is not None:
            self.kept = self.kept._replace(state=moved(self.kept.state))
            self.end = self.end._replace(state=self.state, kept=self.kept)

    # ------------------------------------------------------------------ its result

    def checkpoint(self, end: RoundEnd) -> Checkpoint:
        """From which training can be resumed after this round. Work of a later round is undone at the sites."""
        clients = kept_clients = client_states(self.transport, end.state)
        if end.kept.state.round != end.state.round:
            kept_clients = client_states(self.transport, end.state, "kept")
        return Checkpoint(end.state, clients, end.kept, kept_clients)

    def finish(self) -> Measurement:
        """The scores of the state that is returned, which `state` and the clients at the sites are at from now on."""
        if self.kept is not None and self.kept.state.round != self.state.round:
            self.transport.ask([UseKept(MAIN, self.kept.state.exchange)])
            self.state, self.measured = self.kept.state, None
        if self.measured is None:
            self.measured = measure(self.method, self.problem, self.transport, self.state, self.watch)
        return self.measured

    def trained(self, spec: SampleSpec, engine: Engine) -> Trained:
        """The result: the state to return, and the states of all clients. spec: what a sample is."""
        returned = self.state if self.kept is None else self.kept.state
        snapshot: Literal["now", "kept"] = "now" if returned.round == self.state.round else "kept"
        clients, ids = client_states(self.transport, self.state, snapshot), self.problem.roster.ids
        if self._before is not None:  # clients that had no part in it stay as they were
            roster, known = self.problem.roster, self._before.ids
            clients = clients._replace(rows=replace_rows(self._before.clients.rows, ids, clients.rows))
            ids = (*ids, *(client for client in known if client not in roster.position))
        return Trained(self.problem, self.method, returned, ids, clients, spec, engine, self.history)

    # ------------------------------------------------------------------ parts

    def _find_affinity(self) -> Affinity | None:
        return self._affinity(self.transport.roster) if callable(self._affinity) else self._affinity

    def _drawn_round(self) -> int:
        problem, local = self.problem, self.method.local
        if self.watch.output != "random":
            return problem.rounds
        etas = [local.step_size(t, problem.rounds) for t in range(problem.rounds)]
        rho = getattr(local, "block_probability", 0.5)  # of the theta block
        return draw_output_round(output_probabilities(etas, rho, self.watch.smoothness), problem.seed)


def measure(method: Method, problem: Problem, transport: Transport, state: ServerState, watch: Watch) -> Measurement:
    """Scores of the personal models on the clients' own test data, and F and stationarity on request."""
    splits = tuple(split for split in ("test", "validation") if split in problem.splits)
    needs_objective = watch.objective or (watch.output == "best" and "validation" not in splits)
    asked = (*splits, "train") if needs_objective else splits
    found = evaluate(
        method, problem, transport, state.server, asked,
        per_client=watch.report_clients, metrics=watch.metrics, share=watch.share,
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


# ---------------------------------------------------------------------- which state is returned


def output_probabilities(
    etas: Sequence[float], theta_probability: float, smoothness: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Eq. (10): P(t' = t) ∝ eta_t min_h rho_h (1 - gamma_h L_h), gamma_1 = 4 eta_t, gamma_2 = eta_t / 2.

    With unknown constants (0, 0) a round counts as its step does.
    """
    eta = torch.tensor(etas, dtype=torch.float64)
    theta = theta_probability * (1 - 4 * eta * smoothness[0])
    memberships = (1 - theta_probability) * (1 - eta / 2 * smoothness[1])
    weight = (eta * torch.minimum(theta, memberships)).clamp_min(0)
    if float(weight.sum()) == 0:
        raise SettingError(
            f"no round can be drawn: steps up to {float(eta.max()):g} exceed Theorem 2's bounds for smoothness "
            f"{smoothness}; use smaller steps or output = 'last'"
        )
    return weight / weight.sum()


def draw_output_round(probabilities: Tensor, seed: int) -> int:
    """t' in 1..T, drawn before the run so that no trajectory has to be stored."""
    at = torch.searchsorted(probabilities.cumsum(0), float(uniform(seed, "output")), right=True)
    return int(at.clamp_max(len(probabilities) - 1)) + 1


def _keep(rule: OutputRule, kept: Kept | None, state: ServerState, criterion: float, drawn_round: int) -> Kept:
    """The kept state after one more round."""
    chosen = {
        "last": True,
        "best": kept is None or criterion < kept.criterion,
        "random": kept is None or state.round == drawn_round,
    }[rule]
    return Kept(state, criterion) if chosen or kept is None else kept


def _criterion(record: Record) -> float:
    """What "best" means: the loss on validation data where there are some, else the training objective."""
    loss = float(record["validation_loss"] if "validation_loss" in record else record.get("objective", math.inf))
    return math.inf if math.isnan(loss) else loss
