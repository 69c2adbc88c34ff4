"""States of a run come back with the same bits, or are refused by name; a write that fails leaves the old file."""

import os
from typing import NamedTuple

import pytest
import torch

from kit.refusals import CheckpointError, WriteError, assert_refused
from ppfl.data import MappedRows
from ppfl.runs.storage import read_tensors, restore, save_tree


class Server(NamedTuple):
    shared: dict[str, torch.Tensor]
    memberships: torch.Tensor


WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SERVER = Server({"0.weight": WEIGHT, "again": WEIGHT}, torch.full((2, 3), 1 / 3))  # two names for one memory
CLIENTS = {"spread": WEIGHT.expand(5, 3, 4), "turned": WEIGHT.T, "counts": torch.arange(4), "exact": WEIGHT.double()}
TREE = {"server": SERVER, "clients": CLIENTS, "nothing": {}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


def test_a_tree_comes_back_with_the_same_bits(path):
    save_tree(path, TREE, "result", {"round": 3})
    tensors, about = read_tensors(path, "result")
    assert about == {"round": 3}
    torch.testing.assert_close(restore(path, tensors, TREE), TREE, atol=0, rtol=0)
    assert_refused(lambda: read_tensors(path, "checkpoint"), CheckpointError, "holds 'result'")


ZEROS = torch.zeros
TEMPLATE = {"a": ZEROS(2), "b": ZEROS(3)}
BAD = {
    "too few": ({"a": ZEROS(2)}, "lacks tensor 'b'"),
    "too many": (TEMPLATE | {"c": ZEROS(1)}, "unknown tensor 'c'"),
    "another shape": (TEMPLATE | {"b": ZEROS(4)}, "has 'b' as torch.float32 (4,), expected torch.float32 (3,)"),
    "not a number": (TEMPLATE | {"b": torch.tensor([0, torch.nan, 1])}, "values in 'b' that are not finite"),
    "off the simplex": ({"server.memberships": torch.tensor([[0.5, 0.4]])}, "server.memberships[0]"),
}


def test_what_does_not_fit_is_refused_by_name(path):
    assert_refused(lambda: read_tensors(path, "result"), CheckpointError, "there is no")
    for tree, words in BAD.values():
        save_tree(path, tree, "result", {})
        assert_refused(lambda: restore(path, read_tensors(path, "result")[0], TEMPLATE), CheckpointError, words)


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    save_tree(path, {"a": ZEROS(9, 2)}, "result", {})
    before = path.read_bytes()

    def ctrl_c_between_two_blocks(_rows):
        yield slice(5)
        raise KeyboardInterrupt

    def fail(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MappedRows, "blocks", ctrl_c_between_two_blocks)
    with pytest.raises(KeyboardInterrupt):
        save_tree(path, {"a": MappedRows(ZEROS(9, 2), torch.arange(9))}, "result", {})
    monkeypatch.setattr(os, "fsync", fail)
    assert_refused(
        lambda: save_tree(path, {"a": torch.ones(2)}, "result", {}), WriteError, "cannot be written (No space"
    )
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
