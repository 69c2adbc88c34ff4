"""A page as a browser shows it: headless Chromium where there is one, else Python's own parser."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

SCRIPT = "document.documentElement.dataset.ran=1"  # leaves a mark on the page wherever it is run
HOST = "hostile.invalid"  # exists nowhere; whoever asks for it obeyed a page
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = frozenset({"meta", "img", "link", "input", "br", "hr", "base", "embed", "source"})
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
)  # fmt: skip


class ShownPage(NamedTuple):
    """What became of a page."""

    title: str
    text: str  # of all elements and attributes
    kinds: frozenset[str]  # "td" for elements, "td[class]" for their attributes
    requests: tuple[str, ...]  # to hosts that the page names; empty where no browser looked


def show(page: Path) -> ShownPage:
    """Open the page, let its scripts run, and read what is there then."""
    if CHROMIUM is None:
        return read(page.read_text(encoding="utf-8"))
    with TemporaryDirectory() as profile:
        log = Path(profile) / "requests.json"
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", f"--log-net-log={log}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, check=True, timeout=120)
        events = json.loads(log.read_text(encoding="utf-8"))["events"]
    asked = {str(event["params"].get("url", "")) for event in events if isinstance(event.get("params"), dict)}
    return read(done.stdout.decode(), tuple(sorted(url for url in asked if HOST in url)))


def read(html: str, requests: tuple[str, ...] = ()) -> ShownPage:
    """What is there in a page or a drawing that no browser has seen."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    title, text = ("".join(parts) for parts in (reader.title, reader.text))
    return ShownPage(title, text, frozenset(reader.kinds), requests)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.kinds: set[str] = set()
        self.text: list[str] = []
        self.title: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kinds |= {tag, *(f"{tag}[{name}]" for name, _ in attrs)}
        self.text += [f"\n{value}\n" for _, value in attrs if value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass
        self.text.append("\n")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["script"], ["style"]):  # which nobody sees
            return
        self.text.append(data)
        if self.open[-1:] == ["title"]:
            self.title.append(data)
