"""`ppfl federation check` and `forget`: what the owner of a site does without the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import PPFLError, SettingError
from .program import program
from .terminal import WIDE, make_console, say

FORGET_SECONDS = 600.0  # to wait for a site that is in the middle of a round

SiteFile = Annotated[Path, typer.Argument(help="The config of the site.")]


def check_command(
    file: SiteFile = Path("site.toml"),
    experiment: Annotated[
        Path | None, typer.Option(help="The experiment.", show_default="experiment.toml beside the config")
    ] = None,
) -> None:
    """Dry-run at a site: its data and config against the experiment, and one local step; nothing is sent."""
    from ..federation.flower_processes import require_flower

    require_flower()
    from ..federation.site_check import check_site
    from ..federation.site_settings import load_site
    from ..runs import load_experiment

    settings, asked = load_site(file), file.parent / "experiment.toml" if experiment is None else experiment
    found = check_site(settings, file.parent.resolve(), load_experiment(asked, allow=settings.allow))
    table = Table(box=SIMPLE_HEAD, show_header=False)
    for name, value in found.facts:
        table.add_row(name, value)
    make_console(wide=WIDE).print(table)
    for problem in found.problems:
        say(f"would be refused: {problem}", error=True)
    if found.problems:
        raise typer.Exit(2)
    say(f"ready: start the site with {program()} federation site {file}")


def forget_command(
    client: Annotated[str | None, typer.Argument(help="The client, by its id.", show_default=False)] = None,
    file: Annotated[Path, typer.Option("--site", metavar="FILE", help="The config of the site.")] = Path("site.toml"),
    run: Annotated[str | None, typer.Option(help="Delete this run from the store instead.", show_default=False)] = None,
) -> None:
    """At a site: delete a client's state for good, and leave it out of all rounds to come; or delete an old run.

    In the middle of a round it waits for its end.
    """
    from ..federation.flower_processes import require_flower

    require_flower()
    from ..federation.forgetting import forget_client, forget_run
    from ..federation.site_data import SiteData
    from ..federation.site_models import open_store
    from ..federation.site_settings import load_site
    from ..report.theme import plural

    if (client is None) == (run is None):
        raise SettingError("name one thing to forget: a client, or a run with --run RUN")
    settings, base = load_site(file), file.parent.resolve()
    store = open_store(settings, base, FORGET_SECONDS)
    try:
        if run is not None:
            forget_run(store, run)
            say(f"run {run} is deleted from {base / settings.state}; its models cannot be used here any more")
            return
        assert client is not None
        try:
            others = tuple(SiteData(settings, base).ids)
        except PPFLError:  # its rows may be gone already, and the data with them
            others = ()
        name, runs = forget_client(store, client, settings.name, others)
    finally:
        store.close()
    deleted = plural(len(runs), "run")
    say(f"the state of client {name} is deleted from {deleted}, and it takes part in no round from now on")
    say("it cannot be undone, and what was sent stays sent: sums of earlier rounds hold its part, and the models too")
    say("a server that reads memberships has its last one until the next round, and its run folder keeps earlier ones")
    say("delete the client's rows from your data yourself, then restart the site")
