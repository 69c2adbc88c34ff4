"""What every view has in common: names and colours of canonical models, formats of numbers, and the look of charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.losses import SCORES
from ..core.simplex import CLEAR as CLEAR

NOTHING = "–"  # where there is no value
MB = 1e6

# Colours that people with any colour vision can tell apart (Okabe and Ito, 2008); they belong to canonical models.
_MODELS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
OURS = "#D55E00"  # methods: PPFL has a colour, and the others are greys with dashes
_GREYS = ("#5F6770", "#8A929A", "#6F7780", "#A2A9B0")
_DASHES = ([1, 0], [6, 3], [2, 2], [9, 3, 2, 3], [4, 2, 1, 2])
GREY = "#7A8088"  # of text and lines in a saved chart; it can be read on white and on black


# ---------------------------------------------------------------------- canonical models and methods


def model_name(place: int) -> str:
    """The name of the canonical model with the place-th largest share of the population.

    >>> model_name(0), model_name(25), model_name(26)
    ('A', 'Z', 'AA')
    """
    before, at = divmod(place, 26)
    return (model_name(before - 1) if before else "") + chr(ord("A") + at)


def model_names(k: int) -> list[str]:
    return [model_name(place) for place in range(k)]


def model_colour(place: int) -> str:
    """The colour of that canonical model; lighter each time the colours begin again.

    >>> model_colour(0), model_colour(8)
    ('#0072B2', '#73B1D5')
    """
    turn, at = divmod(place, len(_MODELS))
    keep = 0.55**turn
    channels = (int(_MODELS[at][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - keep * (255 - channel)):02X}" for channel in channels)


def mixed_colour(shares: Sequence[float]) -> str:
    """The colour of a client: the mean of the colours of the models, weighted by its shares.

    >>> mixed_colour([1.0, 0.0]), mixed_colour([0.5, 0.5])
    ('#0072B2', '#738859')
    """
    channels = [[int(model_colour(at)[i : i + 2], 16) for i in (1, 3, 5)] for at in range(len(shares))]
    mixed = (sum(c * rgb[i] for c, rgb in zip(shares, channels, strict=True)) for i in range(3))
    return "#" + "".join(f"{round(value):02X}" for value in mixed)


class Look(NamedTuple):
    """How the lines of a method are drawn."""

    colour: str
    dash: list[int]


def method_looks(labels: Sequence[str], ours: Sequence[str] = ()) -> dict[str, Look]:
    """The looks of methods; `ours`: those drawn in colour, by default those whose label begins with PPFL."""
    coloured = [label for label in labels if label in ours] or [label for label in labels if label.startswith("PPFL")]
    rest = [label for label in labels if label not in coloured]
    looks = {label: Look(OURS, _DASHES[at % len(_DASHES)]) for at, label in enumerate(coloured)}
    return looks | {label: Look(_GREYS[at % len(_GREYS)], _DASHES[at % len(_DASHES)]) for at, label in enumerate(rest)}


# ---------------------------------------------------------------------- numbers as text


class Metric(NamedTuple):
    """What a score measures, and how its values are shown."""

    name: str
    higher_is_better: bool | None = None  # None: not known

    @property
    def is_share(self) -> bool:
        return self.name == "accuracy"

    def show(self, value: float | None) -> str:
        """A value as text: accuracies in per cent.

        >>> metric("accuracy").show(0.9123), metric("rmse").show(0.51234), metric("rmse").show(None)
        ('91.23%', '0.512', '–')
        """
        if value is None or not math.isfinite(value):
            return NOTHING
        return f"{value:.2%}" if self.is_share else f"{value:#.3g}".rstrip(".")

    def show_spread(self, value: float) -> str:
        return f"{100 * value:.2f}" if self.is_share else f"{value:.2g}"

    @property
    def axis_format(self) -> str:
        return ".0%" if self.is_share else "~g"

    def better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


def metric(name: str) -> Metric:
    """The metric of that name; losses are better where they are lower."""
    known = SCORES | dict.fromkeys(("loss", "objective", "stationarity"), False)
    return Metric(name, known.get(name.removeprefix("validation_")))


def show_score(name: str, value: Any) -> str:
    """A score as text, by the name of its metric."""
    return metric(name).show(value if isinstance(value, int | float) else None)


def show_seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"


def show_number(value: float) -> str:
    return f"{value:.3g}"


def show_share(share: float) -> str:
    return f"{share:.0%}"


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "client"), plural(4000, "client")
    ('1 client', '4,000 clients')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def join_names(names: Sequence[str]) -> str:
    """
    >>> join_names(["A", "B", "C"]), join_names(["A, small", "A, large", "B"])
    ('A, B and C', 'A, small; A, large and B')
    """
    between = "; " if any("," in name for name in names) else ", "
    return " and ".join([between.join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def evenly(count: int, most: int) -> list[int]:
    """At most so many positions at even steps, from the first to the last.

    >>> evenly(100, 4), evenly(2, 4)
    ([0, 33, 66, 99], [0, 1])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def same_decimals(values: Sequence[float]) -> list[str]:
    """The numbers of one row with equally many decimals.

    The largest number has four digits, and up to two decimals more if a smaller number needs them.

    >>> same_decimals([23.35482, -9.0993]), same_decimals([1106.7, 0.62, 0.0])
    (['23.35', '-9.10'], ['1106.70', '0.62', '0.00'])
    """
    sizes = [abs(value) for value in values if value != 0]
    if not sizes or not math.isfinite(max(sizes)):
        return [f"{value:g}" for value in values]
    largest, smallest = (-math.floor(math.log10(size)) for size in (max(sizes), min(sizes)))
    enough = max(0, largest + 3)
    decimals = min(8, enough + 2, max(enough, smallest + 1))
    return [f"{value:.{decimals}f}" for value in values]


# ---------------------------------------------------------------------- the look of charts


def chart_config(ink: str = GREY) -> dict[str, Any]:
    """The configuration of a chart whose words and lines have this colour."""
    axis = {"labelColor": ink, "titleColor": ink, "domainColor": ink, "tickColor": ink, "gridColor": ink}
    quiet = {"domain": False, "ticks": False, "gridOpacity": 0.15, "titleFontWeight": "normal", "labelPadding": 6}
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif",
        "view": {"stroke": None},
        "axis": axis | quiet | {"labelFontSize": 12, "titleFontSize": 12, "labelLimit": 160, "titlePadding": 10},
        "axisQuantitative": {"tickCount": 7},
        "legend": {
            "labelColor": ink, "titleColor": ink, "titleFontWeight": "normal", "labelFontSize": 12, "labelLimit": 220,
            "orient": "top", "symbolStrokeWidth": 2.5,
        },
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12},
        "title": {"color": ink, "subtitleColor": ink, "anchor": "start", "fontSize": 14},
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": ink},
    }  # fmt: skip
