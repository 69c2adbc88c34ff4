"""Studies: the experiments of the paper, each one a packaged TOML file of comparisons.

A study has one case for every data set, and each case is a comparison of methods. Settings outside `[cases]` are common
to all cases, and a case can begin with the settings of another one (`like`). A case that does a table of the paper in
another way names the study and case with that table's results (`paper`); its methods begin with the names that they
have there.

A study can also be a TOML file, run by its path. With `extends` it adds cases to a packaged study, such as those that
need readers or networks beside the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SettingError
from ..runs.comparison import experiments_of, merged, start_method, with_starts
from ..runs.experiment import Experiment
from ..runs.load import load_settings, set_by_text
from . import STUDIES

_OF_STUDY = ("title", "view", "cases")


class Case(NamedTuple):
    """One data set, and the experiment of every method on it."""

    name: str
    experiments: dict[str, Experiment]
    targets: tuple[float, ...]  # accuracies; the tables show the cost to reach each of them
    scale: str  # how it is smaller than in the paper; empty if it is not
    paper: tuple[str, str] | None = None  # the study and case with the paper's results, if not its own

    @property
    def compared(self) -> list[str]:
        """The methods without those that others start from, such as pre-training."""
        starts = {start_method(experiment) for experiment in self.experiments.values()}
        return [label for label in self.experiments if label not in starts]


class Study(NamedTuple):
    name: str
    title: str
    view: str  # "scores" or "rates"
    cases: tuple[Case, ...]
    base: Path | None = None  # the folder of its file, where modules are looked for first


def load_study(
    name: str, overrides: Iterable[str] = (), cases: Collection[str] = (), methods: Collection[str] = ()
) -> Study:
    """Load a study by name or by the path of its file, with the given cases and methods, or with all of them.

    Each override is "key.sub=value" and is applied to all of these cases.

    >>> [case.name for case in load_study("local-steps").cases]
    ['mnist', 'synthetic']
    """
    own, base = _read(name)
    label = name if base is None else Path(name).stem
    common = {key: value for key, value in own.items() if key not in _OF_STUDY}
    _refuse_unknown("case", cases, list(own["cases"]))
    changes = tuple(overrides)
    found = [
        _case(label, case, merged(common, _settings(own, case)), changes)
        for case in own["cases"]
        if not cases or case in cases
    ]
    _refuse_unknown("method", methods, [label for case in found for label in case.experiments])
    chosen = [case for each in found if (case := _with_methods(each, methods)).experiments]
    return Study(label, own["title"], own.get("view", "scores"), tuple(chosen), base)


def _read(name: str) -> tuple[dict[str, Any], Path | None]:
    """The settings of a study, and the folder of its file if it is not a packaged one."""
    if not name.endswith(".toml"):
        return _read_packaged(name), None
    own = load_settings(Path(name))
    del own["name"]  # of the file
    extended = own.pop("extends", None)
    whole = own if extended is None else merged(_read_packaged(str(extended)), own)
    if absent := [key for key in ("title", "cases") if key not in whole]:
        raise SettingError(f"{name} is no study: it has no {absent[0]!r}; run an experiment with ppfl run or compare")
    return whole, Path(name).parent


def _read_packaged(name: str) -> dict[str, Any]:
    if name not in STUDIES:
        raise SettingError(
            f"there is no study {name!r}; use one of {', '.join(STUDIES)}, or the path of the TOML file of another"
        )
    return tomllib.loads(files(__package__).joinpath("studies", f"{name}.toml").read_text(encoding="utf-8"))


def _settings(source: dict[str, Any], label: str) -> dict[str, Any]:
    settings = dict(source["cases"][label])
    like = settings.pop("like", None)
    return settings if like is None else merged(_settings(source, like), settings)


def _case(study: str, name: str, settings: dict[str, Any], overrides: Sequence[str]) -> Case:
    settings = {"name": f"{study}-{name}", **settings}
    for override in overrides:
        set_by_text(settings, override)
    where, targets, scale = f"study {study}, {name}", settings.pop("targets", ()), settings.pop("scale", "")
    paper = settings.pop("paper", None)
    if not isinstance(targets, list | tuple) or not all(0 < target <= 1 for target in targets):
        raise SettingError(f"{where}: targets are {targets!r}; give a list of accuracies between 0 and 1")
    return Case(name, experiments_of(settings, where), tuple(targets), scale, paper and (paper[0], paper[1]))


def _with_methods(case: Case, methods: Collection[str]) -> Case:
    known = [label for label in case.experiments if not methods or label in methods]
    return case._replace(experiments=with_starts(case.experiments, known))


def _refuse_unknown(what: str, asked: Collection[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            raise SettingError(f"there is no {what} {name!r} here; use some of {', '.join(dict.fromkeys(known))}")
