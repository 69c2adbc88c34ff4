"""The run as one picture: seconds per round by method, and cost over size on logarithmic axes."""

import altair as alt
from growth import Grown
from results import Compared, Results

from ppfl.report.theme import GREY, OURS, chart_config


def picture(results: Results) -> alt.Chart:
    parts = [_bars(compared) for compared in results.compared.values()] + [_curves(grown) for grown in results.grown]
    return alt.vconcat(*parts).configure(**chart_config())


def _bars(compared: Compared) -> alt.Chart:
    """One bar per method; plain loops in grey."""
    rows = [
        {"method": label, "seconds": one.seconds, "plain": label.startswith("plain"),
         "text": f"{one.seconds:.3g} s" + ("" if (x := compared.times_faster(label)) is None else f", {x:.1f} x plain")}
        for label, one in compared.found.items() if not one.failed
    ]  # fmt: skip
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        alt.X("seconds:Q", title="seconds per round"),
        alt.Y("method:N", title=None, sort=None, axis=alt.Axis(labelLimit=400)),
    )
    bars = base.mark_bar().encode(color=alt.condition("datum.plain", alt.value(GREY), alt.value(OURS)))
    text = base.mark_text(align="left", dx=6).encode(text="text:N")
    return (bars + text).properties(title=f"({compared.part}) {compared.title}", width=420)


def _curves(grown: Grown) -> alt.Chart:
    """One curve per method, labelled with its exponent."""
    rows = [
        {"method": grown.describe(method), "size": size, "seconds": one.seconds}
        for method, curve in grown.curves.items() for size, one in curve if not one.failed
    ]  # fmt: skip
    scale = alt.Scale(type="log")
    lines = alt.Chart(alt.InlineData(values=rows)).mark_line(point=True).encode(
        alt.X("size:Q", title=grown.along, scale=scale), alt.Y("seconds:Q", title="seconds per round", scale=scale),
        alt.Color("method:N", title=None, scale=alt.Scale(range=[OURS, GREY])),
    )  # fmt: skip
    return lines.properties(title=f"({grown.part}) growth with {grown.title}", width=420)
