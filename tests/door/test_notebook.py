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
KINDS = {"div", "span"}


def line_of(value):
    """The repr, which is one short line that a terminal does not obey."""
    line = repr(value)
    assert "\n" not in line and "\x1b" not in line and len(line) < 300
    return line


def card_of(fitted):
    """The words of the notebook form, which has harmless elements and attributes alone."""
    html = fitted._repr_html_()
    assert len(html) < 20_000
    root = ElementTree.fromstring(html)
    for element in root.iter():
        assert element.tag.split("}")[-1] in KINDS
        assert not any(name.startswith("on") or name in ("href", "src") for name in element.attrib)
    return " ".join(" ".join(root.itertext()).split())


def test_one_line_tells_the_numbers_of_a_federation_a_population_and_a_fit_and_a_card_those_of_a_fit():
    federation = make_federation((17, 12, 30, 9), test_fraction=0.3)
    train, test = len(federation.train), len(federation.test)
    line = line_of(federation)
    assert all(text in line for text in ("4 clients", f"{train} train / {test} test", "x (4,), 3 classes", "float32"))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    frozen, common, canonical = (sum(p.numel() for p in net[at].parameters()) for at in (0, 2, 3))
    line = line_of(Population(net, canonical="3", k=5, mix="weights"))
    assert f"{common} common, {canonical} canonical, {frozen} frozen" in line and "k=5, canonical '3'" in line
    fitted = fit(Population(make_net(), k=3), federation, PPFL(lr=0.3), rounds=4)
    line = line_of(fitted)
    accuracy = f"{100 * fitted.history[-1]['accuracy']:.2f}%"
    shares = sorted(fitted.memberships.double().mean(0).tolist(), reverse=True)
    assert line.startswith(f"<Fitted PPFL(lr=0.3), 4 rounds, 4 clients, accuracy {accuracy}, shares ")
    assert re.findall(r"(\d+)%", line.split("shares")[1]) == [f"{100 * share:.0f}" for share in shares]
    assert accuracy in card_of(fitted)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_is_shown_and_not_obeyed_and_large_objects_fit_on_a_screen(text):
    m = 2000
    ids, classes = [text, *(f"{'n' * 300}{i}" for i in range(1, m))], [f"{'a long class ' * 20}{i}" for i in range(m)]
    federation = Federation.from_arrays(torch.zeros(m, 1), range(m), ids, classes=classes, name=text, test_fraction=0)
    assert HOSTILE[text] in line_of(federation)
    net = nn.ModuleDict({f"{'layer' * 5}{i}": nn.Linear(1, 1) for i in range(m)})
    assert f"{m - 4} more" in line_of(Population(net, canonical=list(net), k=2))


def test_settings_show_what_differs_from_the_default_and_read_back():
    names = {kind.__name__: kind for kind in METHODS.values()}
    for kind in METHODS.values():
        for method in (kind(), kind(lr=0.25) if "lr" in kind.model_fields else kind(method=PPFL(lr=0.25))):
            assert eval(repr(method), names) == method and len(repr(method)) < 80
    assert repr(PPFL()) == "PPFL()"
