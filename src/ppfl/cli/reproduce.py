"""`ppfl reproduce`: run a study of the paper and show its results beside those of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..core.registry import find_path
from ..data.files import data_folder
from ..errors import DataError, SettingError
from ..io.files import folder_name, write_text
from ..paper import VIEWS, Study, StudyTable, all_series, chart_lines, study_tables
from ..runs import RunFolder, RunRecord
from ..runs.comparison import RunTask, tasks_of
from ..runs.provenance import made_with

Tasks = dict[str, list[RunTask]]  # by case
Records = dict[str, dict[str, list[RunRecord]]]  # by case and method


def tasks_of_study(study: Study, out: Path) -> Tasks:
    """The tasks of every case: one per method and seed, with one folder per case."""
    return {
        case.name: tasks_of(case.experiments, out / folder_name(case.name, "case"), study.base) for case in study.cases
    }


def refuse_missing_data(study: Study, tasks: Tasks) -> None:
    """Check before anything runs that the files of all unfinished cases are there; they are read when they are used."""
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
    if hasattr(data, "folder") and ":" not in data.name:
        place = data_folder(data.name) if data.folder is None else find_path(data.folder, base)
        if not place.exists():
            raise DataError(f"there is no {place}; put the data there, or set PPFL_DATA to the folder that has them")


def write_study(study: Study, tasks: Tasks, records: Records, out: Path, command: str) -> Path:
    """Write the Markdown page of the study, its pictures and a report for each case; return the path of the page."""
    pictures = (_write_rates if study.view == "rates" else _write_reports)(study, tasks, records, out)
    page = out / f"{study.name}.md"
    versions = made_with(run.versions for methods in records.values() for runs in methods.values() for run in runs)
    write_text(page, "\n\n".join(_page_parts(study, study_tables(study, records), command, versions, pictures)) + "\n")
    return page


def _write_reports(study: Study, tasks: Tasks, records: Records, out: Path) -> list[Path]:
    """A report for each case, and its curves."""
    from ..report import write_curves, write_report  # imported here because it takes a while

    pictures = []
    for case in study.cases:
        of_case, title, place = tasks[case.name], f"{study.title}: {case.name}", folder_name(case.name, "case")
        write_report([task.run_folder for task in of_case], out / place, title, [task.label for task in of_case])
        if study.runs == study.name:  # otherwise the curves belong to the other study
            pictures.append(out / f"{study.name}-{place}.svg")
            write_curves({label: records[case.name][label] for label in case.compared}, pictures[-1], title)
    return pictures


def _write_rates(study: Study, tasks: Tasks, records: Records, out: Path) -> list[Path]:
    """The measure by horizon, on full gradients and on batches; these runs have no test data to report on."""
    from ..report import write_rates

    pictures, found = [], all_series(study, records)
    for what, full in (("full gradients", True), ("batches", False)):
        if lines := chart_lines(found, full_gradients=full):
            pictures.append(out / f"{study.name}-{folder_name(what, 'case')}.svg")
            write_rates(lines, pictures[-1], f"Mean stationarity measure over T rounds, {what}", "T")
    return pictures


def terminal_table(study_table: StudyTable) -> Table:
    """The table for a terminal."""
    table = Table(
        box=SIMPLE_HEAD, title=study_table.title, caption=study_table.note,
        title_justify="left", caption_justify="left", padding=(0, 1, 0, 0),
    )  # fmt: skip
    for at, name in enumerate(study_table.columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=at == 0)
    for row in study_table.rows:
        table.add_row(*row)
    return table


def _page_parts(
    study: Study, tables: Sequence[StudyTable], command: str, versions: str, pictures: Sequence[Path]
) -> Iterator[str]:
    """The parts of the page: the command, the versions, the tables and the pictures."""
    yield from (f"# {study.title}", f"```\n{command}\n```", versions)
    yield VIEWS[study.view].about
    for table in tables:
        yield table.markdown()
    for picture in pictures:
        yield f"![{picture.stem}]({picture.name})"
