"""One self-contained HTML page, and pictures of memberships and curves, from the folders of finished or running runs.

The page needs no network and no script: drawings are SVG written by hand (`bars`, `lines`, `areas`, `dots` on top
of `drawing`), so the picture in a README is the drawing on the page. `records` and `portrait` say what is read
from a run, `curves` draws it over rounds and over bytes, `results`, `details` and `summary` put it in tables and
words, `page` puts all together.
"""

from .page import render
from .write import write_curves, write_report

__all__ = ["render", "write_curves", "write_report"]
