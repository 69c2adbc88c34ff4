"""`ppfl`: its commands, and how its errors look."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from ..errors import PPFLError, RankError, SettingError
from ..paper import STUDIES
from .export_model import export_command, predict_command
from .federation import federation_app
from .glm import glm_command
from .program import program
from .site import site_app
from .stop_signals import announce, exit_code
from .terminal import WIDE, PlainGroup, make_console, safe_output, say

if TYPE_CHECKING:  # commands import what they need when they run: `--help` must not wait for torch
    from ..runs import RunRecord
    from ..runs.comparison import RunTask

app = typer.Typer(
    cls=PlainGroup,
    help="Population personalized federated learning: K shared models, and a membership for every client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WIDEST = 200


def run_command_line(arguments: Sequence[str] | None) -> None:
    """Bad input ends in one line and exit code 2, never in a traceback."""
    with safe_output():
        try:
            app(args=None if arguments is None else list(arguments))
        except PPFLError as error:
            from ..server import is_first_process

            if is_first_process() or isinstance(error, RankError):  # of many that fail alike, one says so
                say(f"error: {' '.join(str(error).split())}", error=True)
            sys.exit(2)
        except OSError as error:  # of a path that no file system has, a disk that is gone
            path = error.filename if isinstance(error.filename, str) else "a file"
            say(f"error: {path[:200]} cannot be used ({error.strerror or error}); check the path", error=True)
            sys.exit(2)
        except UnicodeEncodeError as error:  # click asks for a file of that name, and no file can have it
            say(f"error: {str(error.object)[:200]!r} cannot be the name of a file; check the path", error=True)
            sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"ppfl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(help="An experiment in TOML.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as population.k=4.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/<name>")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was stopped.")] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Rounds between checkpoints.", show_default="by time")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Run an experiment, one folder per seed."""
    from ..runs import load_experiment, run
    from ..server import is_first_process
    from .estimator_output import show_estimators
    from .progress import show_progress
    from .run_tables import result_table

    experiment = load_experiment(file, settings or ())
    quiet = quiet or not is_first_process()
    place = Path("runs") / experiment.name if out is None else out
    changes = [part for setting in settings or () for part in ("--set", setting)]
    with (
        resumable([program(), "run", str(file), *changes, "--out", str(place), "--resume"]),
        show_progress(experiment, quiet=quiet) as on_round_end,
    ):
        records = run(
            experiment,
            place,
            base=file.parent,
            resume=resume,
            checkpoint_every=checkpoint_every,
            on_round_end=on_round_end,
        )
    if not quiet:
        seeds = [str(record.seed) for record in records]
        make_console().print(result_table(records, "seed", seeds, summarise=True))
        say(f"runs are in {place}; look at one with: {program()} show {shlex.quote(str(records[0].folder))}")
    show_estimators(records, place, quiet=quiet)


@app.command("compare")
def compare_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Comparisons or experiments in TOML.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of all methods.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/<name of the first>")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Compare methods on the same data, seed by seed; finished runs are not run again."""
    from ..io.files import checked_name
    from ..report import write_report
    from ..runs.comparison import load_comparison, refuse_twice, tasks_of
    from ..runs.load import load_settings
    from .run_tables import comparison_table

    name = checked_name(load_settings(files[0], settings or ())["name"], files[0])
    place = Path("runs") / name if out is None else out
    tasks: list[RunTask] = []
    for file in files:
        tasks += tasks_of(load_comparison(file, settings or ()), place, file.parent)
    refuse_twice(tasks)
    changes = [part for setting in settings or () for part in ("--set", setting)]
    with resumable([program(), "compare", *map(str, files), *changes, "--out", str(place)]):
        records = _run_live(tasks, jobs, quiet=quiet)
    folders, labels = [task.run_folder for task in tasks], [task.label for task in tasks]
    page = write_report(folders, place, f"Methods compared: {place.name}", labels)
    if not quiet:
        make_console(wide=WIDE).print(comparison_table(records))
        say(f"the report is {page}")


@app.command("tune")
def tune_command(
    file: Annotated[Path, typer.Argument(help="A comparison or an experiment in TOML.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of all methods.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Trials for each method.")] = 8,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of a trial.", show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="<FILE>-tuned.toml")] = None,
) -> None:
    """Find settings on validation data, with the same number of trials for every method."""
    from ..io.files import folder_name, sibling_path, write_toml
    from ..runs.comparison import load_comparison, tuned_settings
    from ..runs.tuning import tune
    from .trials import print_trial, trials_table

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
    found = tune(experiments, file.parent, budget, rounds, on_trial=print_trial)
    best = {label: trials[0].changes for label, trials in found.items()}
    write_toml(place, tuned_settings(file, settings or (), best) | {"name": name})
    make_console(wide=WIDE).print(trials_table(found))
    say(f"the best of each are in {place}; compare them with: {program()} compare {shlex.quote(str(place))}")


@app.command("reproduce")
def reproduce_command(
    name: Annotated[str, typer.Argument(metavar="STUDY", help=f"One of {', '.join(STUDIES)}, or a TOML file.")],
    cases: Annotated[list[str] | None, typer.Option("--case", help="A data set of the study; may be repeated.")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="A method; may be repeated.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help='Change a setting, such as "seeds=[0]".')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/<study>")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Run one of the paper's studies and show our figures beside the paper's; finished runs are not run again.

    Data come from the folder in PPFL_DATA.
    """
    from ..paper import load_study, study_tables
    from .reproduce import refuse_missing_data, tasks_of_study, terminal_table, write_study

    study = load_study(name, settings or (), cases or (), methods or ())
    place = Path("runs") / study.runs if out is None else out
    options = {"--case": cases, "--method": methods, "--set": settings}
    chosen = [part for option, values in options.items() for value in values or () for part in (option, value)]
    command = [program(), "reproduce", name, *chosen, *(["--out", str(out)] if out else [])]
    tasks = tasks_of_study(study, place)
    refuse_missing_data(study, tasks)
    with resumable(command):
        records = _run_cases(tasks, jobs, quiet=quiet)
    page = write_study(study, tasks, records, place, shlex.join(["ppfl", *command[1:]]))
    if not quiet:
        console = make_console(wide=WIDEST)
        for table in study_tables(study, records):
            console.print(terminal_table(table))
        say(f"written to {page}")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, a folder of runs, or of a comparison.")],
) -> None:
    """Show how a run went, and who the clients are; of a comparison, the methods side by side."""
    from ..runs import find_runs, load_run
    from .heatmap import membership_table
    from .run_tables import comparison_table, metrics_table, summary_line

    folders = find_runs(path)
    methods = {folder.parent.name: [run for run in folders if run.parent == folder.parent] for folder in folders}
    if len(methods) > 1:
        records = {name: [load_run(run) for run in runs] for name, runs in methods.items()}
        make_console(wide=WIDE).print(comparison_table(records))
        say(f"look at one run with: {program()} show {shlex.quote(str(folders[0]))}")
        return
    record = load_run(folders[0])
    console = make_console()
    say(summary_line(record))
    console.print(metrics_table(record))
    if record.memberships is not None:
        console.print(membership_table(record, utf8=console.encoding.startswith("utf")))
    if others := [str(folder) for folder in folders[1:]]:
        say(f"other runs here: {', '.join(others)}")


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Compare Local, FedAvg and PPFL on handwritten digits; takes less than a minute and needs no download."""
    from . import demo

    with resumable([program(), "demo", "--out", str(out), "--seed", str(seed)]):
        demo.run_demo(out, seed)


app.command("export")(export_command)
app.command("predict")(predict_command)
app.command("glm")(glm_command)
app.add_typer(federation_app, name="federation")
app.add_typer(site_app, name="site")


def _run_cases(
    tasks: dict[str, list[RunTask]], jobs: int | None, *, quiet: bool
) -> dict[str, dict[str, list[RunRecord]]]:
    """One after the other; a case that fails does not stop the others, and is reported at the end."""
    records, failed = {}, []
    for case, of_case in tasks.items():
        try:
            records[case] = _run_live(of_case, jobs, quiet=quiet)
        except SettingError as error:
            failed.append(f"{case}: {error}")
    if failed:
        raise SettingError("; ".join(failed))
    return records


def _run_live(tasks: list[RunTask], jobs: int | None, *, quiet: bool) -> dict[str, list[RunRecord]]:
    """Run them with a live table on a terminal, else a line for each that ends."""
    import torch

    from ..runs.comparison import run_tasks
    from .compare import print_progress, show_tasks

    with show_tasks(tasks, quiet=quiet):
        silent = quiet or sys.stderr.isatty()
        return run_tasks(tasks, min(jobs or torch.get_num_threads(), len(tasks)), None if silent else print_progress)


@contextmanager
def resumable(command: Sequence[str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end in one line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from ..runs import Interrupted
        from ..server import is_first_process

        if is_first_process():
            where = f" after round {stop.round} of {stop.rounds}" if isinstance(stop, Interrupted) else ""
            say(f"stopped{where}; resume with: {shlex.join(command)}", error=True)
        announce()
        raise typer.Exit(exit_code()) from None
