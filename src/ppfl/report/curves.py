"""How methods get better: over rounds, and over what that costs a client to send and receive."""

from collections.abc import Sequence
from typing import NamedTuple

from .drawing import drawing, round_steps, spans_decades, text
from .lines import ROUNDS, WIDTH, Along, Curve, Upward, chart_height, line_parts
from .markup import Markup, element, shortened
from .methods import Method
from .metric import Metric
from .results import byte_unit
from .summary import plural

_ABOVE = 72.0  # pixels for what stands over the charts of a picture
_LONGEST_TITLE = 40  # letters over a chart


def over_rounds(methods: Sequence[Method], key: str) -> list[Curve]:
    """Of the methods that recorded it."""
    found = ((at, method, method.curve(key)) for at, method in enumerate(methods))
    return [Curve(method.label, at, points) for at, method, points in found if points]


class Traffic(NamedTuple):
    """Curves over what a client has sent and received, and how to write that at an axis."""

    curves: list[Curve]
    along: Along
    unit: str


def over_traffic(methods: Sequence[Method], key: str) -> Traffic | None:
    """None where nobody sends anything. Who sends nothing has no place along the axis, and is drawn across it."""
    found = [(at, method, points) for at, method in enumerate(methods) if (points := method.curve_over_traffic(key))]
    totals = [total for _, _, points in found if (total := points[-1][0])]
    if not totals:
        return None
    scale, unit = byte_unit(totals)
    curves = [
        Curve(method.label, at, [(sent / scale, value) for sent, value in points], level=not points[-1][0])
        for at, method, points in found
    ]
    silent = any(curve.level for curve in curves)
    name = f"{unit} sent and received by a client{'; dotted: none' if silent else ''}"
    return Traffic(curves, Along(name, "{:,g}".format, f"{{:,.3g}} {unit}".format, spans_decades(totals, 1)), unit)


def curves_picture(methods: Sequence[Method], metric: Metric, title: str) -> Markup:
    """The metric over rounds and over traffic, side by side; one method at least must have been evaluated."""
    curves, traffic = over_rounds(methods, metric.name), over_traffic(methods, metric.name)
    upward = scored([*curves, *(traffic.curves if traffic else [])], metric)
    said = f"{metric.words} on test data".capitalize()
    charts = [(f"{said}, round by round", curves, ROUNDS)]
    if traffic is not None:
        charts.append((f"{said}, by {traffic.unit} sent and received", traffic.curves, traffic.along))
    parts = [text(10, 22, shortened(title, _LONGEST_TITLE * len(charts)), font_size=16, font_weight="bold")]
    parts.append(text(10, 42, _setting(methods) + cut_words(upward, metric)))
    for at, (heading, drawn, along) in enumerate(charts):
        parts.append(text(10 + WIDTH * at, _ABOVE - 4, heading, font_weight="bold"))
        chart = line_parts(drawn, upward, along, hints=False)
        parts.append(element("g", *chart, transform=f"translate({WIDTH * at:g} {_ABOVE:g})"))
    return drawing(WIDTH * len(charts), _ABOVE + chart_height(len(curves)), title, *parts, alone=True)


def scored(curves: Sequence[Curve], metric: Metric) -> Upward:
    """The axis of the metric: where the second halves of all curves lie, and the best of all.

    Curves that start far off and end close together would be one line otherwise. What is left out is starts, and
    only if they would take more than half of the height.
    """
    late = [value for curve in curves for _, value in curve.points[len(curve.points) // 2 :]]
    every = [value for curve in curves for _, value in curve.points]
    low, high = (min(late), max(every)) if metric.higher_is_better else (min(every), max(late))
    close = 1e-9 * abs(high) < high - low < (max(every) - min(every)) / 2
    return Upward(metric.tick, metric.most, rounded_out(low, high, metric.most) if close else None)


def cut_words(upward: Upward, metric: Metric) -> str:
    """What a reader must be told of a window, as the end of a sentence."""
    if upward.window is None:
        return ""
    low, high = map(metric.tick, upward.window)
    return f"; what is {f'below {low}' if metric.higher_is_better else f'above {high}'} is cut off"


def rounded_out(low: float, high: float, most: float) -> tuple[float, float]:
    """To round values just outside, where a frame can be labelled.

    >>> rounded_out(81.7, 93.4, 100)
    (81.0, 94.0)
    """
    steps = round_steps(low - (high - low), high + (high - low), 36)
    return max(step for step in steps if step <= low), min(most, *(step for step in steps if step >= high))


def _setting(methods: Sequence[Method]) -> str:
    clients = len({id_ for method in methods for id_ in method.first.ids})
    rounds, seeds = max(method.rounds for method in methods), {len(method.runs) for method in methods}
    said, many = f"{plural(clients, 'client')}, {plural(rounds, 'round')}", "up to " if len(seeds) > 1 else ""
    return f"{said}, means over {many}{max(seeds)} seeds" if max(seeds) > 1 else said
