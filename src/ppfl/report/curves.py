"""Curves of a metric for each method, over rounds and over the bytes a client has sent and received."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .drawing import drawing, round_ticks, spans_decades, text
from .line_chart import ROUNDS, WIDTH, Curve, XAxisFormat, YAxisFormat, chart_height, line_parts
from .markup import Markup, element, shorten
from .methods import MethodRuns
from .metric import Metric
from .results import byte_unit
from .summary import plural

_ABOVE = 72.0  # pixels for the title above the charts of a picture
_MAX_TITLE_LENGTH = 40  # letters of the title, for each chart below it


def over_rounds(methods: Sequence[MethodRuns], key: str) -> list[Curve]:
    """One curve for each method that recorded this value."""
    found = ((at, method, method.curve(key)) for at, method in enumerate(methods))
    return [Curve(method.label, at, points) for at, method, points in found if points]


class Traffic(NamedTuple):
    """Curves over the bytes a client has sent and received, and how the axis shows them."""

    curves: list[Curve]
    x_format: XAxisFormat
    unit: str


def over_traffic(methods: Sequence[MethodRuns], key: str) -> Traffic | None:
    """One curve per method, or None if no method sends anything.

    A method that sends nothing has no position on the x axis; it becomes a flat line.
    """
    found = [(at, method, points) for at, method in enumerate(methods) if (points := method.curve_over_traffic(key))]
    totals = [total for _, _, points in found if (total := points[-1][0])]
    if not totals:
        return None
    scale, unit = byte_unit(totals)
    curves = [
        Curve(method.label, at, [(sent / scale, value) for sent, value in points], is_flat=not points[-1][0])
        for at, method, points in found
    ]
    any_flat = any(curve.is_flat for curve in curves)
    name = f"{unit} sent and received by a client{'; dotted: none' if any_flat else ''}"
    log = spans_decades(totals, 1)
    return Traffic(curves, XAxisFormat(name, "{:,g}".format, f"{{:,.3g}} {unit}".format, log), unit)


def curves_picture(methods: Sequence[MethodRuns], metric: Metric, title: str) -> Markup:
    """The metric over rounds and over traffic, side by side; at least one method must have been evaluated."""
    curves, traffic = over_rounds(methods, metric.name), over_traffic(methods, metric.name)
    y_format = score_axis([*curves, *(traffic.curves if traffic else [])], metric)
    label = f"{metric.full_name} on test data".capitalize()
    charts = [(f"{label}, round by round", curves, ROUNDS)]
    if traffic is not None:
        charts.append((f"{label}, by {traffic.unit} sent and received", traffic.curves, traffic.x_format))
    parts = [text(10, 22, shorten(title, _MAX_TITLE_LENGTH * len(charts)), font_size=16, font_weight="bold")]
    parts.append(text(10, 42, _setting(methods) + cut_note(y_format, metric)))
    for at, (heading, drawn, x_format) in enumerate(charts):
        parts.append(text(10 + WIDTH * at, _ABOVE - 4, heading, font_weight="bold"))
        chart = line_parts(drawn, y_format, x_format, tooltips=False)
        parts.append(element("g", *chart, transform=f"translate({WIDTH * at:g} {_ABOVE:g})"))
    return drawing(WIDTH * len(charts), _ABOVE + chart_height(len(curves)), title, *parts, standalone=True)


def rates_picture(lines: Mapping[str, Sequence[tuple[float, float]]], title: str, x_name: str) -> Markup:
    """Lines of positive values over positive x, both axes logarithmic, so that a power of x is straight."""
    curves = [Curve(label, at, points) for at, (label, points) in enumerate(lines.items())]
    x_format = XAxisFormat(x_name, "{:,g}".format, "{:,g}".format, log=True)
    parts = line_parts(curves, YAxisFormat("{:.0e}".format, log=True), x_format, tooltips=False)
    heading = text(10, 22, shorten(title, 60), font_size=14, font_weight="bold")
    chart = element("g", *parts, transform="translate(0 34)")
    return drawing(WIDTH, 34 + chart_height(len(curves)), title, heading, chart, standalone=True)


def score_axis(curves: Sequence[Curve], metric: Metric) -> YAxisFormat:
    """The y axis of the metric: all of one curve; of several, the second half of each and the best value of all.

    Without this, curves that start far from where they end would all look like one line. Only the starts of curves
    are cut off, and only if they would take more than half of the height.
    """
    late = [value for curve in curves for _, value in curve.points[len(curve.points) // 2 :]]
    every = [value for curve in curves for _, value in curve.points]
    low, high = (min(late), max(every)) if metric.higher_is_better else (min(every), max(late))
    close = len(curves) > 1 and 1e-9 * abs(high) < high - low < (max(every) - min(every)) / 2
    return YAxisFormat(metric.format_tick, metric.maximum, round_outward(low, high, metric.maximum) if close else None)


def cut_note(y_format: YAxisFormat, metric: Metric) -> str:
    """A note that curves are cut off, as the end of a sentence; empty if they are not."""
    if y_format.window is None:
        return ""
    low, high = map(metric.format_tick, y_format.window)
    return f"; what is {f'below {low}' if metric.higher_is_better else f'above {high}'} is cut off"


def round_outward(low: float, high: float, maximum: float) -> tuple[float, float]:
    """The nearest round values below `low` and above `high`, to label a frame with.

    >>> round_outward(81.7, 93.4, 100)
    (81.0, 94.0)
    """
    steps = round_ticks(low - (high - low), high + (high - low), 36)
    return max(step for step in steps if step <= low), min(maximum, *(step for step in steps if step >= high))


def _setting(methods: Sequence[MethodRuns]) -> str:
    clients = len({id_ for method in methods for id_ in method.first.ids})
    rounds, seeds = max(method.rounds for method in methods), {len(method.runs) for method in methods}
    setting, many = f"{plural(clients, 'client')}, {plural(rounds, 'round')}", "up to " if len(seeds) > 1 else ""
    return f"{setting}, means over {many}{max(seeds)} seeds" if max(seeds) > 1 else setting
