"""Several methods on the same data, start values, batches, rounds and evaluation: one file, one folder per method.

A comparison is an experiment file with a table of methods. What is outside that table is common to all of them; the
keys of a method's own table replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from ..core.registry import Imports
from ..data import Federation
from ..errors import PPFLError, SettingError
from ..io.files import checked_name, folder_name, same_folder_key
from .experiment import Experiment
from .load import explain, load_settings
from .processes import ProcessPool
from .record import RunRecord, load_run
from .run import run


class RunTask(NamedTuple):
    """One seed of one method."""

    label: str
    experiment: Experiment  # with one seed
    base: Path | None  # where relative data paths start
    folder: Path  # of the method
    start_method: Path | None = None  # the folder of the method it starts from, where that is one of the comparison

    @property
    def seed(self) -> int:
        return self.experiment.seeds[0]

    @property
    def run_folder(self) -> Path:
        return self.folder / f"seed-{self.seed}"

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which has to import the classes of the experiment first."""
        return _task, (self.label, self.experiment.model_dump(mode="json"), *self[2:])


def _task(label: str, settings: dict[str, Any], base: Path | None, *folders: Any) -> RunTask:
    return RunTask(label, Experiment.model_validate(settings, context=Imports(base)), base, *folders)


def load_comparison(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Experiment]:
    """The experiments of a comparison file by the names of their methods; of an experiment file, that one."""
    return experiments_of(load_settings(Path(path), overrides), str(path), Path(path).parent)


def experiments_of(settings: dict[str, Any], where: str, base: Path | None = None) -> dict[str, Experiment]:
    """The experiments that a comparison's settings describe; errors name `where` the settings were found.

    base: the folder in which modules of methods are looked for first.
    """
    common = {key: value for key, value in settings.items() if key != "methods"}
    methods = settings["methods"] if "methods" in settings else {checked_name(settings.get("name"), where): {}}
    if not isinstance(methods, dict) or not methods or not all(isinstance(own, dict) for own in methods.values()):
        raise SettingError(f"{where}: methods is {methods!r}; write one table [methods.<name>] for each")
    found = {
        label: _experiment(where, label, _with_start(label, merged(common, own)), base)
        for label, own in methods.items()
    }
    for label, experiment in found.items():
        _refuse_unknown_start(where, label, experiment, found)
    return found


def tuned_settings(path: Path, overrides: Iterable[str], best: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The file's settings with what was found for each of its methods."""
    settings = load_settings(path, overrides)
    for label, changes in best.items():
        found = {"method": nested(changes)}
        settings = merged(settings, {"methods": {label: found}} if "methods" in settings else found)
    return settings


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as tables within tables.

    >>> nested({"lr": 0.1, "server_optimizer.lr": 0.5})
    {'lr': 0.1, 'server_optimizer': {'lr': 0.5}}
    """
    tables: dict[str, Any] = {}
    for key, value in changes.items():
        *outer, last = key.split(".")
        tables = merged(tables, reduce(lambda table, name: {name: table}, reversed(outer), {last: value}))
    return tables


def _with_start(label: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method; the one that all start from does not start from itself."""
    start = settings.get("start")
    itself = isinstance(start, dict) and start.get("method") == label
    return {key: value for key, value in settings.items() if not (itself and key == "start")}


def _refuse_unknown_start(where: str, label: str, experiment: Experiment, others: dict[str, Experiment]) -> None:
    """Refuse a start that is none of the methods, or that leads back to where it began."""
    seen = [label]
    while (method := start_method(experiment)) is not None:
        if method not in others:
            raise SettingError(
                f"{where}, method {label!r}: start.method is {method!r}; name one of {', '.join(map(repr, others))}"
            )
        seen.append(method)
        if len(seen) > len(others):
            raise SettingError(
                f"{where}: methods start from each other ({' <- '.join(seen[:3])}); let one of them begin"
            )
        experiment = others[method]


def start_method(experiment: Experiment) -> str | None:
    """The method of the same comparison that an experiment starts from."""
    return None if experiment.start is None else experiment.start.method


def with_starts(experiments: dict[str, Experiment], labels: Collection[str]) -> dict[str, Experiment]:
    """The experiments with these labels, and those that they start from."""
    wanted = set(labels)
    for _ in experiments:
        wanted |= {start for label in wanted if (start := start_method(experiments[label])) is not None}
    return {label: experiment for label, experiment in experiments.items() if label in wanted}


def _experiment(where: str, label: str, settings: dict[str, Any], base: Path | None) -> Experiment:
    try:
        return Experiment.model_validate(settings, context=Imports(base))
    except ValidationError as error:
        raise SettingError(f"{where}, method {label!r}: {explain(error, settings)}") from None


def merged(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` put over `common`, table by table.

    >>> merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 4}})
    {'a': 1, 'b': {'c': 2, 'd': 4}}
    """
    both = dict(common)
    for key, value in own.items():
        there = common.get(key)
        both[key] = merged(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return both


def tasks_of(experiments: dict[str, Experiment], out: Path, base: Path | None) -> list[RunTask]:
    """Seed by seed, so that a first table is complete early; refuses labels whose runs would share a folder."""
    seeds = dict.fromkeys(seed for experiment in experiments.values() for seed in experiment.seeds)
    folders = {label: out / folder_name(label) for label in experiments}
    starts = {
        label: folders[start]
        for label, experiment in experiments.items()
        if (start := start_method(experiment)) is not None
    }
    tasks = [
        RunTask(label, experiment.for_seed(seed), base, folders[label], starts.get(label))
        for seed in seeds
        for label, experiment in experiments.items()
        if seed in experiment.seeds
    ]
    refuse_twice(tasks)
    return tasks


def refuse_twice(tasks: list[RunTask]) -> None:
    """Refuse methods whose runs would go to the same folder, on file systems that ignore case too."""
    labels: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    for task in tasks:
        key = same_folder_key(str(task.folder))
        first = labels.setdefault(key, task.label)
        if first != task.label:
            raise SettingError(
                f"methods {first!r} and {task.label!r} would share the folder {task.folder.name}; "
                f"rename one, so that more than signs and capitals differ"
            )
        if (key, task.seed) in seen:
            raise SettingError(f"two methods are called {task.label!r}; give each a name of its own")
        seen.add((key, task.seed))


def run_tasks(
    tasks: list[RunTask], jobs: int, on_done: Callable[[RunTask], None] | None = None
) -> dict[str, list[RunRecord]]:
    """Run what is not finished, `jobs` at a time; a failed run does not stop the others and is reported at the end."""
    failed: list[tuple[RunTask, PPFLError]] = []
    with closing(_finished(tasks, jobs)) as finished:  # so that an interrupt here stops the workers at once
        for task, error in finished:
            if error is not None:
                failed.append((task, error))
            elif on_done is not None:
                on_done(task)
    if failed:
        task, error = failed[0]
        raise SettingError(
            f"{len(failed)} of {len(tasks)} runs failed, the others are safe; {task.label}, seed {task.seed}: {error}"
        )
    records: dict[str, list[RunRecord]] = {}
    for task in tasks:
        records.setdefault(task.label, []).append(load_run(task.run_folder))
    return records


def _finished(tasks: list[RunTask], jobs: int) -> Generator[tuple[RunTask, PPFLError | None]]:
    """Tasks as they end, each with what went wrong."""
    waves, attempt = _waves(tasks), partial(_attempt, DataReader())
    if jobs == 1:
        for wave in waves:
            for task in wave:
                yield task, attempt(task)
        return
    with ProcessPool(jobs, attempt, threads=max(1, torch.get_num_threads() // jobs)) as pool:
        for wave in waves:
            yield from pool.run(wave)


def _waves(tasks: list[RunTask]) -> list[list[RunTask]]:
    """Tasks in groups, each after those that it starts from."""
    waves: list[list[RunTask]] = []
    rest = tasks
    while rest:
        waiting = {task.folder for task in rest}
        waves.append([task for task in rest if task.start_method not in waiting])
        rest = [task for task in rest if task.start_method in waiting]
    return waves


def _attempt(read: DataReader, task: RunTask) -> PPFLError | None:
    try:
        run(task.experiment, task.folder, base=task.base, resume=True, read=read, start_method=task.start_method)
    except PPFLError as error:
        return error
    return None


class DataReader:
    """Reads the data of experiments, and keeps what was read last: methods that are compared have the same data.

    One for each comparison, so that data which have changed since the last one are read anew.
    """

    def __init__(self) -> None:
        self._last: tuple[object, Federation] | None = None

    def __call__(self, experiment: Experiment, base: Path | None) -> Federation:
        asked = experiment.model_dump_json(include={"data", "preparation"}), base
        if self._last is None or self._last[0] != asked:
            self._last = None  # two at once may not fit into memory
            self._last = asked, experiment.build_data(base)
        return self._last[1]
