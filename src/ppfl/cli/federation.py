"""`ppfl federation`: the same experiment over sites that hold their data, at the server."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .program import program
from .terminal import WIDE, PlainGroup, make_console, say, show

if TYPE_CHECKING:
    from ..federation.exchange import Timeouts
    from ..federation.ledger import Traffic
    from ..runs import Experiment, RunRecord

federation_app = typer.Typer(
    cls=PlainGroup, help="Run an experiment over real sites, with Flower.", no_args_is_help=True
)
MB = 1e6

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as population.k=4.")
]
Out = Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/<name>")]
Deadline = Annotated[float, typer.Option(min=1, help="Seconds to wait for sites in one exchange.")]
AtLeast = Annotated[
    int | None, typer.Option(min=1, help="Sites without which a round cannot go on.", show_default="more than half")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@federation_app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(help="An experiment in TOML.")],
    superlink: Annotated[str, typer.Option(metavar="NAME", help="A connection of Flower's config.toml.")],
    sites: Annotated[int, typer.Option(min=1, help="How many sites take part; it never begins with fewer.")],
    settings: Settings = None,
    out: Out = None,
    deadline: Deadline = 600,
    at_least: AtLeast = None,
    secure: Annotated[bool, typer.Option("--secure-sums", help="Read only totals over sites.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train over the sites of a SuperLink; goes on where the run was stopped."""
    os.umask(0o077)
    from ..federation.flower_app import run_app
    from ..runs import load_run

    experiment, place = _experiment(file, settings, out)
    command = [program(), "federation", "run", str(file), "--superlink", superlink, "--sites", str(sites)]
    with _resumable([*command, *_changes(settings), "--out", str(place)]):
        run_app(
            experiment, place, superlink, sites, base=file.parent.resolve(), secure=secure,
            timeouts=_timeouts(deadline, at_least), say=_teller(quiet=quiet),
        )  # fmt: skip
    records = [load_run(place / f"seed-{seed}") for seed in experiment.seeds]
    _show(records, place, experiment.name, quiet=quiet)


@federation_app.command("up")
def up_command(
    file: Annotated[Path, typer.Argument(help="An experiment in TOML.")],
    sites: Annotated[int, typer.Option(min=1, help="Sites to split the experiment's clients over.")] = 3,
    configs: Annotated[
        list[Path] | None, typer.Option("--site", help="The config of a site, instead of --sites; may be repeated.")
    ] = None,
    settings: Settings = None,
    out: Out = None,
    deadline: Deadline = 600,
    at_least: AtLeast = None,
    quiet: Quiet = False,
) -> None:
    """Try a federation on this machine: SuperLink, SuperNodes and sites, with TLS; goes on where it was stopped."""
    os.umask(0o077)
    from ..federation.trial import run_trial

    experiment, place = _experiment(file, settings, out)
    over = [part for config in configs or () for part in ("--site", str(config))] or ["--sites", str(sites)]
    with _resumable([program(), "federation", "up", str(file), *over, *_changes(settings), "--out", str(place)]):
        records = run_trial(
            experiment, place, file.parent.resolve(), configs or sites, timeouts=_timeouts(deadline, at_least),
            say=_teller(quiet=quiet),
        )  # fmt: skip
    _show(records, place, experiment.name, quiet=quiet)


@federation_app.command("status")
def status_command(
    folder: Annotated[Path, typer.Argument(help="The folder of the server's runs, or of a site.")] = Path(),
) -> None:
    """Show runs, rounds, scores, when sites were last heard and what was refused; works while a run goes on."""
    file = folder / "site.toml" if folder.is_dir() else folder
    if file.is_file():
        _show_site(file)
    else:
        _show_server(folder)


def _experiment(file: Path, settings: list[str] | None, out: Path | None) -> tuple[Experiment, Path]:
    """The experiment and its folder."""
    from ..federation.flower_app import require_flower
    from ..runs import load_experiment

    require_flower()
    experiment = load_experiment(file, settings or ())
    return experiment, Path("runs") / experiment.name if out is None else out


def _timeouts(deadline: float, at_least: int | None) -> Timeouts:
    from ..federation.exchange import Timeouts

    return Timeouts(deadline=deadline, at_least=at_least)


def _changes(settings: list[str] | None) -> list[str]:
    return [part for setting in settings or () for part in ("--set", setting)]


def _resumable(command: list[str]):  # type: ignore[no-untyped-def]
    from .program import resumable

    return resumable(command)


def _teller(*, quiet: bool):  # type: ignore[no-untyped-def]
    return (lambda line: None) if quiet else say


def _show(records: list[RunRecord], place: Path, name: str, *, quiet: bool) -> None:
    """The table and the report of runs that are done."""
    from ..report import Comparison
    from ..report.run_tables import seed_table
    from .estimator_output import show_estimators

    found = Comparison.of(records)
    page = found.report(place, f"Federation: {name}")
    if not quiet:
        show(seed_table(found))
        for record in records:
            if absent := record.scores.get("unscored"):
                say(f"the scores of seed {record.seed} leave out {', '.join(absent)}, which did not answer")
        say(_time_split(records[0].metrics))
        say(f"runs are in {place}, the report is {page}")
    show_estimators(records, place, quiet=quiet)


def _time_split(metrics: list[dict[str, float]]) -> str:
    """Where the seconds of a round went; the first is apart, as it may be many exchanges that find a start."""
    rounds = metrics[1:] or metrics
    sites, carried, server = (
        sum(one.get(f"seconds_{part}") or 0.0 for one in rounds) / max(1, len(rounds))
        for part in ("sites", "transport", "server")
    )
    whole = sites + carried + server
    return (
        f"a round took {whole:.1f} s: {sites:.2f} s work at the slowest site, {carried:.1f} s "
        f"({carried / max(whole, 1e-9):.0%}) transport by Flower, {server:.2f} s at the server"
    )


def _show_server(folder: Path) -> None:
    from ..federation.ledger import traffic
    from ..io.files import read_json
    from ..runs import find_runs, load_run

    runs = [path.with_name(path.name.removesuffix(".federation")) for path in sorted(folder.rglob("*.federation"))]
    if not runs:
        say(f"{folder} has no run over sites yet")
    for path in runs:
        notes = path.with_name(f"{path.name}.federation")
        about, record = read_json(notes / "federation.json"), load_run(path) if path in find_runs(path.parent) else None
        state = "begins" if record is None else "finished" if record.finished else f"round {record.rounds_done}"
        starts = f", started {about['starts']} times" if about["starts"] > 1 else ""
        say(f"{path}: {state}{starts}; run {about['run']}")
        last = {} if record is None or not record.metrics else record.metrics[-1]
        table = _table("site", "in the last round", "last heard", "MB to server", "refused", "last reason")
        for name, found in traffic(notes / "ledger.jsonl", "site").items():
            table.add_row(name, "no" if name in (last.get("absent") or {}) else "yes", *_cells(found), found.reason)
        make_console(wide=WIDE).print(table)
        shown = [f"{key} {last[key]:.4g}" for key in ("loss", "accuracy", "test_loss") if last.get(key) is not None]
        if shown:
            say(f"round {last['round']}: {', '.join(shown)}")


def _show_site(file: Path) -> None:
    from ..federation.ledger import Traffic, traffic, verify
    from ..federation.service import open_store
    from ..federation.site_settings import load_site

    settings, base = load_site(file), file.parent
    store = open_store(settings, base)
    try:
        runs, with_models, forgotten = store.runs(), store.evaluated_runs(), store.forgotten()
    finally:
        store.close()
    lines, found = verify(base / settings.ledger), traffic(base / settings.ledger, "run")
    table = _table("run", "rounds", "last sent", "MB to server", "refused", "last reason", "MB stored", "models")
    for run, (rounds, stored) in runs.items():
        known = found.get(run, Traffic())
        models = "yes" if run in with_models else "no"
        table.add_row(run, str(rounds), *_cells(known), known.reason, f"{stored / MB:.3g}", models)
    make_console(wide=WIDE).print(table)
    say(f"the ledger has {lines} lines, and none was changed")
    if forgotten:
        say(f"forgotten clients: {', '.join(forgotten)}")


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 or "reason" in heading else "right", overflow="fold")
    return table


def _cells(found: Traffic) -> tuple[str, str, str]:
    last = "never" if found.last is None else f"{datetime.fromtimestamp(found.last):%Y-%m-%d %H:%M:%S}"
    return last, f"{found.bytes / MB:.3g}", str(found.failed)
