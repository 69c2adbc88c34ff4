"""Population GLMs (Section 2.2 of the paper): scikit-learn estimators for a table with a client column.

This folder has the estimators, their families and their likelihoods. `solvers` minimises the objectives, and `table`
fits whole DataFrames for the command line.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lazy import exported
from .choice_model import PopulationChoice
from .inference.saved_estimator import load_estimator
from .missing_clients import NEW, MissingClientsWarning, client_scorer
from .mixed_model import MixedModel, as_mixed_model, mixed_model
from .regression import PopulationClassifier, PopulationRegressor

if TYPE_CHECKING:
    from .estimator_runs import estimator_from_run

__getattr__ = exported(__name__, {"estimator_from_run": "estimator_runs"})  # what reads runs is needed by it alone

__all__ = [
    "NEW",
    "MissingClientsWarning",
    "MixedModel",
    "PopulationChoice",
    "PopulationClassifier",
    "PopulationRegressor",
    "as_mixed_model",
    "client_scorer",
    "estimator_from_run",
    "load",
    "mixed_model",
]


def load(path: str | Path) -> Any:
    """A fitted estimator from the file that its `save` wrote. It predicts and onboards as before.

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
    return load_estimator(
        path, {cls.__name__: cls for cls in (PopulationChoice, PopulationClassifier, PopulationRegressor)}
    )
