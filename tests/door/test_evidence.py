"""Numbers in README, docs and results are those that are stored: pages are made of them, and wrong ones are found."""

import random
import re
import shutil
from pathlib import Path

import pytest
from pages import KEYED, NUMBER, ROOT, Sources

from kit.refusals import DataError, assert_refused


@pytest.fixture
def copy(tmp_path):
    """A copy of all texts and of what is stored."""
    for name in ("docs", "results", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def wrong(root: Path) -> list[str]:
    """Files that are not what is stored, and numbers without a key."""
    sources = Sources(root)
    pages = [path.name for path, text in sources.pages() if not path.is_file() or path.read_text("utf-8") != text]
    return pages + list(sources.unkeyed())


def test_every_page_is_made_of_what_is_stored_and_every_measured_number_has_a_key():
    assert not wrong(ROOT), "run make pages"
    stored = {path.stem for path in (ROOT / "results" / "text").glob("*.md")}
    assert stored == {path.stem for path in (ROOT / "results").glob("*.md")}, "no page is written by hand"


def test_ten_numbers_that_are_changed_in_sentences_are_all_found(copy):
    sources = Sources(copy)
    places = [(path, found) for path in (*sources.texts, *sources.documents)
              for found in KEYED.finditer(path.read_text("utf-8"))]  # fmt: skip
    assert len(places) > 100
    for path, found in random.Random(0).sample(places, 10):
        text = path.read_text("utf-8")
        last = found.start("unit") - 1
        planted = text[:last] + str((int(text[last]) + 1) % 10) + text[last + 1 :]
        path.write_text(planted, "utf-8")
        assert path.name in wrong(copy), f"{found[0]} in {path.name}"
        path.write_text(text, "utf-8")
    assert not wrong(copy)


def test_a_changed_cell_of_a_table_and_a_number_without_a_key_are_found(copy):
    page = copy / "results" / "table1.md"
    page.write_text(page.read_text("utf-8").replace("99.22 ± 0.06", "99.32 ± 0.06"), "utf-8")
    assert "table1.md" in wrong(copy)
    page.write_text((ROOT / "results" / "table1.md").read_text("utf-8"), "utf-8")
    for text in ("It has 83.7 % of them.", "It is 1.25 times as fast.", "So 12 per cent are."):
        (copy / "docs" / "methods.md").write_text(
            (ROOT / "docs" / "methods.md").read_text("utf-8") + f"\n{text}\n", "utf-8"
        )
        (found,) = wrong(copy)
        assert "docs/methods.md" in found and NUMBER.search(text)[0] in found


def test_a_key_that_leads_nowhere_is_named(copy):
    (copy / "docs" / "methods.md").write_text("It has 83.7 %<!-- table1/mnist/Nobody/ours -->.\n", "utf-8")
    assert_refused(lambda: wrong(copy), DataError, "Nobody")


def test_what_is_stored_names_how_it_was_made():
    sources = Sources()
    for path in sorted(sources.figures.glob("*.json")):
        figures = sources.read(path.stem)
        assert figures.name == path.stem and figures.title
        assert figures.tables and len({table.key for table in figures.tables}) == len(figures.tables)
        assert all(len(row) == len(table.columns) for table in figures.tables for row in table.rows), path.name
        page = ROOT / "results" / "text" / f"{path.stem}.md"
        if page.is_file() and path.stem != "claims":
            assert figures.command or re.search(r"^```\w*\n\S", page.read_text("utf-8"), re.MULTILINE), (
                f"{path.stem}: how?"
            )
