"""Trees of tensors in safetensors files: written whole or not at all, checked before they are used.

A file is written beside its place, flushed and renamed, so a kill at any instant leaves the old file or the new
one. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.errors import CheckpointError, ModelError
from ..core.simplex import check
from ..core.trees import Tree, named_leaves, with_leaves

Metadata = dict[str, Any]

PARTIAL = ".partial"
_ON_SIMPLEX = ("membership", "memberships")  # leaves whose rows must be on the simplex
_HEADER = "ppfl"


def save_tree(path: Path, tree: Tree, metadata: Metadata, *, flushed: bool = True) -> None:
    """Write a tree and its metadata to `path`, whole or not at all; a power cut may lose it until it is flushed."""
    beside = path.with_name(path.name + PARTIAL)
    save_file(_storable(named_leaves(tree)), beside, {_HEADER: json.dumps(metadata)})
    beside.chmod(path.parent.stat().st_mode & 0o666)  # safetensors keeps files to their owner; a folder knows better
    if flushed:
        put_in_place(beside, path)
    else:
        beside.replace(path)


def restore(path: Path, tensors: Mapping[str, Tensor], template: Tree) -> Tree:
    """The tree whose leaves `tensors` are, named, shaped and typed as in `template`, on its device."""
    expected = named_leaves(template)
    if odd := sorted(expected.keys() ^ tensors.keys()):
        fault = "lacks" if odd[0] in expected else "has an unknown"
        raise damaged(path, f"{fault} tensor {odd[0]!r}")
    for name, leaf in expected.items():
        found = tensors[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise damaged(
                path,
                f"has {name!r} as {found.dtype} {tuple(found.shape)}, expected {leaf.dtype} {tuple(leaf.shape)}",
            )
    return with_leaves(template, {name: tensors[name].to(leaf.device) for name, leaf in expected.items()})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Metadata]:
    """All tensors of a file and its metadata; finite, and memberships on the simplex."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[_HEADER])
            # memory of torch's own: aligned as in a run that never stopped, and no longer tied to the file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; check the folder") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise damaged(path, f"cannot be read ({' '.join(str(error).split())})") from None
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise damaged(path, f"has values in {name!r} that are not finite")
        if name.rpartition(".")[2] in _ON_SIMPLEX:
            try:
                check(tensor, name)
            except ModelError as error:
                raise damaged(path, f"has {error}") from None
    return tensors, metadata


def damaged(path: Path, fault: str) -> CheckpointError:
    """What to say of a file that cannot be trusted."""
    return CheckpointError(
        f"{path} {fault}; it is damaged or of another version: nothing was changed, start again in another folder"
    )


def write_json(path: Path, content: Any) -> None:
    """Write JSON to `path`, whole or not at all."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_toml(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as TOML to `path`, whole or not at all; TOML has no null, so None values are left out."""
    write_text(path, tomli_w.dumps(_without_none(settings)))


def write_text(path: Path, text: str) -> None:
    """Write text to `path`, whole or not at all."""
    beside = path.with_name(path.name + PARTIAL)
    beside.write_text(text, encoding="utf-8")
    put_in_place(beside, path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; check the folder") from None
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read ({' '.join(str(error).split())})") from None


def put_in_place(beside: Path, path: Path) -> None:
    """Flush a finished file and rename it to its place."""
    flush(beside)
    beside.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # where folders cannot be opened, renaming is durable by itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def _storable(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous on the CPU, and no two in the same memory: a round may pass on what the one before it held."""
    stored: dict[str, Tensor] = {}
    held: set[int] = set()
    for name, leaf in named.items():
        tensor = leaf.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if memory in held else tensor
        held.add(memory)
    return stored
