"""Trees of tensors, and parameters by name.

The state of a method is a tree: nested NamedTuples, dicts, lists and tuples, by optree. Parameters are a flat dict: of
one network with leaves (...); of K canonical models with their common part, canonical leaves (K, ...); of a chunk of
clients the same with a leading dimension C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

Tree = Any
Params = dict[str, Tensor]


def tree_map(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """f of every leaf, together with the same leaf of others. None is a leaf."""
    return optree.tree_map(f, tree, *others, none_is_leaf=True)


def tree_leaves(tree: Tree) -> list[Any]:
    """All leaves, dicts in the order of their keys."""
    return optree.tree_leaves(tree, none_is_leaf=True)


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Leaves by dotted name.

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


def map_params(f: Callable[..., Tensor], params: Params, *others: Params) -> Params:
    """f of every leaf, together with the leaf of the same name of others."""
    return {name: f(leaf, *(other[name] for other in others)) for name, leaf in params.items()}


def first_clients(params: Params, clients: int) -> Params:
    """The leaves (C, ...) of the first so many clients."""
    return {name: leaf[:clients] for name, leaf in params.items()}


def expand(params: Params, clients: int) -> Params:
    """The same values for each of `clients` clients, without copying."""
    return {name: leaf.expand(clients, *leaf.shape) for name, leaf in params.items()}


def subtract_(ends: Params, start: Params) -> Params:
    """ends - start, in place on the ends, whose leaves may have a dimension C more."""
    return map_params(Tensor.sub_, ends, start)


def per_client(scalar: Tensor, like: Tensor) -> Tensor:
    """(C,) shaped to multiply (C, ...)."""
    return scalar.reshape(-1, *(1 for _ in like.shape[1:]))


def accumulate_(velocity: Params, momentum: float, gradient: Params) -> None:
    """velocity <- momentum velocity + gradient, in place, for the leaves that have a gradient; with momentum 0 velocity
    may hold anything."""
    for name, leaf in gradient.items():
        velocity[name].mul_(momentum).add_(leaf) if momentum else velocity[name].copy_(leaf)


def weighted_sum(c: Tensor, values: Tensor) -> Tensor:
    """sum_k c_k value_k over the first dimension of `values`, for c (K,) or for each row of c (C, K)."""
    mixed: Tensor = torch.tensordot(c, values, dims=1)
    return mixed
