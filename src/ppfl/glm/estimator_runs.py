"""The fitted estimator of a run with `[estimator]`, in one process or over sites.

The data stay where they are: everything is read from the run folder. The likelihood follows from the training
objective, which is a sum over clients.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import affinity
from ..data.preparation import Preparation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError
from ..io.files import read_json
from ..networks.plain import split_columns
from ..runs.estimator_settings import EstimatorSettings
from ..runs.folder import RunFolder
from ..runs.record import load_run
from .families import Family, classification_family, regression_family
from .gaussian_moments import NO_CLIENTS
from .regression import PopulationClassifier, PopulationRegressor
from .solvers import LogLikelihood, ParameterShape, Regularization, SolverResult
from .solvers.federated import is_flat, read_models
from .solvers.problem import SPREAD
from .solvers.profile import Profile
from .standardize import ColumnScaling

_SHARED = "server.shared."


def estimator_from_run(folder: str | Path) -> Any:
    """Fitted, with canonical models, memberships and a summary; like a loaded one it has no rows of the fit.

    >>> import tempfile, warnings
    >>> import pandas as pd
    >>> from ppfl.runs import Experiment, run
    >>> table = pd.DataFrame({"shop": ["a", "b", "c", "d"] * 6, "price": np.arange(24.0) % 7})
    >>> table["sold"] = np.where(table["shop"] < "c", 2.0, -2.0) * table["price"] + np.sin(np.arange(24))
    >>> data = {"name": "csv", "file": "table.csv", "client": "shop", "target": "sold", "test_fraction": 0}
    >>> settings = {"name": "shops", "rounds": 3, "data": data, "estimator": {"kind": "regressor", "k": 2}}
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
    ...     table.to_csv(f"{folder}/table.csv", index=False)
    ...     (record,) = run(Experiment.model_validate(settings), f"{folder}/out", base=Path(folder))
    ...     estimator_from_run(record.folder).canonical_coef_.shape
    (2, 1)
    """
    record, place = load_run(folder), RunFolder(Path(folder))
    asked = record.experiment.get("estimator")
    if asked is None:
        raise CheckpointError(f"the run in {folder} has no [estimator], so there is no estimator of it; use ppfl.load")
    if not record.finished:
        raise CheckpointError(f"the run in {folder} is not finished; resume it first")
    clients, (tensors, _) = read_json(place.clients_file), place.read_result()
    settings, spec = EstimatorSettings.model_validate(asked), SampleSpec.model_validate(clients["spec"])
    assert spec.preparation is not None, "an experiment with [estimator] prepares its table"
    model, samples = _unfitted(settings, record.seed, record.experiment["rounds"]), sum(clients["samples"]["train"])
    family = _set_family(model, settings, spec)
    _set_columns(model, settings, spec.preparation)
    shared = {name.removeprefix(_SHARED): leaf for name, leaf in tensors.items() if name.startswith(_SHARED)}
    coefficients, memberships = read_models(shared, tensors["server.memberships"], family)
    path = [float(one["objective"]) for one in record.metrics]
    loss = path[-1]
    if settings.penalty:
        loss -= settings.penalty * float(affinity.uniform(record.ids).penalty(memberships.mean))
    nuisance, log_likelihood = _likelihood(family, loss, samples, spec.preparation.log_factorials)
    coefficients = coefficients._replace(nuisance=torch.tensor(nuisance, dtype=torch.float64))
    k, q, m = coefficients.canonical.shape
    shape = ParameterShape(k, q, len(coefficients.shared), m, len(nuisance))
    varying, fixed = model._scaling.is_slope()
    regularization = Regularization(model.ridge, SPREAD, varying, fixed, samples * family.has_dispersion, None)
    profile = Profile(NO_CLIENTS, shape, regularization, None, 0.0, settings.tol, memberships.mean)
    result = SolverResult(
        coefficients, memberships, torch.zeros(k, dtype=torch.float64), memberships.average(), profile, path,
        is_flat(path, settings.tol), log_likelihood, len(record.ids) * (k - 1),
    )  # fmt: skip
    model.selection_ = []
    model._keep(result, record.ids, samples)
    model._objective = None
    model._set_units(float(samples))
    return model


def _unfitted(settings: EstimatorSettings, seed: int, rounds: int) -> Any:
    same: dict[str, Any] = {
        "k": settings.k, "mix": settings.mix, "penalty": settings.penalty, "shared": list(settings.shared) or None,
        "solver": "federated", "tol": settings.tol, "max_iter": rounds, "random_state": seed,
    }  # fmt: skip
    if settings.kind == "classifier":
        return PopulationClassifier(**same)
    return PopulationRegressor(family=settings.family or "gaussian", **same)


def _set_family(model: Any, settings: EstimatorSettings, spec: SampleSpec) -> Family:
    if spec.classes is None:
        model._family = regression_family(settings.family or "gaussian", None)
    else:
        model.classes_ = np.array(spec.classes)
        model._family = classification_family(len(spec.classes))
    family: Family = model._family
    return family


def _set_columns(model: Any, settings: EstimatorSettings, preparation: Preparation) -> None:
    terms = preparation.terms
    mean = np.array([value for column in preparation.columns for value in column.mean])
    scale = np.array([value or np.inf for column in preparation.columns for value in column.scale])
    model._scaling = ColumnScaling(terms, mean, scale, *split_columns(terms, settings.shared))
    model._shift, model._target_scale = preparation.target
    model._formula, model._has_offset, model._has_clients = None, False, True
    model.feature_names_in_, model.n_features_in_ = np.array(terms, dtype=object), len(terms)


def _likelihood(family: Family, loss: float, samples: int, log_factorials: float) -> tuple[list[float], LogLikelihood]:
    """Nuisance parameters and the log-likelihood of all training samples, from their mean loss."""
    if family.loss == "squared":  # |residual|^2 / 2
        variance = max(2 * loss, 1e-12)
        value = -samples / 2 * (math.log(2 * math.pi * variance) + 2 * loss / variance)
        return [math.log(variance)], LogLikelihood(value, 0.0)
    return [], LogLikelihood(-samples * loss - log_factorials, 0.0)
