"""Population GLMs of data that stay at their sites: the estimator of a run with `[estimator]`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import affinity
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError
from ..networks.plain import split_columns
from ..runs.experiment import EstimatorSettings
from ..runs.folder import RunFolder
from ..runs.record import load_run
from .columns import ColumnScaling, TargetUnits
from .estimators import PopulationClassifier, PopulationRegressor
from .families import classification_family, regression_family
from .family import Family
from .penalized import is_flat, point_fit, read_models
from .problem import LogLikelihood
from .regularization import Regularization

_SHARED = "shared."


def estimator_from_run(folder: str | Path) -> Any:
    """The fitted estimator of a run with `[estimator]`, in one process or over sites.

    The data stay where they are: everything is read from the run folder. The likelihood follows from the training
    objective, which is a sum over clients.

    Args:
        folder: Of a finished run.

    Returns:
        An estimator with canonical models, memberships and a summary; like a loaded one it has no rows of the fit.

    Example:
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
    saved = place.read()
    assert saved.result is not None, "the run is finished"
    clients, tensors = saved.clients, saved.result.state.server
    settings, spec = EstimatorSettings.model_validate(asked), SampleSpec.model_validate(clients["spec"])
    samples = sum(clients["samples"]["train"])
    model = _unfitted(settings, spec, record.seed, record.experiment["rounds"])
    shared = {name.removeprefix(_SHARED): leaf for name, leaf in tensors.items() if name.startswith(_SHARED)}
    at, memberships = read_models(shared, tensors["memberships"], model._family.outputs)
    path = [float(one["objective"]) for one in record.metrics]
    loss = path[-1]
    if settings.penalty:
        loss -= settings.penalty * float(affinity.uniform(record.ids).penalty(memberships))
    assert spec.preparation is not None
    nuisance, log_likelihood = _likelihood(model._family, loss, samples, spec.preparation.log_factorials)
    regularization = Regularization(0.0, *model._scaling.slopes())
    fit = point_fit(
        model._family, settings.mix, at._replace(nuisance=torch.tensor(nuisance, dtype=torch.float64)), memberships,
        regularization, path, samples, float(samples), converged=is_flat(path, settings.tol),
    )  # fmt: skip
    model._keep(fit, None, record.ids, None)
    model._log_likelihood = log_likelihood
    return model


def _unfitted(settings: EstimatorSettings, spec: SampleSpec, seed: int, rounds: int) -> Any:
    """With the columns, the units and the family of the run."""
    same: dict[str, Any] = {
        "k": settings.k, "mix": settings.mix, "penalty": settings.penalty, "shared": list(settings.shared) or None,
        "tol": settings.tol, "max_iter": rounds, "random_state": seed,
    }  # fmt: skip
    assert spec.preparation is not None, "an experiment with [estimator] prepares its table"
    model: Any
    if spec.classes is None:
        model = PopulationRegressor(family=settings.family or "gaussian", **same)
        model._family = regression_family(model.family)
    else:
        model = PopulationClassifier(**same)
        model.classes_, model._family = np.array(spec.classes), classification_family(len(spec.classes))
    names, (mean, scale) = spec.preparation.terms, spec.preparation.means_and_scales
    model._scaling = ColumnScaling(names, mean, scale, *split_columns(names, settings.shared))
    model._units, model._between = TargetUnits(*spec.preparation.target), ()
    model.formula_, model._has_offset, model._has_clients = None, False, True
    model.feature_names_in_, model.n_features_in_ = np.array(names, dtype=object), len(names)
    return model


def _likelihood(family: Family, loss: float, samples: int, log_factorials: float) -> tuple[list[float], LogLikelihood]:
    """Nuisance parameters and the log-likelihood of all training samples, from their mean loss."""
    if family.loss == "squared":  # |residual|^2 / 2
        variance = max(2 * loss, 1e-12)
        value = -samples / 2 * (math.log(2 * math.pi * variance) + 2 * loss / variance)
        return [math.log(variance)], LogLikelihood(value, 0.0)
    return [], LogLikelihood(-samples * loss - log_factorials, 0.0)
