"""The run of one seed: training, its record and its checkpoints, from the start or from where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..algorithms.contract import Method
from ..core.trees import tree_map
from ..data.federation import Federation
from ..data.sample_spec import SampleSpec
from ..errors import RankError, SettingError
from ..server import (
    Checkpoint,
    Ranks,
    RoundEnd,
    ServerState,
    TorchRanks,
    Training,
    client_states,
    connect,
    part_newcomers,
    score_newcomers,
)  # fmt: skip
from .checkpoint import CheckpointNumbers, make_checkpoint, numbers_of, tensors_of, with_positions
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
        self.population = experiment.build_population(SampleSpec.of(self.federation), self.seed, base)
        self.start = None
        if experiment.start is not None:
            find = folder.read_start if self.resumes else partial(load_start, experiment, base, start_method)
            self.start = start_on_every_rank(self.population, find, ranks)
        watch = experiment.watch.build(base)
        self.training = Training(
            connect(
                self.federation, self.population, experiment.build_engine(), metrics=watch.known_metrics,
                states_on_disk=experiment.states_on_disk, ranks=ranks,
            ),
            self.population, self._method(), rounds=experiment.rounds, seed=self.seed,
            affinity=experiment.build_affinity(self.federation, base), watch=watch,
            dropout=experiment.dropout,
        )  # fmt: skip
        self.saved = 0  # the round of the last checkpoint

    def _method(self) -> Method:
        """As the experiment has it; a run that is resumed has chosen what was left to it."""
        if not self.resumes:
            return self.experiment.method
        return method_of(self.ranks.decide_on_first(self.folder.read_experiment), self.folder.chosen_file)

    def go(self, checkpoint_every: int | None, on_round_end: OnRoundEnd | None) -> None:
        """Train to the end, from the start or from the checkpoint."""
        timer, environment = _Timer(checkpoint_every), describe_environment()
        training = self._start()
        recorded: RoundEnd | None = None  # the last round that is in the log and not in a checkpoint
        try:
            for end in training.rounds():
                self._record(end, environment)
                recorded = end
                if self.ranks.decide_on_first(partial(self._is_due, timer, end.state.round)):
                    self._save(end)
                    timer.restart()
                if on_round_end is not None:
                    on_round_end(self.seed, end)
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
        server, client = self.training.first_states
        read: list[Checkpoint] = []

        def numbers() -> dict[str, Any] | None:
            found = self.folder.resume(server, client, describe_clients(self.federation, self.fingerprint))
            if found is None:
                return None
            read.append(found)
            return numbers_of(found).model_dump() | {"criterion": repr(found.kept.criterion)}

        said = self.ranks.decide_on_first(numbers)
        if said is None:
            return None
        if not isinstance(self.ranks, TorchRanks):
            return read[0]
        described = CheckpointNumbers.model_validate(said)
        tensors = tensors_of(read[0]) if read else described.template(server, client)
        return make_checkpoint(described, tree_map(self.ranks.from_first, tensors), self.training.problem.roster)

    def _record(self, end: RoundEnd, environment: dict[str, str]) -> None:
        if self.ranks.first:
            if end.state.round == 1 and not self.resumes:  # a run that fails at once should leave nothing behind
                clients = describe_clients(self.federation, self.fingerprint)
                self.folder.begin(self.experiment, self.training.method, clients, environment, self.start)
            self.folder.log.append(end.record, None if end.measured is None else end.measured.memberships)

    def _is_due(self, timer: _Timer, round: int) -> bool:
        """Whether to write a checkpoint; processes that die cannot do so on their way out, so there is one early."""
        return timer.is_due(round) or (self.ranks.size > 1 and self.saved == 0)

    def _save(self, end: RoundEnd) -> None:
        checkpoint = self.training.checkpoint(end)
        if self.ranks.first:
            self.folder.save_checkpoint(checkpoint)
        self.saved = end.state.round

    def _finish(self) -> None:
        """Write the state to return, with its scores."""
        training = self.training
        measured, state = training.finish(), training.state
        clients = client_states(training.transport, state)
        if self.ranks.first:
            returned = {"server": state.server, **with_positions(clients.rows, training.problem.roster.ids)}
            scores = measured.record | self._scores_of_newcomers(state)
            self.folder.finish(returned, state.round, measured.memberships, scores)

    def _scores_of_newcomers(self, state: ServerState) -> dict[str, float]:
        if self.newcomers is None or self.newcomers.test is None:
            return {}
        loss, training = self.population.loss, self.training
        transport = connect(self.newcomers, self.population, self.experiment.build_engine())
        found = score_newcomers(training.method, training.problem, state.server, transport)
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
