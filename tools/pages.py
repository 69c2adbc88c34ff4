"""Every table and number that was measured comes from results/figures/*.json, and nowhere else.

A text in results/text/ has a line `<!-- page/table -->` where a table belongs, and becomes the page of that name in
results/. In README and docs/ the table stands below such a line. In a sentence, a measured number is followed by
`<!-- page/table/row/column -->`, which is not seen. `make pages` writes all tables and numbers from what is stored, in
seconds; `python tools/pages.py --check` says what differs, and names decimal numbers without a key.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ppfl.errors import DataError
from ppfl.paper import Figures

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^<!-- ([\w.-]+)/([\w.-]+) -->\n(?:\n?(?:\|.*\n)+)?", re.MULTILINE)
KEYED = re.compile(
    r"(?P<number>[-−+]?\d[\d,]*(?:\.\d+)?)(?P<unit>(?: ?%| per cent)?)<!-- (?P<page>[\w.-]+)/(?P<cell>[^>]+?) -->"
)
NUMBER = re.compile(r"(?<![\w.,/^-])(?<!= )[-−+]?\d[\d,]*(?:\.\d+|(?:\.\d+)? ?(?:%|per cent\b))(?!\.?\d|[\w/])")
NOT_PROSE = re.compile(r"^```[\s\S]*?^```|`[^`\n]*`|\]\([^)]*\)|<!-- [^>]* -->|^\|.*$", re.MULTILINE)
MADE = "<!-- made by `make pages` from results/text/{name} and results/figures/ -->\n"


class Sources:
    """The pages of a folder, and what is stored."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.figures = root, root / "results" / "figures"
        self.texts = sorted((root / "results" / "text").glob("*.md"))
        self.documents = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
        allowed = root / "tools" / "numbers.toml"
        self.allowed: dict[str, list[str]] = tomllib.loads(allowed.read_text("utf-8")) if allowed.is_file() else {}
        self.read = cache(lambda page: Figures.read(self.figures / f"{page}.json"))

    def pages(self) -> Iterator[tuple[Path, str]]:
        """Every file that is written, with what belongs in it."""
        for text in self.texts:
            filled = self.fill(text.read_text("utf-8"), text)
            title, rest = filled.split("\n", 1)
            yield self.root / "results" / text.name, f"{title}\n\n{MADE.format(name=text.name).rstrip()}\n{rest}"
        for path in (*self.texts, *self.documents):
            yield path, self.with_numbers(path.read_text("utf-8"), path, tables=path in self.documents)

    def fill(self, text: str, path: Path) -> str:
        """The text with all of its tables and numbers."""
        return self.with_numbers(text, path, tables=True)

    def with_numbers(self, text: str, path: Path, *, tables: bool) -> str:
        def table(found: re.Match[str]) -> str:
            stored = next((one for one in self.read(found[1]).tables if one.key == found[2]), None)
            if stored is None:
                raise DataError(f"{path.name}: {found[1]} has no table {found[2]!r}")
            return f"<!-- {found[1]}/{found[2]} -->\n{stored.markdown()}\n"

        def number(found: re.Match[str]) -> str:
            stored = self.read(found["page"]).cell(found["cell"])
            key = f"{found['page']}/{found['cell']}"
            return f"{rounded(stored, found['number'])}{found['unit']}<!-- {key} -->"

        text = TABLE.sub(table, text) if tables else text
        return KEYED.sub(number, text)

    def unkeyed(self) -> Iterator[str]:
        """Decimal numbers and per cents in sentences that neither have a key nor are allowed."""
        for path in (*self.texts, *self.documents):
            name = str(path.relative_to(self.root))
            text = path.read_text("utf-8")
            blank = NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), KEYED.sub(_blank, text))
            allowed = {*self.allowed.get("everywhere", ()), *self.allowed.get(name, ())}
            for found in NUMBER.finditer(blank):
                if found[0] not in allowed:
                    line = blank.count("\n", 0, found.start()) + 1
                    yield f"{name}:{line}: {found[0]} has no key; add <!-- page/table/row/column --> after it"


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def rounded(stored: str, like: str) -> str:
    """The first number of a stored cell, with as many decimals and the same signs as a number in a sentence.

    >>> rounded("86.28 ± 0.01", "86.3"), rounded("+1234.5", "1,235"), rounded("-0.48", "0.5")
    ('86.3', '1,234', '0.5')
    """
    found = re.search(r"[-−+]?\d[\d,]*\.?\d*(?:e-?\d+)?", stored)
    if found is None:
        raise DataError(f"there is no number in {stored!r}")
    value = float(found[0].replace(",", "").replace("−", "-"))
    decimals = len(like.partition(".")[2])
    shown = f"{abs(value):{',' if ',' in like else ''}.{decimals}f}"
    sign = "" if like[0] not in "-−+" else "+" if value >= 0 and like[0] == "+" else like[0] if value < 0 else ""
    return sign + shown


def main() -> int:
    sources, check = Sources(), "--check" in sys.argv[1:]
    wrong = list(sources.unkeyed()) if check else []
    for path, text in sources.pages():
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        if check:
            wrong.append(f"{path.relative_to(ROOT)} is not what is stored; run make pages")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
    print("\n".join(wrong) if wrong else "all tables and numbers are those that are stored")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
