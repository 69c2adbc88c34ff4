"""The paper's experiments as packaged comparisons, its figures, and ours beside them."""

from .costs import Cost, cost_to_reach
from .figures import Figure, paper_figures
from .sheets import Sheet, sheets_of
from .studies import STUDIES, Case, Study, load_study

__all__ = [
    "STUDIES",
    "Case",
    "Cost",
    "Figure",
    "Sheet",
    "Study",
    "cost_to_reach",
    "load_study",
    "paper_figures",
    "sheets_of",
]
