"""`ppfl federation`: the same experiment over sites that hold their data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..parent_process import end_with_parent
from .program import program, resumable
from .provisioning_commands import init_command, revoke_command
from .site_commands import check_command, forget_command
from .status_command import status_command
from .terminal import PlainGroup, say, show

if TYPE_CHECKING:
    from ..runs import RunRecord

federation_app = typer.Typer(
    cls=PlainGroup, help="Run an experiment over real sites, with Flower.", no_args_is_help=True
)
federation_app.command("init")(init_command)
federation_app.command("revoke")(revoke_command)
federation_app.command("check")(check_command)
federation_app.command("status")(status_command)
federation_app.command("forget")(forget_command)


@federation_app.command("up")
def up_command(
    file: Annotated[Path, typer.Argument(help="An experiment in TOML.")],
    sites: Annotated[int, typer.Option(min=1, help="Sites to split the experiment's clients over.")] = 3,
    configs: Annotated[
        list[Path] | None, typer.Option("--site", help="The config of a site, instead of --sites; may be repeated.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as population.k=4.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/<name>")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was stopped.")] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds to wait for sites in one exchange.")] = 600,
    at_least: Annotated[int, typer.Option(min=1, help="Sites without which a round cannot go on.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Try a federation on this machine: SuperLink, SuperNodes and sites, with TLS and authentication."""
    from ..federation.flower_processes import require_flower

    require_flower()
    from ..federation.local_federation import run_local_federation
    from ..federation.site_mail import Patience
    from ..runs import load_experiment
    from .live import show_progress

    experiment = load_experiment(file, settings or ())
    place = Path("runs") / experiment.name if out is None else out
    changes = [part for setting in settings or () for part in ("--set", setting)]
    over = [part for config in configs or () for part in ("--site", str(config))] or ["--sites", str(sites)]
    command = [program(), "federation", "up", str(file), *over, *changes, "--out", str(place), "--resume"]
    with resumable(command), show_progress(experiment, quiet=quiet) as on_round_end:
        records = run_local_federation(
            experiment, place, file.parent.resolve(), configs or sites, resume=resume, on_round_end=on_round_end,
            patience=Patience(deadline=deadline, at_least=at_least),
        )  # fmt: skip
    _show(records, place, experiment.name, quiet=quiet)


@federation_app.command("server")
def server_command(
    folder: Annotated[Path, typer.Argument(help="The server's folder, which init made.")],
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="FOLDER/runs")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was stopped.")] = False,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
    secure: Annotated[
        bool, typer.Option("--secure-sums", help="Read only totals over sites; all sites must have it so.")
    ] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds to wait for sites in one exchange.")] = 600,
    at_least: Annotated[int, typer.Option(min=1, help="Sites without which a round cannot go on.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Run at the server: wait for the sites, and train."""
    from ..federation.flower_processes import require_flower

    require_flower()
    from ..federation.provisioning import load_secure_sums, registered_sites
    from ..federation.server_run import run_server
    from ..federation.site_mail import Patience
    from ..runs import load_experiment
    from .live import show_progress

    experiment, place = load_experiment(folder / "experiment.toml"), folder / "runs" if out is None else out
    names = registered_sites(folder)
    if not quiet:
        say(f"waiting for the sites {', '.join(names)}; stop with Ctrl-C")
        if secure:
            say(load_secure_sums(folder / "secure_sums.toml").settings.describe(len(names)))
    command = [program(), "federation", "server", str(folder), "--host", host, "--out", str(place), "--resume"]
    command += ["--secure-sums"] if secure else []
    with resumable(command), show_progress(experiment, quiet=quiet) as on_round_end:
        records = run_server(
            folder, place, host=host, secure=secure, resume=resume, on_round_end=on_round_end,
            patience=Patience(deadline=deadline, at_least=at_least),
        )  # fmt: skip
    _show(records, place, experiment.name, quiet=quiet)


def _show(records: list[RunRecord], place: Path, name: str, *, quiet: bool) -> None:
    """The table and the report of runs that are done."""
    from ..report import Comparison
    from ..report.run_tables import seed_table
    from .estimator_output import show_estimators

    found = Comparison.of(records)
    page = found.report(place, f"Federation: {name}")
    if not quiet:
        show(seed_table(found))
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
        f"({carried / max(whole, 1e-9):.0%}) transport by Flower, {server:.2f} s at the server; the first round took "
        f"{sum(metrics[0].get(f'seconds_{part}') or 0.0 for part in ('sites', 'transport', 'server')):.1f} s"
    )


@federation_app.command("site")
def site_command(
    file: Annotated[Path, typer.Argument(help="The config of the site, site.toml.")],
    with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Run at a site: hold its data and answer the server, until it is stopped."""
    if with_parent:
        end_with_parent()
    from ..federation.flower_processes import require_flower

    require_flower()
    from ..federation.site_daemon import run_site
    from ..federation.site_settings import load_site

    settings = load_site(file)
    say(f"site {settings.name!r} serves {settings.superlink}; stop it with Ctrl-C")
    try:
        run_site(settings, file.parent.resolve(), lambda served: say(f"{served} messages answered"))
    except KeyboardInterrupt:
        say(f"site {settings.name!r} stopped; what it knows is in {file.parent / settings.state}")
