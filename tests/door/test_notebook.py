"""What objects show of themselves, as text and in a notebook: short whatever their size, true, and never obeyed."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, Federation, Population, fit
from ppfl.algorithms import METHODS

HOSTILE = {  # as it comes, and as it is shown
    '"><img src=x onerror=alert(1)>&amp;': '"><img src=x onerror=alert(1)>',
    "a\x1b[31m\nb": r"a\x1b[31m\nb",
    "c" * 500: "c" * 30,
}
KINDS = {"div", "table", "thead", "tbody", "tr", "th", "td", "svg", "g", "title", "rect", "path", "circle", "text"}


def shown(value):
    """The line and the words of the notebook form, which has harmless elements and attributes alone."""
    line, html = repr(value), value._repr_html_()
    assert "\n" not in line and "\x1b" not in line and len(line) < 300 and len(html) < 20_000
    root = ElementTree.fromstring(html)
    for element in root.iter():
        assert element.tag.split("}")[-1] in KINDS
        assert not any(name.startswith("on") or name in ("href", "src") for name in element.attrib)
    return line, " ".join(" ".join(root.itertext()).split())


def test_cards_tell_the_numbers_of_a_federation_a_population_and_a_fit():
    federation = make_federation((17, 12, 30, 9), test_fraction=0.3)
    train, test = len(federation.train), len(federation.test)
    _, words = shown(federation)
    assert all(text in words for text in ("clients 4", f"{train} train, {test} test", "3 classes: 0, 1, 2", "client-3"))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    frozen, common, canonical = (sum(p.numel() for p in net[at].parameters()) for at in (0, 2, 3))
    line, words = shown(Population(net, canonical="3", k=5, mix="weights"))
    assert f"{common} common, {canonical} canonical, {frozen} frozen" in line and str(5 * canonical) in words
    fitted = fit(Population(make_net(), k=3), federation, PPFL(lr=0.3), rounds=4)
    line, words = shown(fitted)
    accuracy = f"{100 * fitted.history[-1]['accuracy']:.2f}%"
    shares = sorted(fitted.memberships.double().mean(0).tolist(), reverse=True)
    assert line.startswith(f"<Fitted PPFL(lr=0.3), 4 rounds, 4 clients, accuracy {accuracy}, shares ")
    assert re.findall(r"(\d+)%", line.split("shares")[1]) == [f"{100 * share:.0f}" for share in shares]
    assert accuracy in words


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_is_shown_and_not_obeyed_and_large_objects_fit_on_a_screen(text):
    m = 2000
    ids, classes = [text, *(f"{'n' * 300}{i}" for i in range(1, m))], [f"{'a long class ' * 20}{i}" for i in range(m)]
    federation = Federation.from_arrays(torch.zeros(m, 1), range(m), ids, classes=classes, name=text, test_fraction=0)
    line, words = shown(federation)
    assert words.count(HOSTILE[text]) >= 2 and HOSTILE[text] in line and "1,995 more" in words


def test_settings_show_what_differs_from_the_default_and_read_back():
    names = {kind.__name__: kind for kind in METHODS.values()}
    for kind in METHODS.values():
        for method in (kind(), kind(lr=0.25) if "lr" in kind.model_fields else kind(method=PPFL(lr=0.25))):
            assert eval(repr(method), names) == method and len(repr(method)) < 80
    assert repr(PPFL()) == "PPFL()"
