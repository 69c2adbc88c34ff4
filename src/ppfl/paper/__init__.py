"""The experiments of the paper as packaged comparisons, and tables of our results compared with those of the paper."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .figures import Cost, Figures, PaperResult, StoredTable, cost_to_reach, mean_cost, paper_results
    from .pages import ABOUT, markdown_page, study_charts, study_figures
    from .studies import Case, Study, load_study

STUDIES = (
    "table1", "table2", "table3", "adapters", "paper-algorithms", "convergence", "local-steps", "k-sweep",
    "participation",
)  # fmt: skip
_NAMES = {
    "figures": ("Cost", "Figures", "PaperResult", "StoredTable", "cost_to_reach", "mean_cost", "paper_results"),
    "pages": ("ABOUT", "markdown_page", "study_charts", "study_figures"),
    "studies": ("Case", "Study", "load_study"),
}
__getattr__ = exported(__name__, {name: home for home, names in _NAMES.items() for name in names})

__all__ = [
    "ABOUT",
    "STUDIES",
    "Case",
    "Cost",
    "Figures",
    "PaperResult",
    "StoredTable",
    "Study",
    "cost_to_reach",
    "load_study",
    "markdown_page",
    "mean_cost",
    "paper_results",
    "study_charts",
    "study_figures",
]
