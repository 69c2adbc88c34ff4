"""Formulas such as `reaction ~ days + (days | subject)`.

`parts` splits the text, `expressions` says what a formula may compute, `terms` has formulaic build the design, `build`
prepares a fit, `spec` is what a fitted model remembers, and `mixin` adds all this to the estimators.
"""

from .build import FormulaFit, prepare_formula
from .mixin import FormulaMixin, reads_formula
from .spec import FormulaSpec

__all__ = ["FormulaFit", "FormulaMixin", "FormulaSpec", "prepare_formula", "reads_formula"]
