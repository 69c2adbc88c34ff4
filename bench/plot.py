"""The run as one picture: bars of seconds per round, and cost over size on logarithmic axes."""

from collections.abc import Sequence

from growth import Grown
from results import Compared, Results
from turns import Measured

from ppfl.report.drawing import LETTER_WIDTH, axis, drawing, grid_lines, separate, text, tooltip
from ppfl.report.markup import Markup, element
from ppfl.report.palette import MIDDLE_GREY, method_colour

WIDTH, GAP, BAR = 900.0, 28.0, 20.0
NAMES, VALUES = 350.0, 150.0  # pixels for words on the left and on the right of bars
PANEL, PANEL_HEIGHT, PANEL_LEFT = WIDTH / 2, 240.0, 56.0


def picture(results: Results) -> Markup:
    parts: list[Markup] = []
    y = 0.0
    for compared in results.compared.values():
        parts += _bars(compared, y)
        y += GAP + BAR * len(compared.found) + GAP
    for i, grown in enumerate(results.grown):
        parts += _curves(grown, PANEL * (i % 2), y + PANEL_HEIGHT * (i // 2))
    height = y + PANEL_HEIGHT * ((len(results.grown) + 1) // 2)
    return drawing(WIDTH, max(height, BAR), "Seconds per round, and how they grow", *parts, standalone=True)


def _bars(compared: Compared, top: float) -> list[Markup]:
    """One bar per method; plain loops in grey."""
    whole = {label: one for label, one in compared.found.items() if not one.failed}
    longest = max((one.seconds for one in whole.values()), default=1.0)
    parts = [_title(0, top + 16, f"({compared.part}) {compared.title}: seconds per round")]
    for i, (label, one) in enumerate(whole.items()):
        y = top + GAP + BAR * i
        length = one.seconds / longest * (WIDTH - NAMES - VALUES)
        colour = MIDDLE_GREY if label.startswith("plain") else method_colour(1)
        bar = element("rect", tooltip(label), x=NAMES, y=y + 3, width=length, height=BAR - 6, fill=colour)
        parts += [text(NAMES - 8, y + 14, label, anchor="end"), bar]
        parts.append(text(NAMES + length + 6, y + 14, _said(compared, label, one)))
    return parts


def _said(compared: Compared, label: str, one: Measured) -> str:
    faster = compared.times_faster(label)
    return f"{one.seconds:.3g} s" + ("" if faster is None else f", {faster:.1f} x plain")


def _curves(grown: Grown, left: float, top: float) -> list[Markup]:
    """One curve per method, labelled with its exponent; the axis is marked at the sizes that were measured."""
    curves = {
        grown.describe(method): [(size, one.seconds) for size, one in curve if not one.failed]
        for method, curve in grown.curves.items()
    }
    curves = {name: points for name, points in curves.items() if points}
    parts = [_title(left, top + 16, f"({grown.part}) growth with {grown.title}")]
    if not curves:
        return parts
    start, end = left + PANEL_LEFT, left + PANEL - 24 - LETTER_WIDTH * max(map(len, curves))
    floor, ceiling = top + PANEL_HEIGHT - 56, top + 40
    sizes = sorted({size for points in curves.values() for size, _ in points})
    x_axis = axis([float(size) for size in sizes], start, end, log=True)
    y_axis = axis(
        _to_powers_of_ten([seconds for points in curves.values() for _, seconds in points]), floor, ceiling, log=True
    )
    parts += grid_lines(y_axis, start, end, lambda value: f"{value:g} s")
    parts += [text(x_axis.at(size), floor + 18, f"{size:,}", anchor="middle", opacity=0.75) for size in sizes]
    parts.append(text((start + end) / 2, floor + 36, grown.along, anchor="middle"))
    names = separate([y_axis.at(points[-1][1]) for points in curves.values()], 14, ceiling, floor)
    for i, ((name, points), y) in enumerate(zip(curves.items(), names, strict=True)):
        places = [(x_axis.at(size), y_axis.at(seconds)) for size, seconds in points]
        parts += _curve(places, method_colour(i + 1))
        parts.append(text(end + 10, y + 4, name))
    return parts


def _curve(places: Sequence[tuple[float, float]], colour: str) -> list[Markup]:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    line = element("path", d=path, fill="none", stroke=colour, stroke_width=2)
    return [line, *(element("circle", cx=x, cy=y, r=3, fill=colour) for x, y in places)]


def _to_powers_of_ten(seconds: Sequence[float]) -> list[float]:
    """The powers of ten below and above, so that the axis has at least two labels."""
    powers = [10.0**power for power in range(-6, 6)]
    return [max(p for p in powers if p <= min(seconds)), min(p for p in powers if p >= max(seconds))]


def _title(x: float, y: float, words: str) -> Markup:
    return text(x, y, words, font_weight="bold")
