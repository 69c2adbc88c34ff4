"""Commands that run experiments: `demo`, `init`, `check`, `run`, `compare` and `tune`."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingError
from .program import (
    JobsOption,
    QuietOption,
    ResumeOption,
    RunsOption,
    SetOption,
    changes,
    program,
    resumable,
)
from .terminal import say, show

if TYPE_CHECKING:  # commands import what they need when they run: `--help` must not wait for torch
    from ..runs import RunRecord
    from ..runs.comparison import RunTask

EXAMPLES = Path(__file__).parent / "examples"
ExperimentFile = Annotated[Path, typer.Argument(help="An experiment in TOML; `ppfl init` writes one.")]
ComparisonFile = Annotated[Path, typer.Argument(help="A comparison or an experiment in TOML.")]


class Purpose(StrEnum):
    """What a new experiment file is for."""

    table = "table"
    network = "network"
    methods = "methods"
    sites = "sites"


def init_command(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("experiment.toml"),
    purpose: Annotated[
        Purpose,
        typer.Option("--for", help="A table in csv or parquet, a network, a comparison of methods, or real sites."),
    ] = Purpose.network,
) -> None:
    """Write an experiment file with comments, to be edited."""
    from ..io.files import write_text

    if file.exists():
        raise SettingError(f"{file} exists; choose another name, or move it away")
    write_text(file, (EXAMPLES / f"{purpose.value}.toml").read_text("utf-8"))
    say(f"written to {file}; edit it, then try it with: {program()} check {shlex.quote(str(file))}")


def check_command(
    file: Annotated[
        Path | None, typer.Argument(help="A comparison or an experiment in TOML.", show_default=False)
    ] = None,
    settings: SetOption = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List methods, networks and data sets with their settings instead.")
    ] = False,
) -> None:
    """Read the data, build the network and train one round on a few clients; nothing is written."""
    from ..report.checks import check_table, registry_tables

    if list_all:
        show(*registry_tables())
        return
    if file is None:
        raise SettingError("there is no file to check; name an experiment, or use --list")
    from ..runs.comparison import load_comparison

    show(check_table(load_comparison(file, settings or ()), file.parent))
    say(f"ready: {program()} run {shlex.quote(str(file))}, or compare where it has several methods")


def run_command(
    file: ExperimentFile,
    settings: SetOption = None,
    out: RunsOption = None,
    resume: ResumeOption = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Rounds between checkpoints.", show_default="about ten seconds")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Run an experiment, with one folder for each seed and a report."""
    from ..report import Comparison
    from ..report.run_tables import seed_table
    from ..runs import load_experiment, run
    from ..server import is_first_process
    from .estimator_output import show_estimators
    from .live import show_progress

    experiment = load_experiment(file, settings or ())
    quiet = quiet or not is_first_process()
    place = Path("runs") / experiment.name if out is None else out
    command = [program(), "run", str(file), *changes(settings), "--out", str(place), "--resume"]
    with resumable(command), show_progress(experiment, quiet=quiet) as on_round_end:
        records = run(
            experiment, place, base=file.parent, resume=resume, checkpoint_every=checkpoint_every,
            on_round_end=on_round_end,
        )  # fmt: skip
    if not records:  # in a process that works for another one
        return
    found = Comparison.of(records)
    page = found.report(place, experiment.name)
    if not quiet:
        show(seed_table(found))
        say(f"the report is {page}")
        say(f"look at a run with: {program()} show {shlex.quote(str(records[0].folder))}")
    show_estimators(records, place, quiet=quiet)


def compare_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Comparisons or experiments in TOML.")],
    settings: SetOption = None,
    out: RunsOption = None,
    jobs: JobsOption = None,
    quiet: QuietOption = False,
) -> None:
    """Compare methods on the same data, seed by seed; finished runs are not run again."""
    from ..io.files import checked_name
    from ..report import Comparison
    from ..runs.comparison import load_comparison, refuse_twice, tasks_of
    from ..runs.load import load_settings

    name = checked_name(load_settings(files[0], settings or ())["name"], files[0])
    place = Path("runs") / name if out is None else out
    tasks: list[RunTask] = []
    for file in files:
        tasks += tasks_of(load_comparison(file, settings or ()), place, file.parent)
    refuse_twice(tasks)
    with resumable([program(), "compare", *map(str, files), *changes(settings), "--out", str(place)]):
        found = Comparison(run_live(tasks, jobs, quiet=quiet))
    page = found.report(place, f"Methods compared: {place.name}")
    if not quiet:
        show(found.table)
        say(f"the report is {page}")


def demo_command(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/demo")) -> None:
    """Compare three methods on handwritten digits; takes less than a minute and needs no download."""
    from ..report import Comparison
    from ..runs.comparison import load_comparison, tasks_of

    tasks = tasks_of(load_comparison(EXAMPLES / "methods.toml"), out, None)
    with resumable([program(), "demo", "--out", str(out)]):
        found = Comparison(run_live(tasks, 1, quiet=False))
    say("40 clients in 4 groups with different digits; no method knows the groups.")
    page = found.report(out, "Who writes which digits?")
    show(found.table)
    say(f"open the report in a browser: {page}")
    say(f"look at the clients here with: {program()} show {shlex.quote(str(tasks[-1].run_folder))}")


def tune_command(
    file: ComparisonFile,
    settings: SetOption = None,
    budget: Annotated[int, typer.Option(min=1, help="Trials for each method.")] = 8,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of a trial.", show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="<FILE>-tuned.toml")] = None,
    quiet: QuietOption = False,
) -> None:
    """Find good settings on validation data, with the same number of trials for every method."""
    from ..io.files import folder_name, sibling_path, write_toml
    from ..report.run_tables import trials_table
    from ..runs.comparison import load_comparison, tuned_settings
    from ..runs.tuning import tune
    from .live import print_trial

    place = sibling_path(file, "-tuned.toml") if out is None else out
    if place.exists():
        raise SettingError(f"{place} exists; choose another --out, or move it away")
    if place.resolve().parent != file.resolve().parent:
        raise SettingError(
            f"{place} is in another folder than {file}, and paths in an experiment start at its folder; choose an "
            f"--out in {file.parent}"
        )
    name = folder_name(place.stem, "file")  # runs with other settings go into another folder
    experiments = load_comparison(file, settings or ())
    found = tune(experiments, file.parent, budget, rounds, on_trial=(lambda *_: None) if quiet else print_trial)
    best = {label: trials[0].changes for label, trials in found.items()}
    write_toml(place, tuned_settings(file, settings or (), best) | {"name": name})
    if not quiet:
        show(trials_table(found))
        say(f"the best settings are in {place}; compare them with: {program()} compare {shlex.quote(str(place))}")


def run_live(tasks: list[RunTask], jobs: int | None, *, quiet: bool) -> dict[str, list[RunRecord]]:
    """Run them with a live table on a terminal, else a line for each that ends."""
    import torch

    from ..runs.comparison import run_tasks
    from .live import print_progress, show_tasks

    with show_tasks(tasks, quiet=quiet):
        silent = quiet or sys.stderr.isatty()
        return run_tasks(tasks, min(jobs or torch.get_num_threads(), len(tasks)), None if silent else print_progress)
