"""Running an experiment: one folder a seed, safe to stop at any instant."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.contract import Algorithm, Problem
from ..core.errors import CheckpointError, RankError, SettingError
from ..data.federation import Federation
from ..engines import Distributed, State, begin, follow, pose, with_chosen_lr
from ..engines.fit import Moment, measure
from ..engines.newcomers import part_newcomers, welcome
from ..engines.output import Kept
from ..engines.ranks import Ranks, launched_ranks
from ..engines.train import whole
from .experiment import Experiment
from .folder import RunFolder, method_of
from .provenance import describe_environment
from .record import RunRecord, load_run
from .storage import flatten

OnMoment = Callable[[int, Moment], None]  # the seed, and the end of a round
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
    return experiment.data.build(base)


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    base: Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    on_moment: OnMoment | None = None,
    read: Reader = read_data,
) -> list[RunRecord]:
    """Run every seed into `out`/seed-<seed>. Relative data paths start at `base`.

    A checkpoint is written every `checkpoint_every` rounds, or else about every ten seconds. With `resume`, seeds
    that are finished are left alone, others go on from their checkpoint and end with the same bits as a run never
    stopped.

    In processes that torchrun started, each works on clients of its own, and the first one writes: it alone gets the
    records. A checkpoint holds every client's state, so a run may go on with another number of processes.
    """
    out, ranks = Path(out), launched_ranks(experiment.device)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}

    def unfinished() -> list[int]:
        for seed, folder in folders.items():
            folder.claim(experiment.for_seed(seed), resume=resume)
        return [seed for seed, folder in folders.items() if not folder.finished]

    todo = ranks.ask_first(unfinished)
    if todo:
        federation = _place(read(experiment, base), experiment.device)
    for seed in todo:
        try:
            _Run(experiment.for_seed(seed), federation, folders[seed], ranks).go(checkpoint_every, on_moment)
        except OSError as error:
            raise CheckpointError(
                f"{folders[seed].path} cannot be written ({error.strerror}); make room there, or choose another --out"
            ) from error
    return [load_run(folder.path) for folder in folders.values()] if ranks.first else []


class _Run:
    """One seed."""

    def __init__(self, experiment: Experiment, federation: Federation, folder: RunFolder, ranks: Ranks) -> None:
        self.experiment, self.folder, self.ranks = experiment, folder, ranks
        (self.seed,) = experiment.seeds
        self.federation, self.newcomers = part_newcomers(federation, experiment.newcomers, self.seed)
        here = experiment.build_engine()
        self.engine = here if ranks.size == 1 else Distributed(here, ranks)
        self.watch = experiment.watch.build()
        self.problem = self._pose()
        self.resumes = ranks.ask_first(lambda: folder.started)
        self.saved = 0  # the round of the last checkpoint
        self.algorithm = self._choose()

    def _pose(self) -> Problem:
        experiment, federation = self.experiment, self.federation
        population = experiment.build_population(federation, self.seed)
        affinity = experiment.affinity.build(federation, experiment.algorithm)
        return pose(population, federation, affinity, experiment.rounds, self.seed, experiment.dropout)

    def _choose(self) -> Algorithm:
        """The method, with what is left to it chosen once, before the first round."""
        if self.resumes:
            return method_of(self.ranks.ask_first(self.folder.read_experiment), self.folder.chosen_file)
        return with_chosen_lr(self.experiment.algorithm, self.problem, self.federation, self.engine)

    def go(self, checkpoint_every: int | None, on_moment: OnMoment | None) -> None:
        timer, environment = _Timer(checkpoint_every), describe_environment()
        safe = self._start()
        try:
            for moment in follow(self.algorithm, self.problem, self.federation, self.engine, self.watch, *safe):
                _refuse_divergence(moment.state)
                self._record(moment, environment)
                safe = _Safe(moment.state, moment.kept)
                if self.ranks.ask_first(partial(self._is_due, timer, moment.state.round)):
                    self._save(safe)
                    timer.restart()
                if on_moment is not None:
                    on_moment(self.seed, moment)
            self._save(safe)
            self._finish(safe)
        except KeyboardInterrupt:
            if self.ranks.size == 1:  # several would have to agree on a round first
                self._save(safe)
            raise Interrupted(self.saved, self.problem.rounds, self.seed, self.folder.path.parent) from None
        except RankError as lost:
            raise RankError(
                f"{lost}; round {self.saved} is safe in {self.folder.path}: start all of them again with --resume"
            ) from None

    def _start(self) -> _Safe:
        """The first state, or the one in the first process's checkpoint."""
        start = begin(self.algorithm, self.problem)
        if not self.resumes:
            return _Safe(start, None)
        found: list[_Safe] = []

        def describe() -> dict[str, Any]:
            found.append(_Safe(*self.folder.resume(start, self.federation)))
            return found[0].describe()

        described = self.ranks.ask_first(describe)
        resumed = _Safe.of(described, start) if not found else found[0]
        if self.ranks.size > 1:
            resumed = pytree.tree_map_only(Tensor, self.ranks.from_first, resumed)
        self.saved = resumed.state.round
        return resumed

    def _record(self, moment: Moment, environment: dict[str, str]) -> None:
        memberships = self._memberships_to_keep(moment.state)
        if self.ranks.first:
            if not self.folder.started:  # now, as a run that fails at once should leave nothing behind
                self.folder.begin(self.experiment, self.algorithm, self.federation, environment)
            self.folder.append(moment.record, memberships)

    def _is_due(self, timer: _Timer, round: int) -> bool:
        """Whether to write a checkpoint; processes that die cannot do so on their way out, so there is one early."""
        return timer.is_due(round) or (self.ranks.size > 1 and self.saved == 0)

    def _save(self, safe: _Safe) -> None:
        if safe.kept is None:
            return
        state = self._whole(safe.state)
        kept = safe.kept._replace(state=state if safe.kept.state is safe.state else self._whole(safe.kept.state))
        if self.ranks.first:
            self.folder.save_checkpoint(state, kept)
        self.saved = state.round

    def _whole(self, state: State) -> State:
        return whole(self.algorithm, state, self.federation, self.ranks)

    def _memberships_to_keep(self, state: State) -> Tensor | None:
        evaluated = state.round % self.watch.every == 0 or state.round == self.problem.rounds
        memberships = self._memberships(state) if evaluated else None
        return None if memberships is None else self.ranks.gather(memberships, self.federation.train.sizes.cpu())

    def _memberships(self, state: State) -> Tensor | None:
        return self.algorithm.personal(state.server, state.clients).memberships

    def _finish(self, safe: _Safe) -> None:
        assert safe.kept is not None, "an experiment has at least one round"
        returned = self._whole(safe.kept.state)
        scores = measure(self.algorithm, self.problem, self.federation, returned, self.watch, self.ranks)
        if self.ranks.first:
            self.folder.finish(returned, self._memberships(returned), scores | self._scores_of_newcomers(returned))

    def _scores_of_newcomers(self, state: State) -> dict[str, float]:
        if self.newcomers is None or self.newcomers.test is None:
            return {}
        engine, loss = self.experiment.build_engine(), self.problem.population.loss
        found = welcome(self.algorithm, self.problem, state, self.newcomers, engine)
        scores = {"newcomers_before": found.before, "newcomers": found.after}
        return {
            f"{name}_{loss.metric_name}": float(loss.metric(torch.tensor(score.pooled)))
            for name, score in scores.items()
        }


class _Safe(NamedTuple):
    """Where a run can be taken up: after the last round that is recorded in full."""

    state: State
    kept: Kept | None

    def describe(self) -> dict[str, Any]:
        """All but the tensors."""
        kept = None if self.kept is None else [self.kept.state.round, self.kept.criterion]
        return {"round": self.state.round, "kept": kept}

    @classmethod
    def of(cls, described: dict[str, Any], like: State) -> _Safe:
        """What was described, with any tensors of the right shapes."""
        kept = described["kept"] and Kept(like._replace(round=described["kept"][0]), described["kept"][1])
        return cls(like._replace(round=described["round"]), kept)


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
