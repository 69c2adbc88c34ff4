"""Running an experiment: one folder per seed, safe to stop at any instant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..algorithms.contract import Method, Problem, Rows
from ..core.errors import CheckpointError, RankError, SettingError
from ..core.trees import named_leaves, tree_map
from ..core.workspace import keep_freed_memory
from ..data.federation import Federation
from ..server import (
    DivergedError,
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
    launched_ranks,
    make_problem,
    measure,
    part_newcomers,
    score_newcomers,
    train_and_measure,
)  # fmt: skip
from ..server.loop import MAIN
from ..sites import Restore, Site
from ..sites.engines import balanced
from .experiment import Experiment
from .folder import Checkpoint, CheckpointNumbers, RunFolder, describe_clients, method_of
from .lock import locked, remove_stale_lock
from .provenance import describe_environment
from .record import RunRecord, load_run
from .start_from_run import load_start, start_on_every_rank

OnRoundEnd = Callable[[int, RoundEnd], None]  # the seed, and the end of a round
Reader = Callable[[Experiment, Path | None], Federation]  # relative paths start at the second

CHECKPOINT_SECONDS = 10.0


class Interrupted(KeyboardInterrupt):
    """Stopped by hand, with everything safe. No PPFLError: a script that skips bad settings must stop too."""

    def __init__(self, round: int, rounds: int, seed: int, out: Path) -> None:
        self.round, self.rounds, self.seed, self.out = round, rounds, seed, out
        super().__init__(
            f"stopped after round {round} of {rounds} (seed {seed}); "
            f"resume with run(experiment, {str(out)!r}, resume=True)"
        )


def read_data(experiment: Experiment, base: Path | None) -> Federation:
    """From its files, or drawn anew."""
    return experiment.build_data(base)


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    base: Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    on_round_end: OnRoundEnd | None = None,
    read: Reader = read_data,
    start_method: Path | None = None,
) -> list[RunRecord]:
    """Run every seed into `out`/seed-<seed>. Relative paths and factories' modules start at `base`.

    start_method: in a comparison, the folder of the method that `[start]` names.

    A checkpoint is written every `checkpoint_every` rounds, or else about every ten seconds. With `resume`, seeds
    that are finished are left alone, others go on from their checkpoint and end with the same bits as a run never
    stopped.

    In processes that torchrun started, each works on clients of its own, and the first one writes: it alone gets the
    records. A checkpoint holds every client's state, so a run may go on with another number of processes.
    """
    keep_freed_memory()
    out, ranks = Path(out), launched_ranks(experiment.device)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    with _usable(out), ExitStack() as locks:
        todo = ranks.decide_on_first(partial(_claim, experiment, folders, locks, resume=resume))
        if todo:
            federation = read(experiment, base).to(experiment.device)
        for seed in todo:
            one = _Run(experiment.for_seed(seed), federation, folders[seed], ranks, base, start_method)
            one.go(checkpoint_every, on_round_end)
        return [load_run(folder.path) for folder in folders.values()] if ranks.first else []


@contextmanager
def _usable(out: Path) -> Iterator[None]:
    """Errors of the file system, as one that names what could not be used."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or out} cannot be used ({error.strerror or error}); choose another --out"
        ) from error


def _claim(experiment: Experiment, folders: dict[int, RunFolder], locks: ExitStack, *, resume: bool) -> list[int]:
    """The seeds that are not finished, each locked against other processes."""
    for seed, folder in folders.items():
        with _usable(folder.path):
            if folder.finished:
                remove_stale_lock(folder.path)
            else:
                locks.enter_context(locked(folder.path))
            folder.claim(experiment.for_seed(seed), resume=resume)
    return [seed for seed, folder in folders.items() if not folder.finished]


class _Run:
    """One seed."""

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
            part, self.population, engine, importance=importance, metrics=metrics, states_on_disk=on_disk
        )  # fmt: skip
        return TorchRun(site, self.ranks, order=federation.ids)

    def _make_problem(self) -> Problem:
        experiment = self.experiment
        affinity = experiment.affinity.build(self.federation, experiment.algorithm)
        return make_problem(self.population, self.transport, affinity, rounds=experiment.rounds, seed=self.seed)

    def _choose(self) -> Method:
        """The method, with what is left to it chosen once, before the first round."""
        if self.resumes:
            return method_of(self.ranks.decide_on_first(self.folder.read_experiment), self.folder.chosen_file)
        return choose_lr(self.experiment.algorithm, self.problem, self.transport, self.experiment.dropout)

    def go(self, checkpoint_every: int | None, on_round_end: OnRoundEnd | None) -> None:
        """Train to the end, from the start or from the checkpoint."""
        timer, environment = _Timer(checkpoint_every), describe_environment()
        state, kept = self._start()
        measured: Measurement | None = None  # of the last state
        try:
            for end in train_and_measure(self.method, self.problem, self.transport, self.watch, state, kept):
                _refuse_divergence(end.state)
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
        fresh = {"server": start.server, "clients": client_states(self.transport, start).values}
        found = self._checkpoint(fresh)
        if found is None:
            return start, None
        self.saved = found.state.round
        ids, exchange = self.problem.roster.ids, found.state.exchange
        kept = Restore(MAIN, exchange, Rows(ids, found.kept_clients), "kept")
        self.transport.ask([Restore(MAIN, exchange, Rows(ids, found.clients)), kept])
        return found.state, found.kept

    def _checkpoint(self, fresh: dict[str, Any]) -> Checkpoint | None:
        """As the first process has it."""
        read: list[Checkpoint] = []

        def numbers() -> dict[str, Any] | None:
            found = self.folder.resume(fresh, describe_clients(self.federation, self.fingerprint))
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
        parts = ["state", "kept"] if described.has_kept else ["state"]
        tensors = read[0].tensors if read else dict.fromkeys(parts, fresh)
        return Checkpoint.of(described, tree_map(self.ranks.from_first, tensors))

    def _record(self, end: RoundEnd, environment: dict[str, str]) -> None:
        if self.ranks.first:
            if end.state.round == 1 and not self.resumes:  # a run that fails at once should leave nothing behind
                clients = describe_clients(self.federation, self.fingerprint)
                self.folder.begin(self.experiment, self.method, clients, environment, self.start)
            self.folder.append(end.record, None if end.measured is None else end.measured.memberships)

    def _is_due(self, timer: _Timer, round: int) -> bool:
        """Whether to write a checkpoint; processes that die cannot do so on their way out, so there is one early."""
        return timer.is_due(round) or (self.ranks.size > 1 and self.saved == 0)

    def _save(self, state: ServerState, kept: Kept) -> None:
        clients = client_states(self.transport, state).values
        same = kept.state.round == state.round
        kept_clients = clients if same else client_states(self.transport, state, "kept").values
        if self.ranks.first:
            self.folder.save_checkpoint(Checkpoint(state, clients, kept, kept_clients))
        self.saved = state.round

    def _finish(self, last: ServerState, kept: Kept, measured: Measurement | None) -> None:
        """Write the state to return, with its scores."""
        if kept.state.round == last.round:
            clients = client_states(self.transport, last).values
        else:
            clients = client_states(self.transport, last, "kept").values
            self.transport.ask([Restore(MAIN, kept.state.exchange, Rows(self.problem.roster.ids, clients))])
            measured = None
        if measured is None:
            measured = measure(self.method, self.problem, self.transport, kept.state, self.watch)
        if self.ranks.first:
            returned = {"server": kept.state.server, "clients": clients}
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


def _refuse_divergence(state: ServerState) -> None:
    """Parameters that are not finite never come back, and a checkpoint of them is worth nothing."""
    for name, leaf in named_leaves(state.server).items():
        if not bool(leaf.isfinite().all()):
            raise DivergedError(
                f"training diverged: after round {state.round} {name} is not finite; use a smaller lr or membership_lr"
            )
