"""A model as an ONNX file, which other programs and languages can run."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ModelError, SettingError, WriteError


def export_onnx(module: nn.Module, path: str | Path, example: Tensor) -> Path:
    """Write `module` to `path` as ONNX, for batches of any size; `example` is a batch (B, ...) of its input.

    The input is called "x", the output "output". Needs the packages onnx and onnxscript: pip install 'ppfl[export]'.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(nn.Linear(4, 2), Path(folder) / "model.onnx", torch.rand(3, 4)).name
    'model.onnx'
    """
    path = Path(path)
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise SettingError(f"export to ONNX needs the package {missing[0]}; install it: pip install 'ppfl[export]'")
    if not path.parent.is_dir():
        raise WriteError(f"there is no folder {path.parent}; make it first, or choose another place")
    was_training = module.training
    batch = example if len(example) > 1 else example.repeat(2, *(1 for _ in example.shape[1:]))  # 1 is never dynamic
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of the exporter's own parts
            program = torch.onnx.export(
                module.eval(), (batch,), dynamo=True, input_names=["x"], output_names=["output"], verbose=False,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
    except Exception as error:  # the exporter has many
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"the network cannot be written as ONNX ({reason}); save its state_dict() instead") from error
    finally:
        module.train(was_training)
    assert program is not None
    partial = path.with_name(f"{path.name}.partial")
    try:
        program.save(str(partial), external_data=False)  # everything in one file
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WriteError(f"{path} cannot be written ({error.strerror}); choose another place") from error
    return path
