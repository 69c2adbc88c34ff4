"""Studies: the paper's experiments, each a packaged TOML file of comparisons.

A study has one comparison for every data set it looks at, its case: what stands outside `[cases]` is common to all of
them. A study may look at the runs of another one (`of`), and then at some of its methods only (`only`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from ..core.errors import SettingError
from ..runs.comparison import experiments_of, merged
from ..runs.experiment import Experiment
from ..runs.load import set_by_text

STUDIES = (
    "table1",
    "table2",
    "table3",
    "covariate",
    "local-steps",
    "k-sweep",
    "communication",
    "membership-recovery",
)
_OF_STUDY = ("title", "view", "cases", "of", "only")


class Case(NamedTuple):
    """One data set: the methods on it."""

    name: str
    experiments: dict[str, Experiment]
    targets: tuple[float, ...]  # accuracies, of which it is told what it took to reach them
    scale: str  # how it is smaller than the paper's, where it is


class Study(NamedTuple):
    name: str
    title: str
    view: str  # "scores", "costs" or "recovery"
    cases: tuple[Case, ...]
    runs: str  # the study whose runs it looks at


def load_study(
    name: str, overrides: Iterable[str] = (), cases: Collection[str] = (), methods: Collection[str] = ()
) -> Study:
    """A study by its name, with some of its cases and methods, or all of them where none is named.

    Each override is "key.sub=value" and reaches all these cases.

    >>> [case.name for case in load_study("local-steps").cases]
    ['mnist', 'synthetic']
    """
    own = _read(name)
    runs = own.get("of", name)
    source = own if runs == name else _read(runs)
    common = {key: value for key, value in source.items() if key not in _OF_STUDY}
    _refuse_unknown("case", cases, list(source["cases"]))
    changes = tuple(overrides)
    found = [
        _with_methods(_case(runs, label, merged(common, settings), changes), own.get("only", ()))
        for label, settings in source["cases"].items()
        if not cases or label in cases
    ]
    _refuse_unknown("method", methods, [label for case in found for label in case.experiments])
    chosen = [case for each in found if (case := _with_methods(each, methods)).experiments]
    return Study(name, own["title"], own.get("view", "scores"), tuple(chosen), runs)


def _read(name: str) -> dict[str, Any]:
    if name not in STUDIES:
        raise SettingError(f"there is no study {name!r}; use one of {', '.join(STUDIES)}")
    return tomllib.loads(files(__package__).joinpath("studies", f"{name}.toml").read_text(encoding="utf-8"))


def _case(study: str, name: str, settings: dict[str, Any], overrides: Sequence[str]) -> Case:
    settings = {"name": f"{study}-{name}", **settings}
    for override in overrides:
        set_by_text(settings, override)
    where, targets, scale = f"study {study}, {name}", settings.pop("targets", ()), settings.pop("scale", "")
    if not isinstance(targets, list | tuple) or not all(0 < target <= 1 for target in targets):
        raise SettingError(f"{where}: targets are {targets!r}; give a list of accuracies between 0 and 1")
    return Case(name, experiments_of(settings, where), tuple(targets), scale)


def _with_methods(case: Case, methods: Collection[str]) -> Case:
    chosen = {label: experiment for label, experiment in case.experiments.items() if not methods or label in methods}
    return case._replace(experiments=chosen)


def _refuse_unknown(what: str, asked: Collection[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            raise SettingError(f"there is no {what} {name!r} here; use some of {', '.join(dict.fromkeys(known))}")
