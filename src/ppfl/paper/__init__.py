"""The experiments of the paper as packaged comparisons, and tables of our results beside those of the paper."""

from .convergence import all_series, chart_lines
from .costs import Cost, cost_to_reach
from .paper_results import PaperResult, paper_results
from .studies import STUDIES, Case, Study, load_study
from .study_tables import VIEWS, StudyTable, study_tables

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
