"""What is stored comes back with the same bits, or is refused; a write that fails leaves the old file."""

import io
import json
import os
import tomllib
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from kit.refusals import CheckpointError, WriteError, assert_refused
from ppfl.data import MappedRows
from ppfl.runs import tensor_file
from ppfl.runs.checksums import memory_of
from ppfl.runs.storage import read_tensors, restore, save_tree, write_json, write_toml


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
    """In files that are as open as their folder, and with nothing left beside them."""
    path.parent.chmod(0o750)
    save_tree(path, TREE, {"round": 3})
    tensors, about = read_tensors(path)
    assert about == {"round": 3}
    torch.testing.assert_close(restore(path, tensors, TREE), TREE, atol=0, rtol=0)
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_cut_anywhere_is_refused(path):
    save_tree(path, TREE, {})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_refused(lambda: read_tensors(path), CheckpointError, "tree.safetensors cannot be read")
        assert path.read_bytes() == whole[:length]


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
    assert_refused(lambda: read_tensors(path), CheckpointError, "there is no")
    for tree, words in BAD.values():
        save_tree(path, tree, {})
        assert_refused(lambda: restore(path, read_tensors(path)[0], TEMPLATE), CheckpointError, words)
    save_file(TEMPLATE, path)  # without a checksum
    assert_refused(lambda: read_tensors(path), CheckpointError, "cannot be read")


def written(named: dict, about: str = "{}") -> bytes:
    file = io.BytesIO()
    tensor_file.write_tensors(file, named, about)
    return file.getvalue()


def by_safetensors(named: dict, about: str = "{}") -> bytes:
    """The package writes files at once, and ppfl in blocks."""
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    found = zlib.crc32(f"{about} {[(n, str(t.dtype), tuple(t.shape)) for n, t in sorted(copies.items())]}".encode())
    for name in sorted(copies):
        found = zlib.crc32(memory_of(copies[name]), found)
    return save(copies, {"ppfl": f"{found:08x} {about}"})


NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64"
TYPES = [getattr(torch, name) for name in f"{NAMES} float8_e4m3fn float8_e5m2".split()]
LAYOUTS = [
    lambda x: x,
    lambda x: x.mT if x.dim() > 1 else x,
    lambda x: x[:1].expand(x.shape) if x.dim() and len(x) else x,
    lambda x: x[::2] if x.dim() else x,
]


@st.composite
def tensors(draw) -> torch.Tensor:
    shape, dtype = draw(st.lists(st.integers(0, 7), max_size=3)), draw(st.sampled_from(TYPES))
    count, seed = torch.Size(shape).numel() * dtype.itemsize, draw(st.integers(0, 99))
    bits = torch.randint(2, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    made = bits.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    return draw(st.sampled_from(LAYOUTS))(made)


NAMED = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), tensors(), max_size=6)


@given(NAMED.filter(lambda named: "__metadata__" not in named), st.text(max_size=9))
def test_the_bytes_are_those_of_the_safetensors_package(named, about):
    about = json.dumps({"about": about})
    named |= {f"{name} again": tensor for name, tensor in named.items()}  # two names for the same memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BLOCK", 64)
        assert written(named, about) == by_safetensors(named, about)


def test_rows_of_a_file_are_stored_too_and_what_no_file_can_hold_is_refused():
    values = torch.arange(10_000.0).reshape(-1, 2)
    rows = MappedRows(values, torch.arange(len(values)).flip(0))
    assert written({"x": rows}) == by_safetensors({"x": values.flip(0)})
    refused = {"x": torch.zeros(1, dtype=torch.complex128)}
    assert_refused(lambda: written(refused), WriteError, "'x' is torch.complex128", "use one of")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the maps of this process")
def test_what_may_stay_in_the_file_is_not_copied_into_memory(path):
    x = torch.arange(40_000.0)
    save_tree(path, {"clients": {"x": x}, "server": x}, {})
    tensors, _ = read_tensors(path, mapped=("clients.",))
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [[int(end, 16) for end in addresses.split("-")] for addresses in maps]
    for name, mapped in (("clients.x", True), ("server", False)):
        assert any(first <= tensors[name].data_ptr() < last for first, last in ranges) == mapped
        assert tensors[name].equal(x)


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    text = path.with_name("a.json")
    save_tree(path, {"a": ZEROS(9, 2)}, {})
    write_json(text, {"a": 1})
    before = path.read_bytes(), text.read_bytes()
    path.with_name(f"{path.name}.partial").write_bytes(b"left by a kill")

    def ctrl_c_between_two_blocks(_rows):
        yield slice(5)
        raise KeyboardInterrupt

    def fail(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MappedRows, "blocks", ctrl_c_between_two_blocks)
    with pytest.raises(KeyboardInterrupt):
        save_tree(path, {"a": MappedRows(ZEROS(9, 2), torch.arange(9))}, {})

    monkeypatch.setattr(os, "fsync", fail)
    for call in (lambda: save_tree(path, {"a": torch.ones(2)}, {}), lambda: write_json(text, {"a": 2})):
        assert_refused(call, WriteError, "cannot be written (No space")
    assert (path.read_bytes(), text.read_bytes()) == before
    assert sorted(path.parent.iterdir()) == sorted([path, text])


def test_settings_survive_a_round_trip_through_toml(path):
    """Infinity and lists of tables too; what is None is left out."""
    kept = {"name": "naïve", "limit": float("inf"), "methods": [{"lr": 0.1}, {"lr": 1.0, "seeds": [0, 1]}]}
    write_toml(path, {**kept, "path": None})
    assert tomllib.loads(path.read_text(encoding="utf-8")) == kept
