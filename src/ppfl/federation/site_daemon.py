"""The process that runs at a site: it holds the data and answers what its SuperNode brings, until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .federation_errors import FederationError
from .flower_processes import Processes, start_supernode, write_secret
from .flower_site import POLL_SECONDS, SuperNodeMessages
from .site_service import SiteService
from .site_settings import SiteSettings

START_SECONDS = 180.0


class Connection(NamedTuple):
    """How a site reaches the server, and proves who it is."""

    superlink: str  # host:port
    authority: Path  # the certificate that the server's must be signed by
    private_key: Path


def connection_of(settings: SiteSettings, base: Path) -> Connection:
    """From the site's own settings."""
    given = {name: getattr(settings, name) for name in ("superlink", "root_certificate", "private_key")}
    if missing := [name for name, value in given.items() if value is None]:
        raise FederationError(f"the config of site {settings.name!r} lacks {', '.join(missing)}; set them in site.toml")
    return Connection(given["superlink"], base / given["root_certificate"], base / given["private_key"])


def run_site(settings: SiteSettings, base: Path, on_message: Callable[[int], None] | None = None) -> None:
    """Serve until the process is stopped; an error where the SuperNode ends, as with a key that nobody registered."""
    import httpx

    connection = connection_of(settings, base)
    service = SiteService(settings, base)
    work = base / f"{settings.name}.run"
    with Processes(work) as processes:
        write_secret(work / "secret")
        node = start_supernode(processes, *connection, work / "secret")
        messages = SuperNodeMessages(node, service.answer)
        began, served = time.monotonic(), 0
        while True:
            processes.refuse_dead()
            try:
                took = messages.serve_one()
            except httpx.HTTPError as error:  # the SuperNode is just starting, or dying
                if not served and time.monotonic() - began > START_SECONDS:
                    raise FederationError(
                        f"the SuperNode of site {settings.name!r} does not answer ({error})"
                    ) from None
                took = False
            if took:
                served += 1
                if on_message is not None:
                    on_message(served)
            else:
                time.sleep(POLL_SECONDS)
