"""Population GLMs (Section 2.2 of the paper): scikit-learn estimators for a table with a client column.

This folder has the estimators, their families and their likelihoods. `solvers` minimises the objectives, and `table`
fits whole DataFrames for the command line.
"""

from .choice_model import PopulationChoice
from .mixed_model import MixedModel, as_mixed_model, mixed_model
from .regression import PopulationClassifier, PopulationRegressor

__all__ = [
    "MixedModel",
    "PopulationChoice",
    "PopulationClassifier",
    "PopulationRegressor",
    "as_mixed_model",
    "mixed_model",
]
