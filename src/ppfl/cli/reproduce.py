"""`ppfl reproduce`: a study of the paper, run, and shown beside what the paper reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..core.errors import DataError, SettingError
from ..paper import Sheet, Study, sheets_of
from ..runs import RunFolder, RunRecord
from ..runs.comparison import Task, folder_name, tasks_of
from ..runs.provenance import made_with
from ..runs.storage import write_text


def tasks_of_study(study: Study, out: Path) -> dict[str, list[Task]]:
    """Every seed of every method by case, each case in a folder of its own."""
    return {case.name: tasks_of(case.experiments, out / folder_name(case.name), None) for case in study.cases}


def refuse_missing_data(study: Study, tasks: dict[str, list[Task]]) -> None:
    """Ask for all data before anything runs, where something is left to run."""
    there: list[str] = []
    missing: dict[str, DataError] = {}
    for case in study.cases:
        if all(RunFolder(task.run_folder).finished for task in tasks[case.name]):
            continue
        try:
            next(iter(case.experiments.values())).data.build()
            there.append(case.name)
        except DataError as error:
            missing[case.name] = error
    for name, reason in missing.items():
        rest = f"; or leave it out with --case {' --case '.join(there)}" if there else ""
        raise SettingError(f"{study.name}, {name}: {reason}{rest}")


def write_study(
    study: Study, tasks: dict[str, list[Task]], records: dict[str, dict[str, list[RunRecord]]], out: Path, command: str
) -> Path:
    """The study's page in Markdown with its pictures, and a report for each case; returns the page's path."""
    from ..report import write_curves, write_report  # here, as nothing else needs it

    pictures = []
    for case, of_case in tasks.items():
        title, place = f"{study.title}: {case}", folder_name(case)
        write_report([task.run_folder for task in of_case], out / place, title, [task.label for task in of_case])
        if study.runs == study.name:  # else they are the other study's curves
            pictures.append(out / f"{study.name}-{place}.svg")
            write_curves(records[case], pictures[-1], title)
    page = out / f"{study.name}.md"
    made = made_with(run.versions for methods in records.values() for runs in methods.values() for run in runs)
    write_text(page, "\n\n".join(_parts(study, sheets_of(study, records), command, made, pictures)) + "\n")
    return page


def sheet_table(sheet: Sheet) -> Table:
    """A sheet for a terminal."""
    table = Table(
        box=SIMPLE_HEAD, title=sheet.title, caption=sheet.note, title_justify="left", caption_justify="left",
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for at, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=at == 0)
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _parts(study: Study, sheets: Sequence[Sheet], command: str, made: str, pictures: Sequence[Path]) -> Iterator[str]:
    """The study's page: what made it, what came out."""
    yield from (f"# {study.title}", f"```\n{command}\n```", made)
    yield "Accuracies are in per cent, ± standard deviation over seeds; MB are per client over all rounds."
    for sheet in sheets:
        yield sheet.markdown()
    for picture in pictures:
        yield f"![{picture.stem}]({picture.name})"
