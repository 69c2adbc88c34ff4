"""The run of one seed: training, its record and its checkpoints, from the start or from where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..algorithms.contract import Method, Problem
from ..core.trees import Tree, tree_map
from ..data.federation import Federation
from ..errors import RankError, SettingError
from ..server import (
    InProcess,
    Kept,
    Measurement,
    Ranks,
    RoundEnd,
    ServerState,
    TorchRanks,
    TorchRun,
    Transport,
    begin,
    choose_lr,
    client_states,
    make_problem,
    measure,
    part_newcomers,
    score_newcomers,
    train_and_measure,
)  # fmt: skip
from ..server.loop import MAIN
from ..sites import Restore, Site
from ..sites.engines import balanced
from .checkpoint import Checkpoint, CheckpointNumbers, with_positions
from .experiment import Experiment
from .folder import RunFolder, describe_clients, method_of
from .provenance import describe_environment
from .start_from_run import load_start, start_on_every_rank

OnRoundEnd = Callable[[int, RoundEnd], None]  # the seed, and the end of a round

CHECKPOINT_SECONDS = 10.0


class Interrupted(KeyboardInterrupt):
    """Stopped by hand, with everything safe. No PPFLError: a script that skips bad settings must stop too."""

    def __init__(self, round: int, rounds: int, seed: int, out: Path) -> None:
        self.round, self.rounds, self.seed, self.out = round, rounds, seed, out
        super().__init__(
            f"stopped after round {round} of {rounds} (seed {seed}); "
            f"resume with run(experiment, {str(out)!r}, resume=True)"
        )


class SeedRun:
    """The run of one seed, into a folder of its own."""

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation,
        folder: RunFolder,
        ranks: Ranks,
        base: Path | None,
        start_method: Path | None,
    ) -> None:
        self.experiment, self.folder, self.ranks = experiment, folder, ranks
        (self.seed,) = experiment.seeds
        self.fingerprint = ranks.decide_on_first(lambda: federation.fingerprint)
        self.federation, self.newcomers = part_newcomers(federation, experiment.newcomers, self.seed)
        self.resumes = ranks.decide_on_first(lambda: folder.started)
        self.population = experiment.build_population(self.federation, self.seed, base)
        self.start = None
        if experiment.start is not None:
            find = folder.read_start if self.resumes else partial(load_start, experiment, base, start_method)
            self.start = start_on_every_rank(self.population, find, ranks)
        self.watch = experiment.watch.build(base)
        self.transport = self._connect()
        self.problem = self._make_problem()
        self.saved = 0  # the round of the last checkpoint
        self.method = self._choose()

    def _connect(self) -> Transport:
        """One site in this process, or one in each process."""
        federation, engine = self.federation, self.experiment.build_engine()
        metrics, on_disk = self.watch.known_metrics, self.experiment.states_on_disk
        if not isinstance(self.ranks, TorchRanks):
            return InProcess(Site(federation, self.population, engine, metrics=metrics, states_on_disk=on_disk))
        if self.ranks.size > federation.n_clients:
            raise SettingError(
                f"there are {self.ranks.size} processes but {federation.n_clients} clients; "
                f"start at most {federation.n_clients} processes"
            )
        mine = sorted(balanced(federation.train.sizes.tolist(), self.ranks.size)[self.ranks.rank])
        part = federation.select([federation.ids[at] for at in mine])
        importance = federation.importance[mine]
        site = Site(
            part, self.population, engine, name=f"rank {self.ranks.rank}", importance=importance, metrics=metrics,
            states_on_disk=on_disk,
        )  # fmt: skip
        return TorchRun(site, self.ranks, order=federation.ids)

    def _make_problem(self) -> Problem:
        experiment = self.experiment
        affinity = experiment.affinity.build(self.federation, experiment.method)
        return make_problem(self.population, self.transport, affinity, rounds=experiment.rounds, seed=self.seed)

    def _choose(self) -> Method:
        """The method, with what is left to it chosen once, before the first round."""
        if self.resumes:
            return method_of(self.ranks.decide_on_first(self.folder.read_experiment), self.folder.chosen_file)
        return choose_lr(self.experiment.method, self.problem, self.transport, self.experiment.dropout)

    def go(self, checkpoint_every: int | None, on_round_end: OnRoundEnd | None) -> None:
        """Train to the end, from the start or from the checkpoint."""
        timer, environment = _Timer(checkpoint_every), describe_environment()
        state, kept = self._start()
        measured: Measurement | None = None  # of the last state
        try:
            for end in train_and_measure(self.method, self.problem, self.transport, self.watch, state, kept):
                self._record(end, environment)
                state, kept, measured = end.state, end.kept, end.measured
                if self.ranks.decide_on_first(partial(self._is_due, timer, state.round)):
                    self._save(state, kept)
                    timer.restart()
                if on_round_end is not None:
                    on_round_end(self.seed, end)
            assert kept is not None, "an experiment has at least one round"
            self._save(state, kept)
            self._finish(state, kept, measured)
        except KeyboardInterrupt:
            if self.ranks.size == 1 and kept is not None:  # several would have to agree on a round first
                self._save(state, kept)
            raise Interrupted(self.saved, self.problem.rounds, self.seed, self.folder.path.parent) from None
        except RankError as lost:
            raise RankError(
                f"{lost}; round {self.saved} is safe in {self.folder.path}: start all of them again with --resume"
            ) from None

    def _start(self) -> tuple[ServerState, Kept | None]:
        """The first state, or the one in the first process's checkpoint, with the clients' states at the sites."""
        start = begin(self.method, self.problem, self.transport, dropout=self.experiment.dropout)
        if not self.resumes:
            return start, None
        found = self._checkpoint(start.server, self.method.init_client(self.population))
        if found is None:
            return start, None
        self.saved, exchange = found.state.round, found.state.exchange
        kept = Restore(MAIN, exchange, found.kept_clients, "kept")
        self.transport.ask([Restore(MAIN, exchange, found.clients), kept])
        return found.state, found.kept

    def _checkpoint(self, server: Tree, client: Tree) -> Checkpoint | None:
        """As the first process has it; the arguments show what states look like."""
        read: list[Checkpoint] = []

        def numbers() -> dict[str, Any] | None:
            found = self.folder.resume(server, client, describe_clients(self.federation, self.fingerprint))
            if found is None:
                return None
            read.append(found)
            return found.numbers.model_dump() | {"criterion": repr(found.kept.criterion)}

        said = self.ranks.decide_on_first(numbers)
        if said is None:
            return None
        if not isinstance(self.ranks, TorchRanks):
            return read[0]
        described = CheckpointNumbers.model_validate(said)
        tensors = read[0].tensors if read else described.template(server, client)
        return Checkpoint.of(described, tree_map(self.ranks.from_first, tensors), self.problem.roster)

    def _record(self, end: RoundEnd, environment: dict[str, str]) -> None:
        if self.ranks.first:
            if end.state.round == 1 and not self.resumes:  # a run that fails at once should leave nothing behind
                clients = describe_clients(self.federation, self.fingerprint)
                self.folder.begin(self.experiment, self.method, clients, environment, self.start)
            self.folder.log.append(end.record, None if end.measured is None else end.measured.memberships)

    def _is_due(self, timer: _Timer, round: int) -> bool:
        """Whether to write a checkpoint; processes that die cannot do so on their way out, so there is one early."""
        return timer.is_due(round) or (self.ranks.size > 1 and self.saved == 0)

    def _save(self, state: ServerState, kept: Kept) -> None:
        clients = client_states(self.transport, state)
        same = kept.state.round == state.round
        kept_clients = clients if same else client_states(self.transport, state, "kept")
        if self.ranks.first:
            self.folder.save_checkpoint(Checkpoint(state, clients, kept, kept_clients, self.problem.roster))
        self.saved = state.round

    def _finish(self, last: ServerState, kept: Kept, measured: Measurement | None) -> None:
        """Write the state to return, with its scores."""
        if kept.state.round == last.round:
            clients = client_states(self.transport, last)
        else:
            clients = client_states(self.transport, last, "kept")
            self.transport.ask([Restore(MAIN, kept.state.exchange, clients)])
            measured = None
        if measured is None:
            measured = measure(self.method, self.problem, self.transport, kept.state, self.watch)
        if self.ranks.first:
            rows = with_positions(clients.rows, self.problem.roster.ids)
            returned = {"server": kept.state.server, **rows}
            scores = measured.record | self._scores_of_newcomers(kept.state)
            self.folder.finish(returned, kept.state.round, measured.memberships, scores)

    def _scores_of_newcomers(self, state: ServerState) -> dict[str, float]:
        if self.newcomers is None or self.newcomers.test is None:
            return {}
        loss = self.population.loss
        transport = InProcess(Site(self.newcomers, self.population, self.experiment.build_engine()))
        found = score_newcomers(self.method, self.problem, state.server, transport)
        scores = {"newcomers_before": found.before, "newcomers": found.after}
        return {
            f"{name}_{loss.metric_name}": float(loss.metric(torch.tensor(score.pooled)))
            for name, score in scores.items()
        }


class _Timer:
    """When the next checkpoint is due."""

    def __init__(self, every: int | None) -> None:
        if every is not None and every < 1:
            raise SettingError(f"a checkpoint every {every} rounds; set checkpoint_every >= 1 or leave it out")
        self.every, self.asked = every, time.monotonic()
        self.due = self.asked + CHECKPOINT_SECONDS

    def is_due(self, round: int) -> bool:
        self.asked = time.monotonic()
        return round % self.every == 0 if self.every else self.asked >= self.due

    def restart(self) -> None:
        now = time.monotonic()
        # what takes long to write is written less often: a tenth of the time is enough
        self.due = now + max(CHECKPOINT_SECONDS, 10 * (now - self.asked))
