"""Families: the distribution of the target, and the link from linear predictors to its mean.

`family_contract` says what a family is. The others are `continuous`, `counts`, `negative_binomial`,
`zero_inflated` and `classes`; `family_names` finds them by name.
"""

from .classes import BernoulliFamily, MultinomialFamily
from .continuous import GammaFamily, GaussianFamily
from .counts import PoissonFamily
from .family_contract import (
    LOG_DISPERSION,
    Derivatives,
    Family,
    Memberships,
    combine,
    combine_logs,
    derivatives_of_mixture,
)
from .family_names import REGRESSIONS, classification_family, family_name, is_positive_only, regression_family
from .negative_binomial import LOG_INVERSE_SIZE, NegativeBinomialFamily
from .zero_inflated import LOGIT_ZEROS, ZeroInflatedNegativeBinomialFamily, ZeroInflatedPoissonFamily

__all__ = [
    "LOGIT_ZEROS", "LOG_DISPERSION", "LOG_INVERSE_SIZE", "REGRESSIONS",
    "BernoulliFamily", "Derivatives", "Family", "GammaFamily", "GaussianFamily",
    "Memberships", "MultinomialFamily", "NegativeBinomialFamily", "PoissonFamily",
    "ZeroInflatedNegativeBinomialFamily", "ZeroInflatedPoissonFamily",
    "classification_family", "combine", "combine_logs", "derivatives_of_mixture", "family_name", "is_positive_only", "regression_family",
]  # fmt: skip
