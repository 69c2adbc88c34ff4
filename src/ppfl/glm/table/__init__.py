"""From a DataFrame with a client column to a fitted population, for the command line.

`prepare` checks the table, `encoding` turns its columns into numbers and `target` picks a family. `fit_table` fits and
chooses K, `held_out_scores` compares with one model for all and with `local_models`, and `coefficients` and `export`
present the result.
"""

from .coefficients import CoefficientRow, CoefficientTable
from .encoding import ChosenColumns, EncodedColumn, Encoding, choose_features
from .export import file_contents
from .fit_table import CLEAR, CandidateFit, OnStep, TableFit, fit_table
from .held_out_scores import HeldOutScore
from .local_models import LocalModels
from .prepare import PreparedTable, TableSettings, prepare_table
from .target import FAMILIES, Target

__all__ = [
    "CLEAR",
    "FAMILIES",
    "CandidateFit",
    "ChosenColumns",
    "CoefficientRow",
    "CoefficientTable",
    "EncodedColumn",
    "Encoding",
    "HeldOutScore",
    "LocalModels",
    "OnStep",
    "PreparedTable",
    "TableFit",
    "TableSettings",
    "Target",
    "choose_features",
    "file_contents",
    "fit_table",
    "prepare_table",
]
