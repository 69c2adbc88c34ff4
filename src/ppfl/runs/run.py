"""Running an experiment: one folder per seed, safe to stop at any instant."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..algorithms.contract import Method, Roster
from ..core.affinity import Affinity
from ..core.population import Population
from ..data.federation import Federation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, RankError, SettingError
from ..io.lock import locked
from ..server import (
    ALONE,
    Checkpoint,
    Ranks,
    RoundEnd,
    ServerState,
    Training,
    Transport,
    client_states,
    connect,
    launched_ranks,
    part_newcomers,
    score_newcomers,
)  # fmt: skip
from ..sites import PredictionMetric
from .experiment import Experiment
from .folder import Result, RunFolder, describe_clients, method_that_ran
from .provenance import describe_environment
from .record import RunRecord, load_run
from .start import load_start, start_population_from
from .states import pack, unpack

CHECKPOINT_SECONDS = 10.0
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

Record = dict[str, Any]
OnRoundEnd = Callable[[int, RoundEnd], None]  # the seed, and the end of a round
Reader = Callable[[Experiment, Path | None], Federation]  # relative paths start at the second


class Interrupted(KeyboardInterrupt):
    """Stopped by hand, with everything safe. No PPFLError: a script that skips bad settings must stop too."""

    def __init__(self, round: int, rounds: int, seed: int, out: Path) -> None:
        self.round, self.rounds, self.seed, self.out = round, rounds, seed, out
        super().__init__(
            f"stopped after round {round} of {rounds} (seed {seed}); "
            f"resume with run(experiment, {str(out)!r}, resume=True)"
        )


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    base: Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    on_round_end: OnRoundEnd | None = None,
    read: Reader = Experiment.build_data,
    start_method: Path | None = None,
) -> list[RunRecord]:
    """Runs every seed of an experiment into `out`/seed-<seed>.

    In processes that torchrun started, each works on clients of its own, and the first one writes: it alone gets the
    records. A checkpoint holds every client's state, so a run may go on with another number of processes.

    Args:
        experiment: What is run.
        out: The folder for the folders of all seeds.
        base: Where relative paths start, and where modules that the experiment names are looked for first.
        resume: Whether to go on: finished seeds are left alone, others go on from their checkpoint and end with the
            same bits as a run never stopped.
        checkpoint_every: Rounds between checkpoints; about every ten seconds by default.
        on_round_end: Called with the seed and the end of each round.
        read: Gives the data of the experiment.
        start_method: In a comparison, the folder of the method that `[start]` names.

    Returns:
        What each seed left behind.

    Raises:
        CheckpointError: If a folder is in use, damaged, or of another experiment.
        Interrupted: After Ctrl-C, when everything is safe.
    """
    keep_freed_memory()
    out, ranks = Path(out), launched_ranks(experiment.device)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    with _usable(out), ExitStack() as locks:
        todo = ranks.from_first(partial(claim, experiment, folders, locks, resume=resume))
        if todo:
            federation = read(experiment, base).to(experiment.device)
        for seed in todo:
            one = experiment.for_seed(seed)
            clients = LocalClients(one, federation, ranks, base)
            SeedRun(one, clients, folders[seed], ranks, base, start_method).go(checkpoint_every, on_round_end)
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


def claim(experiment: Experiment, folders: dict[int, RunFolder], locks: ExitStack, *, resume: bool) -> list[int]:
    """The seeds that are not finished, each locked against other processes."""
    for seed, folder in folders.items():
        if not folder.finished:
            locks.enter_context(locked(folder.path))
        folder.claim(experiment.for_seed(seed), resume=resume)
    return [seed for seed, folder in folders.items() if not folder.finished]


class Clients(Protocol):
    """The clients of one seed's run, wherever they are: in this process, in those of torchrun, or at sites."""

    spec: SampleSpec  # what a sample of theirs is

    def describe(self) -> Record:
        """What the run folder says of them."""

    def connect(self, population: Population, metrics: Mapping[str, PredictionMetric]) -> Transport:
        """The way to them."""

    def affinity(self, roster: Roster) -> Affinity | None:
        """Who resembles whom."""

    def notes(self) -> Record:
        """What is to be recorded of the last round, besides what the server knows."""

    def safe(self, state: ServerState) -> None:
        """This state is in a checkpoint."""

    def changed(self) -> bool:
        """Between two rounds: whether the transport's roster is another one now."""

    def last_scores(self, training: Training) -> Record:
        """What is to be recorded of the state that is returned, besides its scores."""


class LocalClients:
    """Clients whose data this process reads, and those of torchrun."""

    def __init__(self, experiment: Experiment, federation: Federation, ranks: Ranks, base: Path | None) -> None:
        self.experiment, self.ranks, self.base = experiment, ranks, base
        self.fingerprint = ranks.from_first(lambda: federation.fingerprint)
        self.federation, self.newcomers = part_newcomers(federation, experiment.newcomers, experiment.seeds[0])
        self.spec = SampleSpec.of(self.federation)

    def describe(self) -> Record:
        return describe_clients(self.federation, self.fingerprint)

    def connect(self, population: Population, metrics: Mapping[str, PredictionMetric]) -> Transport:
        on_disk = self.experiment.states_on_disk
        return connect(
            self.federation, population, self.experiment.build_engine(), metrics=metrics, states_on_disk=on_disk,
            ranks=self.ranks,
        )  # fmt: skip

    def affinity(self, roster: Roster) -> Affinity | None:
        return self.experiment.build_affinity(self.federation, self.base)

    def notes(self) -> Record:
        return {}

    def safe(self, state: ServerState) -> None:
        pass

    def changed(self) -> bool:
        return False

    def last_scores(self, training: Training) -> Record:
        """Those of newcomers."""
        if self.newcomers is None or self.newcomers.test is None:
            return {}
        population = training.problem.population
        transport = connect(self.newcomers, population, self.experiment.build_engine())
        found = score_newcomers(training.method, training.problem, training.state.server, transport)
        scores = {"newcomers_before": found.before, "newcomers": found.after}
        return {f"{name}_{population.loss.metric_name}": score.pooled for name, score in scores.items()}


class SeedRun:
    """The run of one seed, into a folder of its own, from the start or from where it was stopped."""

    def __init__(
        self,
        experiment: Experiment,
        clients: Clients,
        folder: RunFolder,
        ranks: Ranks = ALONE,
        base: Path | None = None,
        start_method: Path | None = None,
    ) -> None:
        self.experiment, self.clients, self.folder, self.ranks = experiment, clients, folder, ranks
        (self.seed,) = experiment.seeds
        self.resumes = ranks.from_first(lambda: folder.started)
        self.population = experiment.build_population(clients.spec, self.seed, base)
        self.start = None
        if experiment.start is not None:
            find = folder.read_start if self.resumes else partial(load_start, experiment, base, start_method)
            self.start = ranks.from_first(find)
            assert self.start is not None, "the experiment has a start"
            start_population_from(self.population, self.start)
        watch = experiment.watch.with_functions(base)
        self.training = Training(
            clients.connect(self.population, watch.metrics), self.population, self._method(),
            rounds=experiment.rounds, seed=self.seed, affinity=clients.affinity, watch=watch,
            dropout=experiment.dropout,
        )  # fmt: skip
        self.saved = 0  # the round of the last checkpoint

    def _method(self) -> Method:
        """As the experiment has it; a run that is resumed has chosen what was left to it."""
        if not self.resumes:
            return self.experiment.method
        return method_that_ran(self.experiment, self.ranks.from_first(lambda: self.folder.about))

    def go(self, checkpoint_every: int | None, on_round_end: OnRoundEnd | None) -> None:
        """Train to the end, from the start or from the checkpoint."""
        timer, environment = _Timer(checkpoint_every), describe_environment()
        training = self._start()
        recorded: RoundEnd | None = None  # the last round that is in the log and not in a checkpoint
        try:
            for end in training.rounds():
                end = end._replace(record=end.record | self.clients.notes())
                self._record(end, environment)
                recorded = end
                if self.ranks.from_first(partial(self._is_due, timer, end.state.round)):
                    self._save(end)
                    timer.restart()
                if on_round_end is not None:
                    on_round_end(self.seed, end)
                if end.state.round < training.problem.rounds and self.clients.changed():
                    training.add_clients()
                    self.folder.change_clients(self.clients.describe(), training.checkpoint(training.end))
                    self.clients.safe(training.state)
            if recorded is not None:
                self._save(recorded)
                recorded = None
            self._finish()
        except KeyboardInterrupt:
            if self.ranks.size == 1 and recorded is not None:  # several would have to agree on a round first
                self._save(recorded)
            raise Interrupted(self.saved, training.problem.rounds, self.seed, self.folder.path.parent) from None
        except RankError as lost:
            raise RankError(
                f"{lost}; round {self.saved} is safe in {self.folder.path}: start all of them again with --resume"
            ) from None

    def _start(self) -> Training:
        """From the first round on, or from the first process's checkpoint."""
        found = self._checkpoint() if self.resumes else None
        if found is None:
            return self.training.begin()
        self.saved = found.state.round
        return self.training.resume(found)

    def _checkpoint(self) -> Checkpoint | None:
        """As the first process has it."""
        states, ids = self.training.first_states, self.training.problem.roster.ids
        resume = partial(self.folder.resume, *states, self.clients.describe())
        if self.ranks.size == 1:
            return resume()

        def packed() -> Checkpoint | None:
            found = resume()
            return None if found is None else pack(found, len(ids))

        heard = self.ranks.from_first(packed)
        return None if heard is None else unpack(self.folder.checkpoint_file, heard, *states, ids)

    def _record(self, end: RoundEnd, environment: dict[str, str]) -> None:
        if self.ranks.first:
            if end.state.round == 1 and not self.resumes:  # a run that fails at once should leave nothing behind
                clients, method = self.clients.describe(), self.training.method
                self.folder.begin(self.experiment, method, clients, environment, self.start)
            self.folder.log.append(end.record, None if end.measured is None else end.measured.memberships)

    def _is_due(self, timer: _Timer, round: int) -> bool:
        """Whether to write a checkpoint; processes that die cannot do so on their way out, so there is one early."""
        return timer.is_due(round) or (self.ranks.size > 1 and self.saved == 0)

    def _save(self, end: RoundEnd) -> None:
        checkpoint = self.training.checkpoint(end)
        if self.ranks.first:
            self.folder.checkpoint(checkpoint)
        self.clients.safe(end.state)
        self.saved = end.state.round

    def _finish(self) -> None:
        """Write the state to return, with its scores."""
        measured, state = self.training.finish(), self.training.state
        clients = client_states(self.training.transport, state)
        if self.ranks.first:
            scores = measured.record | self.clients.last_scores(self.training)
            self.folder.finish(Result(state, clients, measured.memberships, scores))


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


def keep_freed_memory() -> None:
    """Let the process keep up to 1 GiB that it has freed, instead of giving it back and asking for it again.

    Autograd frees what it kept of a step at its end. By default glibc gives that back to the system, and the next step
    pays for each page anew. Nothing is done without glibc, or where the environment has settings of its own.
    """
    if any(name in os.environ for name in _USERS_OWN):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    mallopt(-1, 2**30)  # M_TRIM_THRESHOLD of malloc.h
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that is accepted
