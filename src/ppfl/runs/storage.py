"""Files with the states of a run or a fit: tensors by dotted name, whose values are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.simplex import check
from ..core.trees import Tree, named_leaves, with_leaves
from ..errors import ModelError
from ..io.codec import BLOCK, dump, load, read_about
from ..io.files import atomic_write, damaged

_ON_SIMPLEX = ("membership", "memberships")  # leaves whose rows must be on the simplex


def save_tree(path: Path, tree: Tree, kind: str, about: Mapping[str, Any]) -> None:
    """Write a tree and what is to be said about it to `path`, whole or not at all."""
    with atomic_write(path) as file:
        dump(named_leaves(tree), file, kind, about=about)


def read_tensors(path: Path, kind: str, mapped: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The leaves that `save_tree` wrote, by name, and what it said about them. Tensors whose names begin with one of
    `mapped` stay in the file: copy them before it can change."""
    tensors = load(path, kind, mapped=mapped)
    check_values(path, tensors)
    return tensors, read_about(path, kind)


def check_values(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of a file that are not finite, and memberships off the simplex."""
    for name, tensor in tensors.items():
        # in blocks, as states may be larger than memory
        if not all(bool(block.isfinite().all()) for block in torch.split(tensor.reshape(-1), BLOCK)):
            raise damaged(path, f"has values in {name!r} that are not finite")
        if name.rpartition(".")[2] in _ON_SIMPLEX:
            try:
                check(tensor, name)
            except ModelError as error:
                raise damaged(path, f"has {error}") from None


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
