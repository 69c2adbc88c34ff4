"""The process that runs at a site: it holds the data and answers what its SuperNode brings, until it is stopped."""

from __future__ import annotations

import logging
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
SUPERNODE = "supernode"
LET_IN = "SuperNode ID:"  # says a SuperNode that was let in
STILL_ONLINE = "[code: 2004]"  # says a SuperLink that has not noticed yet that the SuperNode before was killed
PORT_TAKEN = ("address already in use", "Runtime HTTP API failed to start")  # by another program in the meantime

log = logging.getLogger("ppfl.federation")


def connection_of(settings: SiteSettings, base: Path) -> SiteConnection:
    """From the site's own settings."""
    given = {name: getattr(settings, name) for name in ("superlink", "root_certificate", "private_key")}
    if missing := [name for name, value in given.items() if value is None]:
        raise FederationError(f"the config of site {settings.name!r} lacks {', '.join(missing)}; set them in site.toml")
    return SiteConnection(given["superlink"], base / given["root_certificate"], base / given["private_key"])


def run_site(settings: SiteSettings, base: Path, on_message: Callable[[int], None] | None = None) -> None:
    """Serve until the process is stopped; an error where the SuperLink does not let the SuperNode in, as with a key
    that nobody registered. A SuperNode that ends later, or waits for a reply that will not come, is started again."""
    import httpx

    connection = connection_of(settings, base)
    service = SiteService(settings, base)
    work = base / f"{settings.name}.run"
    with Processes(work) as processes:
        node, served = _SuperNode(processes, connection, service, work), 0
        while True:
            try:
                processes.refuse_dead()
                took = node.messages.serve_one()
            except httpx.HTTPError as error:
                took = False
                if node.messages.answered:  # it may have given us a task that we know nothing of
                    node.start_again(str(error))
                elif time.monotonic() > node.end:
                    raise FederationError(
                        f"the SuperNode of site {settings.name!r} does not answer ({error})"
                    ) from None
            except FederationError as error:
                if not node.may_start_again:
                    raise
                node.start_again(str(error))
                took = False
            if took:
                served += 1
                if on_message is not None:
                    on_message(served)
            else:
                time.sleep(POLL_SECONDS)


class _SuperNode:
    """The SuperNode of a site, which may be started again."""

    def __init__(self, processes: Processes, connection: SiteConnection, service: SiteService, work: Path) -> None:
        self._processes, self._connection, self._service = processes, connection, service
        self._work, self._log = work, work / "supernode.log"
        self.end = time.monotonic() + START_SECONDS
        self._start()

    @property
    def may_start_again(self) -> bool:
        """Whether it was let in before, or was kept out by something that passes."""
        passes = any(map(self._said, (STILL_ONLINE, *PORT_TAKEN)))
        return self._said(LET_IN) or (passes and time.monotonic() < self.end)

    def start_again(self, reason: str) -> None:
        """After a pause, with a port of its own."""
        log.warning("the SuperNode is started again: %s", reason)
        if self._said(LET_IN):
            self.end = time.monotonic() + START_SECONDS
        self._processes.end(SUPERNODE)
        time.sleep(PAUSE_SECONDS)
        self._start()

    def _said(self, words: str) -> bool:
        """Since it was started last."""
        with self._log.open("rb") as opened:
            opened.seek(self._said_before)
            return words.encode() in opened.read()

    def _start(self) -> None:
        """One that was killed before is signed off first."""
        write_secret(self._work / "secret")
        if (known := last_node_id(self._log)) is not None:
            sign_off(self._connection, known)
        self._said_before = self._log.stat().st_size if self._log.is_file() else 0
        node = start_supernode(self._processes, *self._connection, self._work / "secret")
        self.messages = SuperNodeMessages(node, self._service.answer)
