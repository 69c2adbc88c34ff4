"""Population GLMs (Section 2.2 of the paper): scikit-learn estimators for a table with a client column.

A client's coefficients are b_i = B c_i + u_i: K canonical models mixed by its membership, and a residual effect. `base`
and `estimators` are what users hold, `choose_k` and what it imports find the best fit (`PopulationFit`), and
`inference`, `intervals` and `summary` read it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lazy import exported
from .base import NEW, MissingClientsWarning
from .choice import PopulationChoice
from .effects import anova, contrasts, for_marginaleffects, marginal_means
from .estimators import PopulationClassifier, PopulationRegressor, client_scorer
from .mixed_model import MixedModel, as_mixed_model, mixed_model
from .save import load as _load

if TYPE_CHECKING:
    from .lossless import GLMSite, fit_over_sites
    from .over_sites import estimator_from_run

# what reads runs or speaks to sites is needed by these alone
__getattr__ = exported(
    __name__, {"estimator_from_run": "over_sites", "GLMSite": "lossless", "fit_over_sites": "lossless"}
)

__all__ = [
    "NEW",
    "GLMSite",
    "MissingClientsWarning",
    "MixedModel",
    "PopulationChoice",
    "PopulationClassifier",
    "PopulationRegressor",
    "anova",
    "as_mixed_model",
    "client_scorer",
    "contrasts",
    "estimator_from_run",
    "fit_over_sites",
    "for_marginaleffects",
    "load",
    "marginal_means",
    "mixed_model",
]


def load(path: str | Path) -> Any:
    """Reads a fitted estimator from the file that its `save` wrote. It predicts and onboards as before.

    >>> import tempfile
    >>> import numpy as np
    >>> clients, x = np.repeat(["a", "b", "c", "d"], 5), np.tile(np.arange(5.0), 4)[:, None]
    >>> y = np.where(clients < "c", 1.0, -1.0) * x[:, 0] + np.sin(np.arange(20))
    >>> model = PopulationRegressor(k=2, random_state=0).fit(x, y, clients=clients)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load(model.save(Path(folder) / "model.safetensors"))
    >>> bool(np.allclose(again.predict(x, clients), model.predict(x, clients), atol=1e-6))
    True
    """
    return _load(path, {cls.__name__: cls for cls in (PopulationChoice, PopulationClassifier, PopulationRegressor)})
