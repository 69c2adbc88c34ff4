"""Families by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...errors import SettingError
from .classes import BernoulliFamily, MultinomialFamily
from .continuous import GammaFamily, GaussianFamily
from .counts import PoissonFamily
from .family_contract import Family
from .negative_binomial import NegativeBinomialFamily
from .zero_inflated import ZeroInflatedNegativeBinomialFamily, ZeroInflatedPoissonFamily

_REGRESSIONS: tuple[type[Family], ...] = (
    GaussianFamily, PoissonFamily, GammaFamily, NegativeBinomialFamily,
    ZeroInflatedPoissonFamily, ZeroInflatedNegativeBinomialFamily,
)  # fmt: skip
REGRESSIONS: dict[str, Callable[[str | None], Family]] = {family.name: family for family in _REGRESSIONS}
_ALIASES = {  # what R's packages and statsmodels call them, and shorter names
    "nb": "negative binomial", "nb2": "negative binomial", "negbin": "negative binomial",
    "nbinom": "negative binomial", "nbinom2": "negative binomial",
    "zip": "zero-inflated poisson", "zinb": "zero-inflated negative binomial",
}  # fmt: skip
_NO_FAMILIES = {  # names that are asked for, and what to do instead
    "quasipoisson": "it has no likelihood to choose k by; use 'negative binomial'",
    "binomial": "use PopulationClassifier, with one row of successes and one of failures for counts of trials, and "
    "their numbers as sample_weight",
    "quasibinomial": "rows of 0 and 1 do not determine a dispersion; use PopulationClassifier",
}


def family_name(name: str) -> str:
    """The name of a regression family, from any usual spelling of it; unknown names stay as they are.

    >>> family_name("Negative_Binomial"), family_name("zip"), family_name("something")
    ('negative binomial', 'zero-inflated poisson', 'something')
    """
    plain = _plain(name)
    return _ALIASES.get(plain) or {_plain(known): known for known in REGRESSIONS}.get(plain, name)


def regression_family(name: str, link: str | None = None) -> Family:
    """The family with this name and link.

    >>> regression_family("poisson", None).link
    'log'
    """
    found = REGRESSIONS.get(family_name(name))
    if found is None:
        remedy = _NO_FAMILIES.get(_plain(name), f"use one of {', '.join(REGRESSIONS)}")
        raise SettingError(f"there is no family {name!r}; {remedy}")
    return found(link)


def is_positive_only(name: str) -> bool:
    """Whether the family of this name has no negative targets; False for unknown names."""
    return any(family.name == family_name(name) and family.positive_only for family in _REGRESSIONS)


def classification_family(classes: int) -> Family:
    """The family for this number of classes."""
    return BernoulliFamily() if classes == 2 else MultinomialFamily(classes)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", str(name)).lower()
