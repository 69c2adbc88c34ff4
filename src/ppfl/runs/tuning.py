"""Settings found on validation data, with the same number of trials for every method; test data are never looked at."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..algorithms.contract import Method
from ..core.draws import hashed
from ..data.federation import Federation
from ..data.sample_spec import SampleSpec
from ..errors import SettingError
from ..server import DivergedError, RefusedUpdateWarning, Training, connect
from .comparison import DataReader
from .experiment import Experiment
from .start import load_start, start_population_from

VALIDATION = 0.2  # of each client's training samples, where the data settings hold none back


class Trial(NamedTuple):
    """Settings that differ from the method's own, and how its models did on validation data."""

    changes: dict[str, Any]
    metric: str
    score: float  # nan where training diverged


OnTrial = Callable[[str, Trial], None]


def tune(
    experiments: dict[str, Experiment],
    base: Path | None,
    budget: int,
    rounds: int | None = None,
    on_trial: OnTrial | None = None,
) -> dict[str, list[Trial]]:
    """`budget` trials for each method by name, best first; the settings as they stand are one of them."""
    if budget < 1:
        raise SettingError(f"budget is {budget}; a method needs at least one trial")
    found: dict[str, list[Trial]] = {}
    read = DataReader()
    for label, experiment in experiments.items():
        federation = without_test(read(experiment, base)).to(experiment.device)
        trials = []
        for changes in candidates(experiment.method, budget, experiment.seeds[0]):
            trial = attempt(experiment, federation, changes, rounds or experiment.rounds, base)
            trials.append(trial)
            if on_trial is not None:
                on_trial(label, trial)
        found[label] = sorted(trials, key=_badness)
    return found


def without_test(federation: Federation) -> Federation:
    """Training and validation samples only."""
    blind = federation.replace(test=None)
    return blind if blind.validation is not None else blind.holdout(VALIDATION, seed=0, into="validation")


def candidates(method: Method, budget: int, seed: int) -> list[dict[str, Any]]:
    """The method as it is, then draws without repetition from the grid it names in `search`."""
    grid = method.search
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    order = hashed(seed, "tune", torch.arange(len(points))).argsort().tolist() if grid else []
    drawn = [{k: v for k, v in points[at].items() if method.setting(k) != v} for at in order]
    return [{}, *(changes for changes in drawn if changes)][:budget]


def attempt(
    experiment: Experiment, federation: Federation, changes: dict[str, Any], rounds: int, base: Path | None = None
) -> Trial:
    """Train with these settings, and score the personal models on the clients' validation samples."""
    experiment = experiment.model_copy(update={"method": experiment.method.changed(changes)})
    method = experiment.method
    seed = experiment.seeds[0]
    population = experiment.build_population(SampleSpec.of(federation), seed, base)
    if (start := load_start(experiment.for_seed(seed), base)) is not None:
        start_population_from(population, start)
    metric = population.loss.metric_name
    training = Training(
        connect(federation, population, experiment.build_engine()), population, method, rounds=rounds, seed=seed,
        affinity=experiment.build_affinity(federation, base), dropout=experiment.dropout,
        watch=experiment.watch.model_copy(update={"every": rounds, "metrics": {}}),
    ).begin()  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RefusedUpdateWarning)  # of steps that are too long for many clients
            *_, last = training.rounds()
    except DivergedError:
        return Trial(changes, metric, math.nan)
    return Trial(changes, metric, float(last.record[f"validation_{metric}"]))


def _badness(trial: Trial) -> float:
    if math.isnan(trial.score):
        return math.inf
    return -trial.score if trial.metric == "accuracy" else trial.score
