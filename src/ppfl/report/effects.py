"""The table of coefficients: a line a column, a cell a canonical model, with bars that compare across all of it."""

import math
from collections.abc import Sequence

from .details import swatch
from .drawing import hint
from .markup import Markup, element, join, words
from .palette import MIDDLE_GREY, model_colour
from .population import Population, Term
from .portrait import letter

_MIDDLE, _HEIGHT = 50.0, 9.0


def effect_table(drawn: Population) -> Markup:
    """Outcome by outcome, the average row first."""
    lines = [*drawn.average, *drawn.coefficients]
    longest = max((abs(reach) for line in lines for reach in (*(line.reach or ()), line.pooled_reach)), default=0.0)
    heads = [element("th", words(""), scope="col"), *(_head(at, share) for at, share in enumerate(drawn.shares))]
    heads.append(element("th", words("one model for all"), scope="col", class_="number"))
    rows = []
    outcomes = list(dict.fromkeys(line.outcome for line in lines))
    for outcome in outcomes:
        if len(outcomes) > 1:
            heading = element("th", words(f"{drawn.target} = {outcome}"), scope="rowgroup", colspan=str(drawn.k + 2))
            rows.append(element("tr", heading, class_="part"))
        average = [line for line in drawn.average if line.outcome == outcome]
        rows += [_row(line, longest, share=bool(drawn.classes)) for line in average]
        rows += [_row(line, longest) for line in drawn.coefficients if line.outcome == outcome]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", table, class_="wide effects")


def shown_together(values: Sequence[float]) -> list[str]:
    """Numbers of one line with as many decimals each: four digits for the largest, or two more for the smallest's sake.

    >>> shown_together([23.35482, -9.0993]), shown_together([1106.7, 0.62, 0.0]), shown_together([0.0, 0.0])
    (['23.35', '-9.10'], ['1106.70', '0.62', '0.00'], ['0', '0'])
    """
    sizes = [abs(value) for value in values if value != 0]
    if not sizes or not math.isfinite(max(sizes)):
        return [f"{value:g}" for value in values]
    of_largest, of_smallest = (-math.floor(math.log10(size)) for size in (max(sizes), min(sizes)))
    enough = max(0, of_largest + 3)
    decimals = min(8, enough + 2, max(enough, of_smallest + 1))
    return [f"{value:.{decimals}f}" for value in values]


def _head(at: int, share: float) -> Markup:
    return element("th", swatch(at), words(f"{letter(at)} · {share:.0%}"), scope="col", class_="number")


def _row(line: Term, longest: float, *, share: bool = False) -> Markup:
    values = [*line.values, line.pooled]
    shown = [f"{value:.1%}" for value in values] if share else shown_together(values)
    reach = None if line.reach is None else [*line.reach, line.pooled_reach]
    colours = [*(model_colour(at) for at in range(len(line.values))), MIDDLE_GREY]
    cells = []
    for at in range(len(values)):
        if line.is_shared and 0 < at < len(line.values):
            continue  # said once for all canonical models
        drawn = [] if reach is None else [_bar(reach[at], longest, MIDDLE_GREY if line.is_shared else colours[at])]
        one_for_all = line.is_shared and at == 0 and len(line.values) > 1
        said = [words(shown[at].replace("-", "−")), *([element("small", words(" shared"))] if one_for_all else [])]
        spans = {"colspan": str(len(line.values)), "class_": "number"} if one_for_all else {"class_": "number"}
        cells.append(element("td", join(said), *drawn, **spans))
    return element("tr", element("th", words(line.name), scope="row"), *cells)


def _bar(reach: float, longest: float, colour: str) -> Markup:
    """From the middle to the right where the predictor rises, to the left where it falls."""
    length = _MIDDLE * abs(reach) / longest if longest else 0.0
    start = _MIDDLE - length if reach < 0 else _MIDDLE
    moved = f"{reach:+.3g}".replace("-", "−")
    bar = element("rect", hint(moved), x=start, y=1.5, width=length, height=_HEIGHT - 3, fill=colour)
    middle = element(
        "line", x1=_MIDDLE, x2=_MIDDLE, y1=0, y2=_HEIGHT, stroke="currentColor", stroke_width=0.7, opacity=0.55
    )
    label = f"moves the predictor by {moved}"
    return element("svg", middle, bar, viewBox=f"0 0 {2 * _MIDDLE:g} {_HEIGHT:g}", role="img", aria_label=label)
