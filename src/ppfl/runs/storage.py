"""Files that are written whole or not at all, and checked before they are used: trees of tensors, JSON, TOML, text.

A file is written beside its place, flushed and renamed, so a kill at any instant leaves the old file or the new
one. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.simplex import check
from ..core.trees import Tree, named_leaves, with_leaves
from ..errors import CheckpointError, ModelError, WriteError
from .checksums import ChecksumError, checked_json, checksum_of_tensors, parse_checked_json
from .tensor_file import blocks_of, split_header, write_tensors

Metadata = dict[str, Any]

PARTIAL = ".partial"
_ON_SIMPLEX = ("membership", "memberships")  # leaves whose rows must be on the simplex


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of writing a file into one that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise WriteError(
            f"{path} cannot be written ({reason}); free some space or choose another place: "
            f"what was there before is unchanged"
        ) from error


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Where to write what is to become the file `path`: it is flushed and renamed, or removed after an error."""
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            yield partial
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where it is not there."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def save_tree(path: Path, tree: Tree, metadata: Metadata) -> None:
    """Write a tree and its metadata to `path`, whole or not at all."""
    with beside(path) as partial, partial.open("wb") as file:
        write_tensors(file, named_leaves(tree), json.dumps(metadata))
        partial.chmod(path.parent.stat().st_mode & 0o666)  # a folder knows who may read what is in it


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


def read_tensors(
    path: Path, unchecked: str | None = None, mapped: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], Metadata]:
    """All tensors of a file and its metadata; finite, and memberships on the simplex, but for names that begin with
    `unchecked`. Tensors whose names begin with one of `mapped` stay in the file: copy them before it can change."""
    try:
        with safe_open(path, framework="pt") as file:
            checksum, about = split_header(file.metadata())
            metadata = json.loads(about)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            # memory of torch's own: aligned as in a run that never stopped, and no longer tied to the file
            tensors |= {name: leaf.clone() for name, leaf in tensors.items() if not name.startswith(mapped)}
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; check the folder") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise damaged(path, f"cannot be read ({' '.join(str(error).split())})") from None
    if checksum != (found := checksum_of_tensors(tensors, about)):
        raise damaged(path, f"has changed since it was written: its checksum is {checksum} but its content has {found}")
    for name, tensor in tensors.items():
        if unchecked is not None and name.startswith(unchecked):
            continue
        if not all(bool(block.isfinite().all()) for block in blocks_of(tensor)):
            raise damaged(path, f"has values in {name!r} that are not finite")
        if name.rpartition(".")[2] in _ON_SIMPLEX:
            try:
                check(tensor, name)
            except ModelError as error:
                raise damaged(path, f"has {error}") from None
    return tensors, metadata


def read_metadata(path: Path) -> Metadata:
    """The metadata of a file alone, without its tensors and unchecked."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads(split_header(file.metadata())[1]))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, f"cannot be read ({' '.join(str(error).split())})") from None


def read_checksum(path: Path) -> str:
    """The checksum that a file of tensors carries."""
    with safe_open(path, framework="pt") as file:
        return split_header(file.metadata())[0]


def damaged(path: Path, fault: str) -> CheckpointError:
    """What to say of a file that cannot be trusted."""
    return CheckpointError(
        f"{path} {fault}; it is damaged or of another version: nothing was changed, start again in another folder"
    )


def write_json(path: Path, content: Mapping[str, Any], salt: int = 0) -> None:
    """Write JSON with its checksum to `path`, whole or not at all."""
    write_bytes(path, checked_json(content, salt, indent=1))


def write_toml(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as TOML to `path`, whole or not at all; TOML has no null, so None values are left out."""
    write_text(path, tomli_w.dumps(_without_none(settings)))


def write_text(path: Path, text: str) -> None:
    """Write text to `path`, whole or not at all."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write to `path`, whole or not at all."""
    with beside(path) as partial:
        partial.write_bytes(content)


def read_json(path: Path, salt: int = 0) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        return parse_checked_json(path.read_bytes(), salt)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; check the folder") from None
    except ChecksumError as error:
        raise damaged(path, f"has changed since it was written: {error}") from None
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read ({' '.join(str(error).split())})") from None


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
