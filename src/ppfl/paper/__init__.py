"""The experiments of the paper as packaged comparisons, and tables of our results beside those of the paper."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .convergence import all_series, chart_lines
    from .costs import Cost, cost_to_reach
    from .published import PaperResult, paper_results
    from .studies import Case, Study, load_study
    from .tables import VIEWS, StudyTable, study_tables

STUDIES = (
    "table1",
    "table2",
    "table3",
    "adapters",
    "paper-algorithms",
    "convergence",
    "local-steps",
    "k-sweep",
    "communication",
    "membership-recovery",
    "participation",
)
_HOMES = {
    "VIEWS": "tables",
    "Case": "studies",
    "Cost": "costs",
    "PaperResult": "published",
    "Study": "studies",
    "StudyTable": "tables",
    "all_series": "convergence",
    "chart_lines": "convergence",
    "cost_to_reach": "costs",
    "load_study": "studies",
    "paper_results": "published",
    "study_tables": "tables",
}
__getattr__ = exported(__name__, _HOMES)

__all__ = [
    "STUDIES",
    "VIEWS",
    "Case",
    "Cost",
    "PaperResult",
    "Study",
    "StudyTable",
    "all_series",
    "chart_lines",
    "cost_to_reach",
    "load_study",
    "paper_results",
    "study_tables",
]
