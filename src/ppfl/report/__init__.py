"""What people see of runs and fits: tables, charts, and one self-contained page.

- `tables` has `Table`, the same values for a terminal, a page, a notebook, Markdown, LaTeX, csv and DataFrames;
- `results` has `Comparison`, the runs of one or several methods, and makes their tables; `memberships` sorts clients;
- `charts` has one function for each chart, plain numbers in and a chart of Altair out;
- `text` writes sentences, `page` puts everything together, `glm_page` does so for a fitted table;
- `terminal` prints, `progress` shows what goes on; `card` is what a notebook shows of a fit.
"""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .charts import plot_coefficients, plot_residuals
    from .page import export, write_report
    from .results import Comparison
    from .tables import Column, Spread, Table

_HOMES = {
    "Column": "tables",
    "Comparison": "results",
    "Spread": "tables",
    "Table": "tables",
    "export": "page",
    "plot_coefficients": "charts",
    "plot_residuals": "charts",
    "write_report": "page",
}
__getattr__ = exported(__name__, _HOMES)

__all__ = ["Column", "Comparison", "Spread", "Table", "export", "plot_coefficients", "plot_residuals", "write_report"]
