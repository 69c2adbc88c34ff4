"""Population GLMs for a table with a client column: scikit-learn estimators that answer like a mixed model.

Section 2.2 of the paper. `likelihoods` says what a client's data are worth under any membership; `marginal` integrates
memberships out, `profile` takes the best ones, `federated` runs the paper's rounds. `starts`, `descent` and `solve` go
to the minimum, `fitting` hands it to the estimators. `table_fit` goes from a DataFrame to canonical models beside one
model for all and one for each client, as `ppfl glm` shows them.
"""

from .choice import PopulationChoice
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
