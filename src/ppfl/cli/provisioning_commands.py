"""`ppfl federation init` and `revoke`: folders to hand to the server and to each site, and keys that are taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import say


def init_command(
    file: Annotated[Path, typer.Argument(help="An experiment in TOML.")],
    sites: Annotated[list[str], typer.Option(metavar="NAME[,NAME...]", help="A name for each site.")],
    server_host: Annotated[str, typer.Option(metavar="HOST", help="The server, as sites reach it: a name or address.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write; in a folder of init, sites are added.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the server listens to sites.")] = 9092,
) -> None:
    """Make a folder for the server and one for each site, with keys and certificates."""
    from ..federation.provisioning import init_federation  # needs cryptography

    names = [name for part in sites for name in part.split(",") if name]
    init_federation(file, names, server_host, out, port=port)
    say(f"the server's folder is {out / 'server'}; keep {out / 'authority'} away from the network")
    for name in names:
        say(f"send {out / 'sites' / name} to site {name!r} over an encrypted channel, and then delete it here")


def revoke_command(
    site: Annotated[str, typer.Argument(help="The name of a site.")],
    out: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="The folder that init made.")],
) -> None:
    """Take a site's key back: the server refuses it from its next start."""
    from ..federation.provisioning import revoke_site  # needs cryptography

    revoke_site(out, site)
    say(f"the key of site {site!r} is revoked; restart the server, and give the other sites the new secure_sums.toml")
