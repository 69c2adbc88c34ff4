"""The table of coefficients: one row per feature, one column per canonical model, with bars on a common scale."""

import math
from collections.abc import Sequence

from .detail_tables import swatch
from .drawing import tooltip
from .markup import Markup, element, escape, join
from .palette import MIDDLE_GREY, model_colour
from .population_results import EffectRow, PopulationResults
from .sorted_memberships import letter

_MIDDLE, _HEIGHT = 50.0, 9.0


def effect_table(results: PopulationResults) -> Markup:
    """All coefficients, grouped by outcome; the prediction for an average row comes first."""
    lines = [*results.average, *results.coefficients]
    longest = max((abs(reach) for line in lines for reach in (*(line.reach or ()), line.pooled_reach)), default=0.0)
    heads = [element("th", escape(""), scope="col"), *(_head(at, share) for at, share in enumerate(results.shares))]
    heads.append(element("th", escape("one model for all"), scope="col", class_="number"))
    rows = []
    outcomes = list(dict.fromkeys(line.outcome for line in lines))
    for outcome in outcomes:
        if len(outcomes) > 1:
            title = f"{results.target} = {outcome}"
            heading = element("th", escape(title), scope="rowgroup", colspan=str(results.k + 2))
            rows.append(element("tr", heading, class_="part"))
        average = [line for line in results.average if line.outcome == outcome]
        rows += [_row(line, longest, share=bool(results.classes)) for line in average]
        rows += [_row(line, longest) for line in results.coefficients if line.outcome == outcome]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", table, class_="wide effects")


def format_same_decimals(values: Sequence[float]) -> list[str]:
    """Format the numbers of one row with the same number of decimals.

    The largest number has four digits, and up to two decimals more if a smaller number needs them.

    >>> format_same_decimals([23.35482, -9.0993]), format_same_decimals([1106.7, 0.62, 0.0])
    (['23.35', '-9.10'], ['1106.70', '0.62', '0.00'])
    >>> format_same_decimals([0.0, 0.0])
    ['0', '0']
    """
    sizes = [abs(value) for value in values if value != 0]
    if not sizes or not math.isfinite(max(sizes)):
        return [f"{value:g}" for value in values]
    largest, smallest = (-math.floor(math.log10(size)) for size in (max(sizes), min(sizes)))
    enough = max(0, largest + 3)
    decimals = min(8, enough + 2, max(enough, smallest + 1))
    return [f"{value:.{decimals}f}" for value in values]


def _head(at: int, share: float) -> Markup:
    return element("th", swatch(at), escape(f"{letter(at)} · {share:.0%}"), scope="col", class_="number")


def _row(line: EffectRow, longest: float, *, share: bool = False) -> Markup:
    values = [*line.values, line.pooled]
    shown = [f"{value:.1%}" for value in values] if share else format_same_decimals(values)
    reach = None if line.reach is None else [*line.reach, line.pooled_reach]
    colours = [*(model_colour(at) for at in range(len(line.values))), MIDDLE_GREY]
    cells = []
    for at in range(len(values)):
        if line.is_shared and 0 < at < len(line.values):
            continue  # a shared coefficient is shown once for all canonical models
        bar = [] if reach is None else [_bar(reach[at], longest, MIDDLE_GREY if line.is_shared else colours[at])]
        one_for_all = line.is_shared and at == 0 and len(line.values) > 1
        content = [escape(shown[at].replace("-", "−")), *([element("small", escape(" shared"))] if one_for_all else [])]
        spans = {"colspan": str(len(line.values)), "class_": "number"} if one_for_all else {"class_": "number"}
        cells.append(element("td", join(content), *bar, **spans))
    return element("tr", element("th", escape(line.name), scope="row"), *cells)


def _bar(reach: float, longest: float, colour: str) -> Markup:
    """From the middle to the right if the predictor increases, to the left if it decreases."""
    length = _MIDDLE * abs(reach) / longest if longest else 0.0
    start = _MIDDLE - length if reach < 0 else _MIDDLE
    moved = f"{reach:+.3g}".replace("-", "−")
    bar = element("rect", tooltip(moved), x=start, y=1.5, width=length, height=_HEIGHT - 3, fill=colour)
    middle = element(
        "line", x1=_MIDDLE, x2=_MIDDLE, y1=0, y2=_HEIGHT, stroke="currentColor", stroke_width=0.7, opacity=0.55
    )
    label = f"moves the predictor by {moved}"
    return element("svg", middle, bar, viewBox=f"0 0 {2 * _MIDDLE:g} {_HEIGHT:g}", role="img", aria_label=label)
