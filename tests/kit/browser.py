"""Chromium without a window, driven by the WebDriver protocol over HTTP on this machine."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars")  # fmt: skip


class Browser:
    """One window with one page at a time."""

    def __init__(self, server: str, options: dict[str, Any]) -> None:
        self.server, self.session = server, ""
        self.session = f"/session/{self._call('POST', '/session', options)['sessionId']}"

    def _call(self, way: str, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        asked = Request(self.server + path, data, {"Content-Type": "application/json"}, method=way)
        with urlopen(asked, timeout=120) as answer:
            return json.load(answer)["value"]

    def post(self, path: str, **content: Any) -> Any:
        return self._call("POST", self.session + path, content)

    def open(self, page: Path, *, width: int = 1440, height: int = 900) -> float:
        """Open a page and wait until it says that it is ready; the seconds that its own clock counted until then."""
        self.post("/window/rect", width=width, height=height)
        self.emulate(width, height)
        self.logs()
        self.requests()
        self.post("/url", url=page.resolve().as_uri())
        until = time.monotonic() + 60
        while self.run("return document.body.dataset.ready ?? ''") != "yes":
            assert time.monotonic() < until, f"the page is not ready: {self.logs()}"
            time.sleep(0.02)
        return float(self.run("return performance.now()")) / 1000

    def emulate(self, width: int, height: int, *, dark: bool = False) -> None:
        """A screen of this size, which a window without one may not be made as small as."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._chrome("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        self._chrome("Emulation.setEmulatedMedia", scheme)

    def _chrome(self, command: str, parameters: dict[str, Any]) -> Any:
        return self.post("/goog/cdp/execute", cmd=command, params=parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.post("/execute/sync", script=script, args=list(arguments))

    def picture(self, place: Path) -> None:
        """The whole page as PNG."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 12000), "scale": 1}
        shot = self._chrome("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        place.write_bytes(base64.b64decode(shot["data"]))

    def logs(self) -> list[str]:
        """What the console said since the last call: errors and warnings."""
        return [entry["message"] for entry in self.post("/se/log", type="browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for since the last call."""
        entries = (json.loads(entry["message"])["message"] for entry in self.post("/se/log", type="performance"))
        return [one["params"]["request"]["url"] for one in entries if one["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        self._call("DELETE", self.session)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; the test is skipped where this machine has none."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs chromium and chromium-driver")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while "successfully" not in (line := process.stdout.readline()):
                assert line, "chromedriver ended"
            chrome = {"binary": browser, "args": list(OPTIONS)}
            wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
            with closing(Browser(f"http://127.0.0.1:{port}", {"capabilities": {"alwaysMatch": wanted}})) as opened:
                yield opened
        finally:
            process.terminate()
