"""One self-contained HTML page, and pictures of memberships and curves, from the folders of finished or running runs.

The page needs no network and no script. Its drawings are SVG built by this package, so the same drawing can be shown
on the page and in a README.

- `sorted_memberships` prepares memberships for display, `methods` averages runs over seeds;
- `membership_bars`, `line_chart`, `area_charts` and `dot_chart` are the charts, built on `drawing`;
- `curves` prepares the curves over rounds and over bytes sent;
- `results` and `detail_tables` are the tables, `summary` is the text, and `page` puts everything together;
- `population_page` is the page of a fitted table, with the charts of `effects`, `simplex_plot` and `score_bars`;
- `residual_plots` draws the residuals of a fitted GLM.
"""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .page import render
    from .population_page import render_population
    from .population_results import PopulationResults
    from .residual_plots import plot_residuals
    from .write import write_curves, write_rates, write_report

_HOMES = {
    "PopulationResults": "population_results",
    "plot_residuals": "residual_plots",
    "render": "page",
    "render_population": "population_page",
    "write_curves": "write",
    "write_rates": "write",
    "write_report": "write",
}
__getattr__ = exported(__name__, _HOMES)

__all__ = [
    "PopulationResults",
    "plot_residuals",
    "render",
    "render_population",
    "write_curves",
    "write_rates",
    "write_report",
]
