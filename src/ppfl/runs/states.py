"""The states of a run or a fit as files have them: trees as leaves by name, which are checked when they are read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..algorithms.contract import Rows
from ..core.ids import ClientIds, positions_of
from ..core.simplex import check
from ..core.trees import Params, Tree, named_leaves, with_leaves
from ..errors import ModelError
from ..io.codec import BLOCK
from ..io.files import damaged
from ..server import Checkpoint, ServerState
from ..sites import SavedStates

_ON_SIMPLEX = ("membership", "memberships")  # leaves whose rows must be on the simplex


def pack(checkpoint: Checkpoint, n_clients: int) -> Checkpoint:
    """A checkpoint as a file has it."""
    return Checkpoint(
        pack_server(checkpoint.state),
        pack_clients(checkpoint.clients, n_clients),
        checkpoint.kept._replace(state=pack_server(checkpoint.kept.state)),
        pack_clients(checkpoint.kept_clients, n_clients),
    )


def unpack(file: Path, packed: Checkpoint, server: Tree, client: Tree, ids: ClientIds) -> Checkpoint:
    """What `pack` took apart, checked. server, client: what the server's state looks like, and that of one client."""
    return Checkpoint(
        unpack_server(file, packed.state, server),
        unpack_clients(file, packed.clients, client, ids),
        packed.kept._replace(state=unpack_server(file, packed.kept.state, server)),
        unpack_clients(file, packed.kept_clients, client, ids),
    )


def pack_server(state: ServerState) -> ServerState:
    """A server's state with its leaves by name, such as "shared.0.weight"."""
    return state._replace(server=named_leaves(state.server))


def unpack_server(file: Path, packed: ServerState, server: Tree) -> ServerState:
    """The state that `pack_server` took apart, checked."""
    return packed._replace(server=_restored(file, packed.server, server))


def pack_clients(saved: SavedStates, n_clients: int) -> SavedStates:
    """States of clients in the order of a roster; without ids where it is all of them, which may be ten million."""
    ids, values = saved.rows
    return saved._replace(rows=Rows(None, values)) if ids is not None and len(ids) == n_clients else saved


def unpack_clients(file: Path, packed: SavedStates, client: Tree, ids: ClientIds) -> SavedStates:
    """What `pack_clients` gave, checked. client: what the state of one looks like."""
    own = packed.rows.ids
    if own is None:
        own = ids
    elif len(set(own)) < len(own) or not set(own) <= positions_of(ids).keys():
        raise damaged(file, f"has client states of others than the {len(ids)} clients that are known")
    rows = {name: leaf.expand(len(own), *leaf.shape) for name, leaf in named_leaves(client).items()} if own else {}
    return packed._replace(rows=Rows(own, _restored(file, packed.rows.values, rows)))


def _restored(file: Path, named: Params, template: Tree) -> Tree:
    """The tree with these leaves, which must be finite, and named, shaped and typed as in `template`, on its device."""
    expected = named_leaves(template)
    if odd := sorted(expected.keys() ^ named.keys()):
        raise damaged(file, f"{'lacks' if odd[0] in expected else 'has an unknown'} tensor {odd[0]!r}")
    for name, leaf in expected.items():
        if named[name].shape != leaf.shape or named[name].dtype != leaf.dtype:
            found, wanted = (f"{one.dtype} {tuple(one.shape)}" for one in (named[name], leaf))
            raise damaged(file, f"has {name!r} as {found}, expected {wanted}")
    check_values(file, named)
    return with_leaves(template, {name: named[name].to(leaf.device) for name, leaf in expected.items()})


def check_values(file: Path, tensors: Params) -> None:
    """Refuse tensors of a file that are not finite, and memberships off the simplex."""
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise damaged(file, f"has values in {name!r} that are not finite")
        if name.rpartition(".")[2] in _ON_SIMPLEX:
            try:
                check(tensor, name)
            except ModelError as error:
                raise damaged(file, f"has {error}") from None


def _is_finite(tensor: Tensor) -> bool:
    """In blocks, as states may be larger than memory."""
    return all(bool(block.isfinite().all()) for block in torch.split(tensor.reshape(-1), BLOCK))
