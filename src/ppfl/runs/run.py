"""Running an experiment: one folder a seed, safe to stop at any instant."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..algorithms.contract import Algorithm, Problem
from ..core.errors import CheckpointError, SettingError
from ..data.federation import Federation
from ..engines import State, begin, follow, pose, with_chosen_lr
from ..engines.fit import Moment, measure
from ..engines.output import Kept
from .experiment import Experiment
from .folder import RunFolder
from .provenance import describe_environment
from .record import RunRecord, load_run
from .storage import flatten

OnMoment = Callable[[int, Moment], None]  # the seed, and the end of a round

CHECKPOINT_SECONDS = 10.0


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
    on_moment: OnMoment | None = None,
) -> list[RunRecord]:
    """Run every seed into `out`/seed-<seed>. Relative data paths start at `base`.

    A checkpoint is written every `checkpoint_every` rounds, or else about every ten seconds. With `resume`, seeds
    that are finished are left alone, others go on from their checkpoint and end with the same bits as a run never
    stopped.
    """
    out = Path(out)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    for seed, folder in folders.items():
        folder.claim(experiment.for_seed(seed), resume=resume)
    todo = {seed: folder for seed, folder in folders.items() if not folder.finished}
    if todo:
        federation = _place(experiment.data.build(base), experiment.device)
    for seed, folder in todo.items():
        try:
            _Run(experiment.for_seed(seed), federation, folder).go(checkpoint_every, on_moment)
        except OSError as error:
            raise CheckpointError(
                f"{folder.path} cannot be written ({error.strerror}); make room there, or choose another --out"
            ) from error
    return [load_run(folder.path) for folder in folders.values()]


class _Run:
    """One seed."""

    def __init__(self, experiment: Experiment, federation: Federation, folder: RunFolder) -> None:
        self.experiment, self.federation, self.folder = experiment, federation, folder
        (self.seed,) = experiment.seeds
        self.engine, self.watch = experiment.build_engine(), experiment.watch.build()
        self.problem = self._pose()
        self.algorithm = self._choose()

    def _pose(self) -> Problem:
        experiment, federation = self.experiment, self.federation
        population = experiment.build_population(federation, self.seed)
        affinity = experiment.affinity.build(federation, experiment.algorithm)
        return pose(population, federation, affinity, experiment.rounds, self.seed)

    def _choose(self) -> Algorithm:
        """The method, with what is left to it chosen once, before the first round."""
        if self.folder.started:
            return self.folder.read_method()
        return with_chosen_lr(self.experiment.algorithm, self.problem, self.federation, self.engine)

    def go(self, checkpoint_every: int | None, on_moment: OnMoment | None) -> None:
        timer = _Timer(checkpoint_every)
        start = begin(self.algorithm, self.problem)
        resumed = self.folder.resume(start, self.federation) if self.folder.started else (start, None)
        safe, environment = _Safe(*resumed), describe_environment()
        try:
            for moment in follow(self.algorithm, self.problem, self.federation, self.engine, self.watch, *safe):
                _refuse_divergence(moment.state)
                if not self.folder.started:  # now, as a run that fails at once should leave nothing behind
                    self.folder.begin(self.experiment, self.algorithm, self.federation, environment)
                self.folder.append(moment.record, self._memberships_to_keep(moment.state))
                safe = _Safe(moment.state, moment.kept)
                if timer.is_due(moment.state.round):
                    safe.save(self.folder)
                    timer.restart()
                if on_moment is not None:
                    on_moment(self.seed, moment)
            safe.save(self.folder)
            self._finish(safe)
        except KeyboardInterrupt:
            safe.save(self.folder)
            raise Interrupted(safe.state.round, self.problem.rounds, self.seed, self.folder.path.parent) from None

    def _memberships_to_keep(self, state: State) -> Tensor | None:
        evaluated = state.round % self.watch.every == 0 or state.round == self.problem.rounds
        return self._memberships(state) if evaluated else None

    def _memberships(self, state: State) -> Tensor | None:
        return self.algorithm.personal(state.server, state.clients).memberships

    def _finish(self, safe: _Safe) -> None:
        assert safe.kept is not None, "an experiment has at least one round"
        returned = safe.kept.state
        scores = measure(self.algorithm, self.problem, self.federation, returned, self.watch)
        self.folder.finish(returned, self._memberships(returned), scores)


class _Safe(NamedTuple):
    """Where a run can be taken up: after the last round that is recorded in full."""

    state: State
    kept: Kept | None

    def save(self, folder: RunFolder) -> None:
        if self.kept is not None:
            folder.save_checkpoint(self.state, self.kept)


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


def _place(federation: Federation, device: str) -> Federation:
    try:
        return federation.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"device is {device!r}, which cannot be used here ({reason}); use 'cpu'") from None


def _refuse_divergence(state: State) -> None:
    """Parameters that are not finite never come back, and a checkpoint of them is worth nothing."""
    for name, leaf in flatten({"server": state.server, "clients": state.clients}).items():
        if not bool(leaf.isfinite().all()):
            raise SettingError(
                f"training diverged: after round {state.round} {name} is not finite; use a smaller lr or membership_lr"
            )
