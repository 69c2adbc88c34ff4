"""One self-contained HTML page, and pictures of memberships and curves, from the folders of finished or running runs.

The page needs no network and no script: drawings are SVG written by hand (`bars`, `lines`, `areas`, `dots` on top
of `drawing`), so the picture in a README is the drawing on the page. `records` and `portrait` say what is read
from a run, `curves` draws it over rounds and over bytes, `results`, `details` and `summary` put it in tables and
words, `page` puts all together. `population_page` is the page of a fitted table: `effects`, `simplex` and
`score_bars` draw what its canonical models say, where clients are, and how well that predicts.
"""

from .page import render
from .population import Population
from .population_page import render_population
from .write import write_curves, write_report

__all__ = ["Population", "render", "render_population", "write_curves", "write_report"]
