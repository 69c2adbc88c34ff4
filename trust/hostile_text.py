"""Hostile ids, labels, columns, classes, file names and titles through every command and both pages.

Survives: exit code 0 or 2, no traceback, no raw control character on standard output or error, every text shown
visibly; in the pages no script ran, no element or attribute that a harmless page lacks, no request.
"""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import browser
import numpy as np
import pandas as pd
import tomli_w
from browser import HOST, SCRIPT
from trial import Trial

from ppfl.cli import main
from ppfl.io.text import visible

BATCH = 24  # texts that share their runs
MARKUP = (
    f"<script>{SCRIPT}</script>", f"</style><script>{SCRIPT}</script>", f"</title><script>{SCRIPT}</script>",
    f"\"><img src=http://{HOST}/a onerror='{SCRIPT}'>", f"'><svg onload={SCRIPT}>", f"]]><script>{SCRIPT}</script>",
    f"javascript:{SCRIPT}", f"<a href=javascript:{SCRIPT}>", f"<iframe src=//{HOST}>", f"<!--<script>{SCRIPT}//-->",
    f"<link rel=stylesheet href=http://{HOST}/b.css>", f"<base href=http://{HOST}/>", f"@import url(//{HOST}/c)",
    "&lt;script&gt;", "&#x3c;script&#62;", "&amp;", "&nbsp", "`${x}`", "</svg></table></td>", '" onmouseover="x',
)  # fmt: skip
TERMINAL = (
    "\x1b]0;owned\x07", "\x1b[2J", "\x1b[6n", "\x1bc", "\x9b31m", "\x90q\x9c", "\x07", "\x08\x08", "\r", "\n", "\t",
    "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\u202a", "\u2066", "\u2069", "\u200b", "\ufeff", "\x0b", "\x0c",
)  # fmt: skip
OTHER = (
    "[/]", "[bold red]", "[link=file:///etc/passwd]x", ":smile:", "{task.description}", "%s%n", "$(id)", "`id`",
    "../..", "\\", "'", '"', ",", ";", "é", "e\u0301", "日本語", "עברית", "العربية", "🙂", "\uffff",
    "=1+1", "|", "#", "null", "nan",
)  # fmt: skip
BROKEN = ("\ud800", "\udfff", "\0")
UNSTORABLE = re.compile("[\0\ud800-\udfff]")  # in no file in UTF-8, or in no name
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
STYLING = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[hl]|\x1b\[\d*[AK]|\x1b\[1A|\r")  # rich's own
LONG = 10_000
PLAIN = ("plain", "simple", "usual")  # so that there are some to learn with


class Called(NamedTuple):
    code: int | None  # None: a traceback
    text: str  # standard output and error


class Terminal(io.TextIOWrapper):
    """Collects what is printed; a terminal or a pipe, in one of several encodings."""

    def __init__(self, encoding: str, *, tty: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", newline="\n")
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def read_all(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    """`count` texts, in batches that share their runs."""
    harmless = _kinds_of_pages(["a", "b", "c"], random, folder / "harmless")
    by = "Chromium" if browser.CHROMIUM else "Python's parser, as Chromium was absent"
    for start in range(0, count, BATCH):
        texts = [hostile_text(random, start + at) for at in range(min(BATCH, count - start))]
        batch = Batch(texts, random, folder / f"batch-{start}")
        faults = [*batch.faults_on_terminal(), *batch.faults_of_pages(harmless)]
        for at, text in enumerate(texts):
            mine = [fault for fault, places in faults if places is None or at in places]
            failure = f"{text[:300]!r}: {'; '.join(dict.fromkeys(mine))}" if mine else None
            yield Trial(f"hostile text, pages read by {by}", failure)


def hostile_text(random: Random, number: int) -> str:
    """A text unlike any other, from pieces that something may obey."""
    kinds = random.choices((MARKUP, TERMINAL, OTHER, BROKEN), (4, 4, 3, 1), k=random.randint(1, 4))
    pieces = [random.choice(kind) for kind in kinds]
    if random.random() < 0.05:
        pieces.append("y" * LONG)
    random.shuffle(pieces)
    return f"t{number}{''.join(pieces)}z"


class Batch:
    """One folder with data and settings that hold all texts, and what commands made of them."""

    def __init__(self, texts: Sequence[str], random: Random, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.texts, self.folder, self.random = list(texts), folder, random
        usual = [at for at, text in enumerate(texts) if len(text) < LONG and not UNSTORABLE.search(text)]
        self.storable, self.labels = usual, [at for at in usual if len(texts[at]) < 150][:3]
        self._write_comparison()
        self._write_table()

    def _write_clients(self, name: str, texts: Sequence[str]) -> None:
        ids = [*texts, *PLAIN]
        rng = np.random.default_rng(self.random.getrandbits(32))
        x = rng.normal(size=(12 * len(ids), 3)).astype("float32")
        clients = np.repeat(np.array(ids, dtype=object), 12).astype(str)
        np.savez(self.folder / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(int), client=clients)

    def _write_comparison(self) -> None:
        texts, half_characters = self.texts, self.random.random() < 0.5
        self._write_clients("data", [texts[at] for at in self.storable])
        self.odd = [at for at, text in enumerate(texts) if half_characters or not re.search("[\ud800-\udfff]", text)]
        self._write_clients("odd", [texts[at] for at in self.odd])
        settings = {
            "name": "texts", "rounds": 1,
            "data": {"name": "npz", "file": "data.npz"}, "model": {"name": "linear"}, "population": {"k": 2},
            "method": {"name": "ppfl", "lr": 0.1},
        }  # fmt: skip
        methods = {"methods": {self.texts[at]: {} for at in self.labels}} if self.labels else {}
        (self.folder / "compare.toml").write_text(tomli_w.dumps(settings | methods), encoding="utf-8")
        (self.folder / "run.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")

    def _write_table(self) -> None:
        """Texts are clients, names of columns, levels of a column, and classes of the target."""
        rng = np.random.default_rng(self.random.getrandbits(32))
        texts = [*(self.texts[at] for at in self.storable), *PLAIN]
        rows = 8 * len(texts)
        self.client, self.target, *features = (f"{role}{text}" for role, text in zip("ctfgh", texts * 5, strict=False))
        columns: dict[str, object] = {name: rng.normal(size=rows) for name in features}
        columns["level"] = rng.choice([f"l{text}" for text in texts[:3]], rows)
        classes = [f"k{text}" for text in texts[:3]] + ["other"]
        columns[self.target] = rng.choice(classes, rows)
        columns[self.client] = np.repeat(np.array(texts, dtype=object), 8)
        named = texts[0].replace("/", "")[:60]
        self.table = self.folder / f"{named}.parquet"
        pd.DataFrame(columns).to_parquet(self.table)

    def compare(self) -> Called:
        return self._call("compare", "compare.toml", "--out", "out", "--jobs", "1")

    def glm(self) -> Called:
        columns = ("--client", self.client, "--target", self.target)
        return self._call("glm", str(self.table), *columns, "--out", "glm", "-k", "2", "--n-init", "1")

    def faults_on_terminal(self) -> Iterator[tuple[str, set[int] | None]]:
        """Faults, and the places of the texts they concern; None: of any."""
        out = self.folder / "out"
        yield from self._faults("compare", self.compare(), (0,), self.labels)
        yield from self._faults("run", self._call("run", "run.toml", "--out", "one"), (0,))
        yield from self._faults("show", self._call("show", "one/seed-0"), (0,))
        odd = ("--set", "data.file=odd.npz", "--out", "odd", "--jobs", "1")
        yield from self._faults("compare with ids that may be refused", self._call("compare", "run.toml", *odd), (0, 2))
        for run in sorted(out.glob("*/seed-0"))[:1]:
            yield from self._faults("show", self._call("show", str(run)), (0,))
        yield from self._faults("tune", self._call("tune", "compare.toml", "--budget", "1"), (0,), self.labels)
        yield from self._faults("glm", self.glm(), (0,))
        some = self.random.choice(self.texts)
        bad = [["glm", str(self.table), "--client", some, "--target", some], ["show", some], ["run", some], [some]]
        bad += [["reproduce", some], ["reproduce", "table1", "--case", some], ["compare", some], ["--", some, some]]
        bad += [["run", "run.toml", "--set", some], ["run", "run.toml", "--set", f"name={some}"], ["show", "x", some]]
        for arguments in bad:
            yield from self._faults(" ".join(arguments[:1]), self._call(*arguments), (0, 2))

    def faults_of_pages(self, harmless: frozenset[str]) -> Iterator[tuple[str, set[int] | None]]:
        pages = {"out/report.html": self.storable, "glm/report.html": self.storable}
        if (self.folder / "odd" / "report.html").is_file():
            pages["odd/report.html"] = self.odd
        for name, expected in pages.items():
            if not (self.folder / name).is_file():
                yield f"there is no {name}", None
                return
            page = browser.show(self.folder / name)
            if strange := page.kinds - harmless:
                yield f"{name} has {sorted(strange)[:5]}", None
            if page.requests:
                yield f"{name} asked for {page.requests[:3]}", None
            if RAW.search(page.text):
                yield f"{name} has raw control characters", None
            for at in expected:
                if visible(self.texts[at]) not in page.text:
                    yield f"{name} does not show it", {at}

    def _call(self, *arguments: str) -> Called:
        here, argv = Path.cwd(), sys.argv
        encoding, tty = self.random.choice(("utf-8", "utf-8", "ascii", "latin-1")), self.random.random() < 0.3
        out, err = Terminal(encoding, tty=tty), Terminal(encoding, tty=tty)
        os.chdir(self.folder)
        sys.argv = ["ppfl"]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(arguments)
            code: int | None = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception:
            return Called(None, traceback.format_exc(limit=-3))
        finally:
            os.chdir(here)
            sys.argv = argv
        text = out.read_all() + err.read_all()
        return Called(code, STYLING.sub("", text) if tty else text)

    def _faults(
        self, command: str, called: Called, codes: tuple[int, ...], shown: Sequence[int] = ()
    ) -> Iterator[tuple[str, set[int] | None]]:
        if called.code is None:
            yield f"{command} ended in a traceback: {called.text}", None
        elif called.code not in codes:
            yield f"{command} ended with code {called.code}: {visible(called.text[-300:])}", None
        if found := RAW.search(called.text):
            yield f"{command} printed {found[0]!r} after {called.text[: found.start()][-60:]!r}", None
        said = re.sub(r"\s", "", called.text)
        for at in shown:
            start = re.sub(r"\s", "", visible(self.texts[at])[:12])
            if start.isascii() and start not in said:
                yield f"{command} does not show it", {at}


def _kinds_of_pages(texts: Sequence[str], random: Random, folder: Path) -> frozenset[str]:
    """Elements and attributes of pages made the same way from harmless texts."""
    batch = Batch(texts, random, folder)
    for called in (batch.compare(), batch.glm()):
        if called.code != 0:
            raise RuntimeError(f"harmless texts fail already: {called.text}")
    files = (folder / name for name in ("out/report.html", "glm/report.html"))
    return frozenset().union(*(browser.read(file.read_text(encoding="utf-8")).kinds for file in files))
