"""What objects show of themselves, as text and in a notebook: short whatever their size, true, and never obeyed."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Federation, Local, Population, Watch, fit
from ppfl.algorithms import METHODS, Ditto, FineTune

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
HOSTILE = {  # as it comes, and as it is shown
    "<script>x</script>": "<script>x</script>",
    '"><img src=x onerror=alert(1)>': '"><img src=x onerror=alert(1)>',
    "a\x1b[31m\nb": r"a\x1b[31m\nb",
    "&amp;": "&amp;",
    "c" * 500: "c" * 30,
}
KINDS = {"div", "table", "thead", "tbody", "tr", "th", "td", "svg", "g", "title", "rect", "path", "circle", "text"}
SVG = "{http://www.w3.org/2000/svg}"
LONGEST_LINE, LARGEST_HTML = 300, 20_000


def parsed(shown: object) -> ElementTree.Element:
    """The notebook form, which is well-formed and has harmless elements and attributes alone."""
    html = shown._repr_html_()
    assert len(html) < LARGEST_HTML
    root = ElementTree.fromstring(html)
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in KINDS
        assert not any(name.startswith("on") or name in ("href", "src") for name in element.attrib)
    return root


def words(shown: object) -> str:
    return " ".join(" ".join(parsed(shown).itertext()).split())


def line(shown: object) -> str:
    text = repr(shown)
    assert "\n" not in text and "\x1b" not in text and len(text) < LONGEST_LINE
    return text


def test_a_federation_tells_its_clients_samples_and_classes() -> None:
    train, test = len(FEDERATION.train), len(FEDERATION.test)
    for text in ("clients 4", f"{train} train, {test} test", "(4,) float32", "3 classes: 0, 1, 2", "client-3"):
        assert text in words(FEDERATION)
    assert f"{train} train / {test} test" in line(FEDERATION)
    rows = parsed(FEDERATION).findall(".//tbody/tr")
    assert [[cell.text for cell in row] for row in rows] == [
        [name, *(str(len(part)) for part in FEDERATION.client(name).values())] for name in FEDERATION.ids
    ]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_is_shown_and_not_obeyed(text: str) -> None:
    ids = [text, "other"] * 4
    federation = Federation.from_arrays(torch.zeros(8, 2), [0, 1] * 4, ids, classes=["plain", "b"], name=text)
    assert words(federation).count(HOSTILE[text]) == 2  # as its name, and as a client
    assert HOSTILE[text] in line(federation)


def test_a_population_counts_its_parts() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    population = Population(net, canonical="4", k=5, mix="weights")
    canonical = sum(p.numel() for p in net[4].parameters())
    common = sum(p.numel() for p in [*net[2].parameters(), *net[3].parameters()])
    frozen = sum(p.numel() for p in [*net[0].parameters(), *net[3].buffers()])
    assert f"{common} common, {canonical} canonical, {frozen} frozen" in line(population)
    rows = [[cell.text for cell in row][1:] for row in parsed(population).findall(".//tbody/tr")]
    assert rows == [[str(common)] * 2, [str(canonical), str(5 * canonical)], [str(frozen)] * 2]
    assert "mix weights" in words(population) and "loss cross_entropy" in words(population)


def test_a_fitted_population_tells_its_score_and_shares() -> None:
    fitted = fit(Population(make_net(), k=3), FEDERATION, PPFL(lr=0.3), rounds=4)
    text, root = line(fitted), parsed(fitted)
    accuracy = f"{100 * fitted.history[-1]['accuracy']:.2f}%"
    shares = sorted(fitted.memberships.double().mean(0).tolist(), reverse=True)
    assert text.startswith(f"<Fitted PPFL(lr=0.3), 4 rounds, 4 clients, accuracy {accuracy}, shares ")
    assert re.findall(r"(\d+)%", text.split("shares")[1]) == [f"{100 * share:.0f}" for share in shares]
    widths = [float(block.get("width")) for block in root.iter(f"{SVG}rect")]
    assert [width / sum(widths) for width in widths] == pytest.approx(shares, abs=1e-3)
    assert accuracy in words(fitted)
    drawn = re.findall(r"[-\d.]+ ([-\d.]+)", next(root.iter(f"{SVG}path")).get("d"))
    values = [record["accuracy"] for record in fitted.history]
    highest = min(range(4), key=lambda t: float(drawn[t]))  # y goes down
    assert values[highest] == max(values)
    found = fitted.evaluate(FEDERATION)
    assert f"of 4 clients with {len(FEDERATION.test)} samples: score {found.pooled:.4g}" in line(found)


def test_the_score_is_that_of_the_state_that_is_returned() -> None:
    federation = make_federation((30, 40, 30, 20), test_fraction=0.2, validation_fraction=0.3)
    population, watch = Population(make_net(), k=1), Watch(output="best")
    fitted = fit(population, federation, FedAvg(lr=3.0, momentum=0.0), rounds=30, watch=watch)
    assert fitted.state.round < 30, "choose a case that overfits"
    assert f"accuracy {100 * fitted.evaluate(federation).pooled:.2f}%" in line(fitted)
    assert f"{fitted.state.round} (of 30 that ran)" in words(fitted)


def test_without_test_data_and_canonical_models_no_score_and_shares_are_shown() -> None:
    for method, k in ((Local(lr=0.3), 1), (Ditto(lr=0.3), 1), (FineTune(method=PPFL(lr=0.3)), 2)):
        population, watch = Population(make_net(), k=k, mix="weights"), Watch(report_clients=False)
        fitted = fit(population, make_federation((9, 7)), method, rounds=2, watch=watch)
        assert line(fitted) == f"<Fitted {method!r}, 2 rounds, 2 clients>"
        assert not [*parsed(fitted).iter(f"{SVG}rect")]


def test_large_objects_fit_on_a_screen() -> None:
    m = 5000
    names, ids = [f"{'a very long class ' * 20}{i}" for i in range(1000)], [f"{'n' * 300}{i}" for i in range(m)]
    x, y = torch.zeros(2 * m, 1), torch.arange(2 * m) % 1000
    federation = Federation.from_arrays(x, y, ids * 2, classes=names, test_fraction=0)
    assert "and 4,995 more" in words(federation) and "1,000 classes" in words(federation)
    assert "5000 clients" in line(federation)
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    assert "and 56 more" in line(Population(net, canonical=[str(i) for i in range(60)], k=2))
    assert "the whole network" in line(Population(net, k=2))
    fitted = fit(Population(make_net(), k=40), make_federation((5,) * 50), PPFL(lr=0.1), rounds=1)
    record = {"loss": 0.5, "accuracy": 0.5, "accuracy_worst_tenth": 0.1}
    fitted.history[:] = [record | {"round": t, "accuracy": t % 8 / 8} for t in range(1, 5001)]
    line(fitted), parsed(fitted)


def test_settings_show_what_differs_from_the_default_and_read_back() -> None:
    assert repr(PPFL()) == "PPFL()"
    names = {kind.__name__: kind for kind in METHODS.values()}
    for kind in METHODS.values():
        for method in (kind(), kind(lr=0.25) if "lr" in kind.model_fields else kind(method=PPFL(lr=0.25))):
            assert eval(repr(method), names) == method
            assert len(repr(method)) < 80
