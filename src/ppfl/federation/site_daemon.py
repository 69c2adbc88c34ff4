"""The process that runs at a site: it holds the data and answers what its SuperNode brings, until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .federation_errors import FederationError
from .flower_processes import Processes, start_supernode
from .flower_site import POLL_SECONDS, SiteConnection, SuperNodeMessages, last_node_id, sign_off
from .private_files import write_secret
from .site_service import SiteService
from .site_settings import SiteSettings

START_SECONDS = 180.0  # in which a SuperNode must have been let in
PAUSE_SECONDS = 5.0  # before it is started again
STILL_ONLINE = "[code: 2004]"  # says a SuperLink that has not noticed yet that the SuperNode before was killed


def connection_of(settings: SiteSettings, base: Path) -> SiteConnection:
    """From the site's own settings."""
    given = {name: getattr(settings, name) for name in ("superlink", "root_certificate", "private_key")}
    if missing := [name for name, value in given.items() if value is None]:
        raise FederationError(f"the config of site {settings.name!r} lacks {', '.join(missing)}; set them in site.toml")
    return SiteConnection(given["superlink"], base / given["root_certificate"], base / given["private_key"])


def run_site(settings: SiteSettings, base: Path, on_message: Callable[[int], None] | None = None) -> None:
    """Serve until the process is stopped; an error where the SuperNode ends, as with a key that nobody registered."""
    import httpx

    connection = connection_of(settings, base)
    service = SiteService(settings, base)
    work = base / f"{settings.name}.run"
    with Processes(work) as processes:
        messages, end = _start(processes, connection, service, work), time.monotonic() + START_SECONDS
        served = 0
        while True:
            try:
                processes.refuse_dead()
                took = messages.serve_one()
            except httpx.HTTPError as error:  # the SuperNode is just starting, or dying
                if not served and time.monotonic() > end:
                    raise FederationError(
                        f"the SuperNode of site {settings.name!r} does not answer ({error})"
                    ) from None
                took = False
            except FederationError:
                said = " ".join(processes.last_lines("supernode"))
                if STILL_ONLINE not in said or time.monotonic() > end:
                    raise
                time.sleep(PAUSE_SECONDS)
                messages, took = _start(processes, connection, service, work), False
            if took:
                served += 1
                if on_message is not None:
                    on_message(served)
            else:
                time.sleep(POLL_SECONDS)


def _start(processes: Processes, connection: SiteConnection, service: SiteService, work: Path) -> SuperNodeMessages:
    """Start the SuperNode; one that was killed before is signed off first."""
    write_secret(work / "secret")
    if (known := last_node_id(work / "supernode.log")) is not None:
        sign_off(connection, known)
    node = start_supernode(processes, *connection, work / "secret")
    return SuperNodeMessages(node, service.answer)
