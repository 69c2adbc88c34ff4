"""Charts for the examples, drawn with the same functions as ppfl's report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ppfl.report.drawing import Axis, drawing, grid_lines, text, tick_labels
from ppfl.report.markup import Markup, element
from ppfl.report.palette import model_colour

DATA = Path(os.environ.get("PPFL_DATA") or Path(__file__).parents[2] / "shared" / "data") / "tabular"


class Panel(NamedTuple):
    """A plot area with two axes."""

    x: Axis
    y: Axis

    def line(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1.5, **more: str) -> Markup:
        path = "M" + "L".join(f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in points)
        return element("path", d=path, fill="none", stroke=colour, stroke_width=width, **more)

    def dot(self, x: float, y: float, colour: str, radius: float = 3.0, *, hollow: bool = False) -> Markup:
        look = {"fill": "none", "stroke": colour, "stroke_width": 1.2} if hollow else {"fill": colour}
        return element("circle", cx=self.x.at(x), cy=self.y.at(y), r=radius, **look)

    def frame(self, x_name: str, y_name: str) -> list[Markup]:
        """Grid lines with their values, and the names of both axes."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        return [
            *grid_lines(self.y, left, right, "{:g}".format),
            *tick_labels(self.x, bottom + 18, "{:g}".format, about=8),
            text((left + right) / 2, bottom + 38, x_name, anchor="middle"),
            text(left - 40, top - 12, y_name),
        ]


def grouped_bars(values: Mapping[str, Sequence[float]], left: float, right: float, top: float) -> list[Markup]:
    """One group of bars per name, one bar per canonical model; a group is 30 pixels high, plus 16 per bar."""
    every = [value for group in values.values() for value in group]
    along, parts = Axis(min(0.0, *every), max(0.0, *every), left, right), []
    for name, group in values.items():
        parts.append(text(left - 50, top + 8 * len(group) + 4, name, anchor="end"))
        for i, value in enumerate(group):
            start, end = sorted((along.at(0), along.at(value)))
            rectangle = {"x": start, "y": top + 16 * i, "width": max(1.0, end - start), "height": 13.0}
            parts.append(element("rect", **rectangle, fill=model_colour(i)))
            label_x, anchor = (end + 6, "start") if round(value, 1) >= 0 else (start - 6, "end")
            label = f"{round(value, 1) + 0.0:.1f}".replace("-", "−")  # never -0.0
            parts.append(text(label_x, top + 16 * i + 11, label, anchor=anchor))
        top += 30 + 16 * len(group)
    return parts


def titled(width: float, height: float, title: str, subtitle: str, *parts: Markup) -> Markup:
    """A complete drawing with a title and a subtitle."""
    heading = [text(16, 24, title, font_size=16, font_weight="bold"), text(16, 44, subtitle)]
    return drawing(width, height, title, *heading, *parts, standalone=True)


def below(top: float, width: float, height: float, part: Markup) -> Markup:
    """A chart of ppfl's report, embedded in another drawing below its title."""
    return element("svg", part, x=0.0, y=top, width=width, height=height)


def save(folder: Path, **pictures: Markup) -> None:
    """Write each picture as an SVG file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture + "\n", encoding="utf-8")
        print(f"wrote {folder / name}.svg")
