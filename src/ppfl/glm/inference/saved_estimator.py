"""A fitted estimator as one file: safetensors with a checksum, and JSON. Nothing is pickled."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, DataError, SettingError
from .data_trees import TreeReader, TreeWriter
from .parameter_table import covariance_of
from .posterior_draws import membership_deviations

FORMAT, VERSION = "ppfl population GLM", 2
_STATE = "state"  # the name of the tensor of bytes with the JSON
_NOT_KEPT = ("_objective",)  # holds the rows of the fit


def save_estimator(model: Any, path: str | Path) -> Path:
    """Write it whole or not at all. Standard errors are computed first, because they need the rows of the fit."""
    from ...runs.storage import save_tree  # here, because it loads much that a fit does not need

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
    content = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    about = {"format": FORMAT, "version": VERSION, "estimator": type(model).__name__}
    save_tree(path, {**writer.tensors, _STATE: content}, about)
    return path


def load_estimator(path: str | Path, estimators: dict[str, type]) -> Any:
    """A fitted estimator from the file that `save` wrote; it cannot compute standard errors that were not saved."""
    from ...runs.storage import damaged, read_metadata, read_tensors

    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give one that model.save wrote")
    about = read_metadata(path)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} holds {about.get('format', 'something else')!r} and no population GLM; "
                              f"give a file that model.save wrote")  # fmt: skip
    if about.get("version") != VERSION or about.get("estimator") not in estimators:
        raise CheckpointError(
            f"{path} has version {about.get('version')!r} of the format and the estimator {about.get('estimator')!r}; "
            f"this ppfl reads version {VERSION} of {', '.join(estimators)}: read it with the ppfl that wrote it"
        )
    tensors, _ = read_tensors(path)
    try:
        tree = json.loads(bytes(tensors.pop(_STATE).numpy()))
        reader = TreeReader(tensors)
        state = {name: reader.read(value) for name, value in tree.items()}
        model: Any = object.__new__(estimators[about["estimator"]])
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
