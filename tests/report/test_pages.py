"""The page in a real browser: no request, nothing on its console, and everything on it works; its text is text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kit.browser import chromium
from kit.reports import empty_run, fake_run, fitted_table
from ppfl.report import Comparison, export
from ppfl.report import page as pages
from ppfl.report.glm_page import write_glm_report

HOSTILE = {  # as it comes, and as it is shown
    "</script><script>document.title='obeyed'</script>": "</script><script>document.title='obeyed'</script>",
    '"><img src=x onerror="document.title=1">': '"><img src=x onerror="document.title=1">',
    "<!--<script>": "<!--<script>",
    "${alert(1)} {{ 7*7 }}": "${alert(1)} {{ 7*7 }}",
    "患者": "患者",
    "a\x00\x1b[31m": r"a\x00\x1b[31m",
    "b\u202eb": r"b\u202eb",
    "g\ud800": r"g\ud800",
    "h\u2028": r"h\u2028",
    "j" * 900: "j" * 900,
}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def comparison(clients=40, k=4, **settings):
    runs = [fake_run("ppfl", clients=clients, k=k, seed=seed, **settings) for seed in (0, 1)]
    return Comparison.of(
        [*runs, fake_run("local", clients=clients, k=1, level=0.8), fake_run("fedavg", clients=clients, k=1)]
    )


def write(found, folder, title="A title"):
    return found.report(folder, title)


def rows(browser):
    return browser.run("return [...document.querySelectorAll('#clients tbody tr')].map(r => r.cells[0].textContent)")


def assert_quiet(browser, page):
    assert browser.logs() == []
    assert [address for address in browser.requests() if address != page.resolve().as_uri()] == []


def test_a_client_is_found_chosen_and_marked_in_every_chart_and_columns_are_sorted(browser, tmp_path):
    page = write(comparison(), tmp_path)
    browser.open(page)
    first = rows(browser)
    assert len(first) == 40
    browser.run("const s = document.getElementById('search'); s.value = arguments[0]; s.oninput()", "SITE-01")
    assert sorted(rows(browser)) == [f"site-{i:03d}" for i in range(10, 20)]
    browser.run("document.querySelector('#clients tbody tr').click()")
    chosen = rows(browser)[0]
    assert browser.run("return document.getElementById('card-id').textContent") == chosen
    facts = browser.run("return document.getElementById('card-facts').textContent")
    assert all(name in facts for name in ("A", "truth", "accuracy, PPFL", "accuracy, Local"))
    bars = browser.run("return [...document.querySelectorAll('#card-bar i')].map(i => parseFloat(i.style.width))")
    assert sum(bars) == pytest.approx(100, abs=0.5)
    marks = ".mark-symbol path[stroke-width='2.5'], .mark-rule line[stroke-width='2']"
    every = "[...document.querySelectorAll('[data-chart]')]"
    marked = browser.run(f"return {every}.map(e => e.querySelectorAll(arguments[0]).length)", marks)
    assert sum(count > 0 for count in marked) >= 4
    browser.run("document.getElementById('search').value = ''; document.getElementById('search').oninput()")
    heads = browser.run("return [...document.querySelectorAll('#clients thead th')].map(h => h.textContent)")
    at = heads.index("accuracy, PPFL")
    for direction in (-1, 1):
        browser.run("document.querySelectorAll('#clients thead button')[arguments[0]].click()", at)
        shown = browser.run(
            "return [...document.querySelectorAll('#clients tbody tr')].map(r => r.cells[arguments[0]].textContent)", at
        )
        values = [float(text.rstrip("%")) for text in shown]
        assert values == sorted(values, reverse=direction < 0)
    browser.run("document.onkeydown({key: 'Escape'})")
    assert browser.run("return document.getElementById('card').hidden")
    assert_quiet(browser, page)


def test_the_slider_moves_the_memberships(browser, tmp_path):
    page = write(comparison(), tmp_path)
    browser.open(page)
    said = "return [...document.querySelectorAll('.chart svg text')].map(t => t.textContent)"
    said += r".filter(t => /^round \d+$/.test(t))"
    assert browser.run(said) == ["round 60"]
    browser.run(
        "const s = document.querySelector('.vega-bind input'); s.value = 0; s.dispatchEvent(new Event('input'))"
    )
    browser.run("return new Promise(done => setTimeout(done, 300))")
    assert browser.run(said) == ["round 0"]
    assert_quiet(browser, page)


@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen(browser, tmp_path, width, dark):
    runs = comparison()
    browser.open(write(runs, tmp_path, "A title " * 20), width=width)
    browser.emulate(width, 900, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    ink, ground = browser.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, ground)]
    assert (light[0] > light[1]) == dark


def test_everything_from_data_is_shown_and_not_obeyed(browser, tmp_path):
    one = replace(fake_run("<i>m</i>", clients=len(HOSTILE), k=2, groups=2), ids=tuple(HOSTILE))
    one.experiment["name"] = one.experiment["<u>"] = one.versions["<s>"] = '<a onclick="x">'
    for label in [*HOSTILE][:2]:
        page = write(Comparison.of([one], [label]), tmp_path, label)
        browser.open(page)
        assert browser.run("return document.title").startswith(HOSTILE[label][:20])
        assert set(rows(browser)) == set(HOSTILE.values())
        for i in range(len(HOSTILE)):
            browser.run("document.querySelectorAll('#clients tbody tr')[arguments[0]].click()", i)
        assert browser.run("return document.querySelectorAll('img, iframe, object, [onclick], [onerror]').length") == 0
        assert browser.run("return document.title").startswith(HOSTILE[label][:20])
        assert_quiet(browser, page)


def test_many_clients_are_quick_to_open_and_all_of_them_are_found(browser, tmp_path, monkeypatch):
    page = write(comparison(clients=3000), tmp_path)
    browser.open(page)
    assert page.stat().st_size < 4e6
    browser.run("const s = document.getElementById('search'); s.value = 'site-2999'; s.oninput()")
    assert rows(browser) == ["site-2999"]
    assert_quiet(browser, page)
    monkeypatch.setattr(pages, "MAX_CLIENTS", 1000)
    page = write(comparison(clients=3000), tmp_path / "sample")
    assert (page.parent / "clients.csv").read_text().count("\n") == 3001
    found = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])["clients"]["columns"]
    assert 900 <= len(found[0]["values"]) <= 1000
    label, scores = next(iter(comparison(clients=3000).scores.items()))
    (shown,) = (column["values"] for column in found if column["name"] == f"accuracy, {label}")
    assert min(shown) == pytest.approx(min(scores.values()), rel=1e-3)


@pytest.mark.parametrize("k", [1, 2])
def test_the_page_of_a_table_works_too(browser, tmp_path, k):
    ids = [name for name in HOSTILE if not {*name} & {"\x00", "\ud800"}]  # no table has these
    page = write_glm_report(fitted_table(ids, k), tmp_path, "<shops>", "ppfl glm shops.csv")
    browser.open(page)
    assert set(rows(browser)) == {HOSTILE[name] for name in ids}
    text = browser.run("return document.body.textContent")
    assert "ppfl glm shops.csv" in text and ("How the clients divide" in text or "clear clients" in text) == (k > 1)
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert_quiet(browser, page)


def test_pages_of_runs_without_anything_to_draw_are_pages(browser, tmp_path):
    page = write(Comparison.of([empty_run()]), tmp_path)
    browser.open(page)
    assert_quiet(browser, page)


def test_charts_and_tables_of_a_page_are_written_as_files(tmp_path):
    written = export(comparison(), tmp_path, ["svg"], ["csv", "md", "tex"])
    assert {file.suffix for file in written} == {".svg", ".csv", ".md", ".tex"}
    assert all(file.stat().st_size > 20 for file in written) and len({*written}) == len(written)
    for option, wanted in (("figures", ("gif",)), ("tables", ("xls",))):
        with pytest.raises(Exception, match=f"--{option} is "):
            export(comparison(), tmp_path, **{"figures": [], "tables": []} | {option: wanted})


def test_a_page_asks_for_nothing_even_without_a_browser(tmp_path):
    page = write(comparison(), tmp_path).read_text()
    assert "default-src 'none'" in page
    outside = re.sub(r"<script type=\"module\">.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bsrc=|\bhref=[\"'](?!#)|url\(|@import|https?:(?!//vega.github.io/schema)", outside)
    assert np.isfinite(len(page)) and Path(tmp_path / "report.html").is_file()
