"""`ppfl reproduce`: run a study of the paper and show its results compared with those of the paper."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DataError, SettingError
from ..paper import STUDIES
from .program import JobsOption, QuietOption, program, resumable
from .terminal import WIDE, make_console, say

if TYPE_CHECKING:
    from ..paper import Study
    from ..runs import RunRecord
    from ..runs.comparison import RunTask

    Tasks = dict[str, list[RunTask]]  # by case
    Records = dict[str, dict[str, list[RunRecord]]]  # by case and method


def reproduce_command(
    name: Annotated[str, typer.Argument(metavar="STUDY", help=f"One of {', '.join(STUDIES)}, or a TOML file.")],
    cases: Annotated[list[str] | None, typer.Option("--case", help="A data set of the study; may be repeated.")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="A method; may be repeated.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help='Change a setting, such as "seeds=[0]".')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="runs/<study>")] = None,
    jobs: JobsOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a study of the paper and compare its results with the paper's; finished runs are not run again.

    Data come from the folder in PPFL_DATA.
    """
    from ..paper import load_study

    study = load_study(name, settings or (), cases or (), methods or ())
    place = Path("runs") / study.name if out is None else out
    options = {"--case": cases, "--method": methods, "--set": settings}
    chosen = [part for option, values in options.items() for value in values or () for part in (option, value)]
    command = [program(), "reproduce", name, *chosen, *(["--out", str(out)] if out else [])]
    tasks = tasks_of_study(study, place)
    refuse_missing_data(study, tasks)
    with resumable(command):
        records = _run_cases(tasks, jobs, quiet=quiet)
    page = write_study(study, tasks, records, place, shlex.join(["ppfl", *command[1:]]))
    if not quiet:
        make_console(wide=WIDE).print(page.read_text("utf-8"))
        say(f"written to {page}; the numbers are in {page.with_suffix('.json')}")


def tasks_of_study(study: Study, out: Path) -> Tasks:
    """The tasks of every case: one per method and seed, with one folder per case."""
    from ..io.files import folder_name
    from ..runs.comparison import tasks_of

    return {
        case.name: tasks_of(case.experiments, out / folder_name(case.name, "case"), study.base) for case in study.cases
    }


def refuse_missing_data(study: Study, tasks: Tasks) -> None:
    """Check before anything runs that the files of all unfinished cases are there; they are read when they are used."""
    from ..runs import RunFolder

    available: list[str] = []
    missing: dict[str, DataError] = {}
    for case in study.cases:
        if all(RunFolder(task.run_folder).finished for task in tasks[case.name]):
            continue
        try:
            _refuse_missing_files(next(iter(case.experiments.values())).data, study.base)
            available.append(case.name)
        except DataError as error:
            missing[case.name] = error
    for name, reason in missing.items():
        rest = f"; or leave it out with --case {' --case '.join(available)}" if available else ""
        raise SettingError(f"{study.name}, {name}: {reason}{rest}")


def _refuse_missing_files(data: Any, base: Path | None) -> None:
    """Refuse a data set whose folder is not there. A reader of one's own knows its folders by itself."""
    from ..core.registry import find_path
    from ..data.files import data_folder

    if hasattr(data, "folder") and ":" not in data.name:
        place = data_folder(data.name) if data.folder is None else find_path(data.folder, base)
        if not place.exists():
            raise DataError(f"there is no {place}; put the data there, or set PPFL_DATA to the folder that has them")


def write_study(study: Study, tasks: Tasks, records: Records, out: Path, command: str) -> Path:
    """Write the numbers, the page and the charts of the study and a report for each case; the path of the page."""
    from ..io.files import folder_name, make_folder, write_text
    from ..paper import ABOUT, markdown_page, study_charts, study_figures
    from ..report import Comparison

    make_folder(out)
    if study.view == "scores":  # other runs have no test data to report on
        for case in study.cases:
            place = out / folder_name(case.name, "case")
            Comparison(records[case.name]).report(place, f"{study.title}: {case.name}")
    drawn = []
    for name, chart in study_charts(study, records):
        chart.save(str(out / f"{name}.svg"))
        drawn.append(name)
    figures = study_figures(study, records, command)
    figures.write(out)
    write_text(out / f"{study.name}.md", markdown_page(figures, ABOUT[study.view], drawn))
    return out / f"{study.name}.md"


def _run_cases(tasks: Tasks, jobs: int | None, *, quiet: bool) -> Records:
    """One after the other; a case that fails does not stop the others, and is reported at the end."""
    from .experiments import run_live

    records, failed = {}, []
    for case, of_case in tasks.items():
        try:
            records[case] = run_live(of_case, jobs, quiet=quiet)
        except SettingError as error:
            failed.append(f"{case}: {error}")
    if failed:
        raise SettingError("; ".join(failed))
    return records
