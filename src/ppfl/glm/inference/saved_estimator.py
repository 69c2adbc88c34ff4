"""A fitted estimator as one file (`io.codec`). Nothing is pickled."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DataError, SettingError
from ...io.codec import dump, load
from ...io.files import atomic_write, damaged
from .data_trees import TreeReader, TreeWriter
from .parameter_table import covariance_of
from .posterior_draws import membership_deviations

KIND = "population GLM"
_NOT_KEPT = ("_objective",)  # holds the rows of the fit


def save_estimator(model: Any, path: str | Path) -> Path:
    """Write it whole or not at all. Standard errors are computed first, because they need the rows of the fit."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file, such as {path / 'model.safetensors'}")
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent}; make it first, or choose another place")
    if model._objective is not None:
        try:
            covariance_of(model)
            membership_deviations(model)
        except SettingError:
            pass  # a solver without standard errors
    writer = TreeWriter()
    state = {name: value for name, value in model.__getstate__().items() if name not in _NOT_KEPT}
    state |= _storable_settings(model)
    tree = {name: writer.write(value) for name, value in state.items()}
    content = {"estimator": type(model).__name__, "state": tree, "tensors": writer.tensors}
    with atomic_write(path) as file:
        dump(content, file, KIND)
    return path


def load_estimator(path: str | Path, estimators: dict[str, type]) -> Any:
    """A fitted estimator from the file that `save` wrote; it cannot compute standard errors that were not saved."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give one that model.save wrote")
    content = load(path, KIND)
    try:
        if content["estimator"] not in estimators:
            raise ValueError(f"the estimator {content['estimator']!r}; this ppfl knows {', '.join(estimators)}")
        if not all(bool(tensor.isfinite().all()) for tensor in content["tensors"].values()):
            raise ValueError("numbers that are not finite")
        tree, reader = content["state"], TreeReader(content["tensors"])
        state = {name: reader.read(value) for name, value in tree.items()}
        model: Any = object.__new__(estimators[content["estimator"]])
        vars(model).update(state | dict.fromkeys(_NOT_KEPT))
        memberships = model._memberships.mean
        fits = len(memberships) == len(model.clients_)
        fits = fits and bool(((memberships.sum(1) - 1).abs() < 1e-6).all())
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration, IndexError) as error:
        raise damaged(path, f"cannot be understood ({type(error).__name__}: {' '.join(str(error).split())})") from None
    if not fits:
        raise damaged(path, "has memberships that do not belong to its clients")
    return model


def _storable_settings(model: Any) -> dict[str, Any]:
    """Settings that a file can hold. Others, such as matrices of affinities, matter to another fit only."""
    found, defaults = model.get_params(), type(model)().get_params()
    kept = {}
    for name, value in found.items():
        try:
            TreeWriter().write(value)
        except DataError:
            warnings.warn(
                f"{name} is a {type(value).__name__}, which the file does not hold; set it again before another fit",
                UserWarning,
                stacklevel=4,
            )
            kept[name] = defaults[name]
    return kept
