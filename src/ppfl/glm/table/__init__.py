"""From a DataFrame with a client column to a fitted population, for the command line.

`table_settings` says what to fit. `prepare` checks the table, `encoding` turns columns into numbers and `target` picks
a family. `fit_table` fits, `candidates` tries several K, `held_out_scores` compares with one model for all and with
`local_models`, and `coefficients` and `export` present the result.
"""

from ..solvers import CRITERIA
from .coefficients import CoefficientRow, CoefficientTable
from .encoding import Encoding
from .export import file_contents
from .fit_table import CLEAR, OnStep, TableFit, fit_table
from .held_out_scores import HeldOutScore
from .local_models import LocalModels
from .prepare import PreparedTable, prepare_table
from .table_settings import TableSettings
from .target import FAMILIES, Target

__all__ = [
    "CLEAR",
    "CRITERIA",
    "FAMILIES",
    "CoefficientRow",
    "CoefficientTable",
    "Encoding",
    "HeldOutScore",
    "LocalModels",
    "OnStep",
    "PreparedTable",
    "TableFit",
    "TableSettings",
    "Target",
    "file_contents",
    "fit_table",
    "prepare_table",
]
