"""`ppfl site`: what the owner of a site does."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import SettingError
from ..parent_process import end_with_parent
from .program import program
from .terminal import WIDE, PlainGroup, make_console, say

site_app = typer.Typer(cls=PlainGroup, help="Take part in experiments over sites, with data that stay.",
                       no_args_is_help=True)  # fmt: skip
FORGET_SECONDS = 600.0  # to wait for a site that is in the middle of a round

SiteOption = Annotated[Path, typer.Option("--site", metavar="FILE", help="The config of the site.")]


@site_app.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(help="A folder for the site.")],
    name: Annotated[str, typer.Option(help="The name of the site, as the server will register it.")],
) -> None:
    """Make the folder of a site: a config to fill in, and its keys."""
    os.umask(0o077)
    from ..federation.secure_sums import public_key
    from ..federation.site_settings import init_site

    file = init_site(folder, name)
    say(f"fill in {file}: where the data are, and what may leave")
    say(f"then look at an experiment: {program()} site check EXPERIMENT --site {file}")
    say(f"public key for secure sums, for the other sites: {public_key(folder / 'secure.key')}")


@site_app.command("check")
def check_command(
    experiment: Annotated[Path, typer.Argument(help="An experiment in TOML.")],
    file: SiteOption = Path("site.toml"),
    approve: Annotated[bool, typer.Option("--approve", help="Let the site take part in it.")] = False,
) -> None:
    """Say what leaves the site in an experiment and what never does, try a step, and approve it; nothing is sent."""
    os.umask(0o077)
    from ..federation import site_tools
    from ..federation.site_settings import load_site
    from ..runs import load_experiment

    settings, base = load_site(file), file.parent.resolve()
    asked = load_experiment(experiment)
    found = site_tools.check_site(settings, base, asked)
    table = Table(box=SIMPLE_HEAD, show_header=False)
    for name, value in found.facts:
        table.add_row(name, value)
    make_console(wide=WIDE).print(table)
    for sentence in found.leaves:
        say(f"- {sentence}")
    for problem in found.problems:
        say(f"would be refused: {problem}", error=True)
    if found.problems:
        raise typer.Exit(2)
    if not approve:
        say(f"ready; approve it with: {program()} site check {experiment} --site {file} --approve")
        return
    say(f"approved: {site_tools.approve(settings, base, asked)}; delete this file to take it back")


@site_app.command("serve")
def serve_command(
    file: Annotated[Path, typer.Argument(help="The config of the site.")] = Path("site.toml"),
    socket: Annotated[Path | None, typer.Option(help="Another socket than that of the config.")] = None,
    with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Hold the site's data and answer what its SuperNode brings, until it is stopped."""
    os.umask(0o077)
    if with_parent:
        end_with_parent()
    from ..federation.service import SiteService, serve
    from ..federation.site_settings import load_site

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = load_site(file)
    if socket is not None:
        settings = settings.model_copy(update={"socket": socket.resolve()})
    service = SiteService(settings, file.parent.resolve())
    say(f"site {settings.name!r} answers at {service.base / settings.socket}; stop it with Ctrl-C")
    try:
        serve(service)
    except KeyboardInterrupt:
        say(f"site {settings.name!r} stopped; what it knows is in {file.parent / settings.state}")
    finally:
        service.close()


@site_app.command("forget")
def forget_command(
    client: Annotated[str | None, typer.Argument(help="The client, by its id in the data.", show_default=False)] = None,
    file: SiteOption = Path("site.toml"),
    run: Annotated[str | None, typer.Option(help="Delete this run from the store instead.", show_default=False)] = None,
) -> None:
    """Delete a client's state for good, and leave it out of all rounds to come; or delete an old run.

    In the middle of a round it waits for its end.
    """
    os.umask(0o077)
    from ..federation.service import open_store
    from ..federation.site_settings import load_site
    from ..federation.site_tools import forget_in_store
    from ..federation.store import forget_run

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
        runs = forget_in_store(store, settings, base, client)
    finally:
        store.close()
    say(f"the state of client {client} is deleted from {len(runs)} runs, and it takes part in no round from now on")
    say("what was sent stays sent: sums of earlier rounds hold its part, and the models too")
    say("a run that goes on leaves it out from the next round on, and its server forgets its name and membership")
    say("delete the client's rows from your data yourself")
