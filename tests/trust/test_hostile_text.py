"""The attack with hostile text: a small one survives, and what is unsafe would be seen."""

from pathlib import Path
from random import Random

import browser
import hostile_text
import pytest


def test_a_few_texts_survive(tmp_path: Path) -> None:
    trials = list(hostile_text.attack(8, Random(1), tmp_path))
    assert len(trials) == 8
    assert [trial.failure for trial in trials if trial.failure] == []


def test_texts_differ_and_hold_what_terminals_and_browsers_obey() -> None:
    random = Random(0)
    texts = [hostile_text.hostile_text(random, at) for at in range(300)]
    assert len(set(texts)) == len(texts)
    for piece in (*hostile_text.MARKUP, *hostile_text.TERMINAL, *hostile_text.BROKEN):
        assert any(piece in text for text in texts)
    assert max(map(len, texts)) > hostile_text.LONG


def test_a_page_that_is_not_escaped_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<title>t</title><p>safe<img src=http://{browser.HOST}/a>{hostile_text.MARKUP[0]}")
    shown = browser.show(page)
    assert {"script", "img", "img[src]"} <= shown.kinds
    assert shown.title == "t"
    assert "safe" in shown.text
    if browser.CHROMIUM:
        assert "html[data-ran]" in shown.kinds
        assert any(browser.HOST in url for url in shown.requests)


@pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not here")
def test_the_parser_sees_the_same_as_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<!DOCTYPE html><html><head><title>a</title></head><body><p class="b">c &lt;d&gt;</p></body></html>'
    )
    with_browser = browser.show(page)
    monkeypatch.setattr(browser, "CHROMIUM", None)
    assert browser.show(page)._replace(text="") == with_browser._replace(text="")
