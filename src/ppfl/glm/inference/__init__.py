"""What a fitted model says about its uncertainty: standard errors, intervals, residuals, the summary, and its file.

`standard_errors` inverts the observed information, `parameter_table` puts it into the units of the table,
`posterior_draws` and `intervals` go on to clients and predictions, and `inference_mixin` has the
methods of the estimators.
"""

from .inference_mixin import InferenceMixin
from .intervals import client_coefficient_intervals, predict_with_intervals, probabilities_with_intervals

__all__ = [
    "InferenceMixin",
    "client_coefficient_intervals",
    "predict_with_intervals",
    "probabilities_with_intervals",
]
