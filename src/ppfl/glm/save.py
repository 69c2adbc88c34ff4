"""A fitted estimator as one file (`io.codec`): named fields, no rows of the fit, and nothing pickled."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..data.ids import text_ids
from ..errors import CheckpointError, PPFLError
from ..io.codec import dump, message
from ..io.codec import load as read
from ..io.files import atomic_write, damaged
from . import inference, intervals
from .columns import ColumnScaling, TargetUnits
from .families import classification_family, regression_family
from .formula import FormulaDesign
from .likelihood import Layout
from .moments import ResidualGiven
from .points import Proposals
from .population_fit import PopulationFit
from .posterior import Posterior
from .problem import LogLikelihood
from .regularization import Regularization
from .stick_breaking import StickBreaking

if TYPE_CHECKING:
    from .base import PopulationGLM

KIND = "population GLM"
T = TypeVar("T")
for _part in (ColumnScaling, Layout, LogLikelihood, Posterior, Proposals, Regularization, ResidualGiven, StickBreaking):
    message(_part)
message(TargetUnits)
_NUMBERS = ("n_rows", "n_samples", "objective", "steps", "gradient", "gain", "converged")
_PLAIN = (bool, int, float, str, type(None))


def save(model: PopulationGLM, path: str | Path) -> Path:
    """Writes it whole or not at all. Standard errors are computed first, because they need the rows of the fit."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file, such as {path / 'model.safetensors'}")
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent}; make it first, or choose another place")
    if model._data is not None and not model.is_point_fit:
        model._precise()
        intervals.deviations(model)
    with atomic_write(path) as file:
        dump(_content(model), file, KIND)
    return path


def _content(model: PopulationGLM) -> dict[str, Any]:
    fit, scaling = model.fit_, model._scaling
    tensors: dict[str, Any] = {"mean": torch.from_numpy(scaling.mean), "scale": torch.from_numpy(scaling.scale)}
    covariance, precise = model._covariance, model._log_likelihood
    return {
        "estimator": type(model).__name__,
        "settings": _settings(model),
        "classes": getattr(model, "classes_", np.zeros(0)).tolist(),
        "outputs": fit.family.outputs,
        "clients": model.clients_.tolist(),
        "fitted_clients": len(fit.posterior),
        "clients_of_fit": model._n_clients,
        "fit": {name: getattr(fit, name) for name in _NUMBERS} | {"mix": fit.mix, "order": fit.order},
        "path": torch.from_numpy(np.array(fit.path, dtype=np.float64)),
        "layout": fit.layout,
        "vector": torch.from_numpy(fit.vector),
        # in single precision: 6 MB for 10,000 clients and K = 3
        "posterior": replace(model._posterior, weights=model._posterior.weights.float()),
        "prior": fit.prior,
        "regularization": fit.regularization._replace(nuisance=None),
        "columns": scaling._replace(**tensors),
        "units": model._units,
        "between": list(model._between),
        "named": hasattr(model, "feature_names_in_"),
        "flags": [model._has_clients, model._has_offset],
        "formula": model.formula_,
        "selection": {name: model.selection_[name].tolist() for name in model.selection_},
        "covariance": None if covariance is None else [torch.from_numpy(covariance.matrix), covariance.note],
        "deviations": None if model._deviations is None else torch.from_numpy(model._deviations),
        "log_likelihood": precise,
    }


def _settings(model: PopulationGLM) -> dict[str, Any]:
    """Those that a file can hold. Others, such as matrices of affinities, matter to another fit only."""
    kept, defaults = {}, type(model)().get_params()
    for name, value in model.get_params().items():
        value = value.item() if isinstance(value, np.generic) else value
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, range) or not all(isinstance(item, _PLAIN) for item in items):
            value = list(value) if isinstance(value, range) else defaults[name]
            if value is defaults[name]:
                warnings.warn(
                    f"{name} is a {type(getattr(model, name)).__name__}, which the file does not hold; set it again "
                    f"before another fit",
                    UserWarning,
                    stacklevel=5,
                )
        kept[name] = value
    return kept


# ---------------------------------------------------------------------- reading


def load(path: str | Path, estimators: dict[str, Any]) -> Any:
    """A fitted estimator from the file that `save` wrote."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give one that model.save wrote")
    content = read(path, KIND)
    try:
        return _model(content, estimators)
    except PPFLError as error:
        raise damaged(path, f"cannot be used: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise damaged(path, f"cannot be understood ({type(error).__name__}: {' '.join(str(error).split())})") from None


def _model(content: dict[str, Any], estimators: dict[str, Any]) -> Any:
    """Its fit goes the way of a new one; nothing else is set."""
    model = estimators[content["estimator"]](**content["settings"])
    columns: Any = _is(ColumnScaling, content["columns"])
    model._scaling = columns._replace(mean=columns.mean.numpy(), scale=columns.scale.numpy())
    model._units, model._between = _is(TargetUnits, content["units"]), tuple(content["between"])
    model._has_clients, model._has_offset = map(bool, content["flags"])
    model.n_features_in_ = len(model._scaling.names)
    if content["named"]:
        model.feature_names_in_ = np.array(model._scaling.names, dtype=object)
    if content["classes"]:
        model.classes_ = np.array(content["classes"])
    outputs = max(2, int(content["outputs"]))
    model._family = regression_family(model.family) if hasattr(model, "family") else classification_family(outputs)
    formula = content["formula"]
    model.formula_ = formula.checked() if isinstance(formula, FormulaDesign) else None
    posterior, fitted = _normalised(content["posterior"]), int(content["fitted_clients"])
    ids = content["clients"]
    if len(posterior) != len(ids) or not 0 <= fitted <= len(ids):
        raise ValueError("memberships that do not belong to its clients")
    with warnings.catch_warnings(action="ignore"):
        fit = _read_fit(model, content, posterior.first(fitted))
        model._keep(fit, None, ids[:fitted], None, int(content["clients_of_fit"]))
    model._posterior, model.clients_ = posterior, np.array(ids)
    model._position = {name: at for at, name in enumerate(text_ids(list(ids)).tolist())}
    model.selection_ = pd.DataFrame(content["selection"])
    if content["covariance"] is not None:
        matrix, note = content["covariance"]
        model._covariance = inference.Covariance(_finite(matrix).numpy(), str(note))
    if content["deviations"] is not None:
        model._deviations = _finite(content["deviations"]).numpy()
    if content["log_likelihood"] is not None:
        model._log_likelihood = _is(LogLikelihood, content["log_likelihood"])
    return model


def _read_fit(model: Any, content: dict[str, Any], posterior: Posterior) -> PopulationFit:
    layout = _is(Layout, content["layout"])
    vector = _finite(content["vector"]).numpy()
    if vector.shape != (layout.size,) or len(layout.unpack(vector).canonical[0]) != len(model._scaling.varying):
        raise ValueError("parameters that do not belong to its columns")
    penalty = model._family.nuisance_penalty if model._family.nuisance else None
    regularization = _is(Regularization, content["regularization"])._replace(nuisance=penalty)
    return PopulationFit(
        family=model._family, layout=layout, vector=vector, posterior=posterior, regularization=regularization,
        prior=_normalised(content["prior"]), path=content["path"].numpy(), **content["fit"],
    )  # fmt: skip


def _normalised(posterior: Any) -> Posterior:
    """With weights that sum to 1 in double precision, and memberships that do."""
    weights = _finite(_is(Posterior, posterior).weights.double())
    found: Posterior = replace(posterior, weights=weights / weights.sum(1, keepdim=True))
    if not bool(((found.mean.sum(1) - 1).abs() < 1e-5).all()):
        raise ValueError("memberships that do not sum to 1")
    return found


def _is(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} should be")
    return value


def _finite(tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError("numbers that are not finite")
    return tensor
