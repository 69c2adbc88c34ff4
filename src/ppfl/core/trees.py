"""Trees of tensors: nested NamedTuples, dicts, lists and tuples, by optree. The state of a method is such a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
from torch import Tensor

Tree = Any


def tree_map(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """f of every leaf, together with the same leaf of others. None is a leaf."""
    return optree.tree_map(f, tree, *others, none_is_leaf=True)


def tree_leaves(tree: Tree) -> list[Any]:
    """All leaves, dicts in the order of their keys."""
    return optree.tree_leaves(tree, none_is_leaf=True)


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Leaves by dotted name.

    >>> import torch
    >>> list(named_leaves({"server": {"0.weight": torch.zeros(2)}, "clients": {}}))
    ['server.0.weight']
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, none_is_leaf=True)
    names = [".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors]
    if len(set(names)) < len(names):
        raise TypeError(f"two leaves share a name among {names}; name the fields of a state so that paths differ")
    return dict(zip(names, leaves, strict=True))


def with_leaves(tree: Tree, named: Mapping[str, Any]) -> Tree:
    """The same tree with other leaves, given by dotted name."""
    _, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return optree.tree_unflatten(structure, [named[name] for name in named_leaves(tree)])


def bytes_of(tree: Tree) -> int:
    """Bytes of the tensors in a tree; a tensor that stands in several places counts once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors.values())
