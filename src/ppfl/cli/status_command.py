"""`ppfl federation status`: how runs over sites are doing, from files alone."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .terminal import WIDE, make_console, say

if TYPE_CHECKING:
    from ..federation.federation_status import SiteTraffic

SITE_FILE = "site.toml"
MB = 1e6


def status_command(
    folder: Annotated[Path, typer.Argument(help="The folder of the server, of its runs, or of a site.")] = Path(),
) -> None:
    """Show runs, rounds, when sites were last heard, refusals and bytes; works while a run is going on."""
    file = folder / SITE_FILE if folder.is_dir() else folder
    if file.is_file():
        _show_site(file)
    else:
        _show_server(folder)


def _show_server(folder: Path) -> None:
    from ..federation.federation_status import server_status

    for run in server_status(folder):
        rounds = "" if run.rounds is None else f" of {run.rounds}"
        starts = f", started {run.starts} times" if run.starts > 1 else ""
        say(f"{run.folder}: {run.state}, round {run.round}{rounds}{starts}; run {run.run}")
        table = _table("site", "last heard", "MB to site", "MB to server", "refused", "last refusal")
        for name, traffic in run.sites.items():
            table.add_row(name, *_cells(traffic), traffic.reason)
        make_console(wide=WIDE).print(table)


def _show_site(file: Path) -> None:
    from ..federation.federation_status import site_status
    from ..federation.site_settings import load_site

    settings = load_site(file)
    found = site_status(settings, file.parent)
    if not found.runs:
        say(f"site {settings.name!r} has taken part in no run yet")
    else:
        table = _table("run", "rounds", "last sent", "MB to site", "MB to server", "refused", "MB stored", "models")
        for run in found.runs:
            stored, models = f"{run.stored / MB:.3g}", "yes" if run.has_models else "no"
            table.add_row(run.run, str(run.rounds), *_cells(run.traffic), stored, models)
        make_console(wide=WIDE).print(table)
    if found.forgotten:
        say(f"forgotten clients: {', '.join(found.forgotten)}")


def show_time(seconds: float) -> str:
    """A time as clocks here show it."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 or heading == "last refusal" else "right", overflow="fold")
    return table


def _cells(traffic: SiteTraffic) -> tuple[str, str, str, str]:
    last = "never" if traffic.last is None else show_time(traffic.last)
    return last, f"{traffic.to_site / MB:.3g}", f"{traffic.to_server / MB:.3g}", str(traffic.refused)
