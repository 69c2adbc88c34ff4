"""What is stored comes back with the same bits, or is refused; a write that fails leaves the old file.

Files of tensors are written in blocks: the safetensors package, which writes them at once, is the oracle.
"""

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
from ppfl.runs.membership_log import membership_record, read_membership_log
from ppfl.runs.storage import read_tensors, restore, save_tree, write_json, write_toml


class Server(NamedTuple):
    shared: dict[str, torch.Tensor]
    memberships: torch.Tensor


def make_tree() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    weight, exact = torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator, dtype=torch.float64)
    clients = {"spread": weight.expand(5, 3, 4), "turned": weight.T, "counts": torch.arange(4), "exact": exact}
    server = Server({"0.weight": weight, "again": weight}, torch.full((2, 3), 1 / 3))  # two names for one memory
    return {"server": server, "clients": clients, "nothing": {}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tree.safetensors"


def test_a_tree_comes_back_with_the_same_bits(path):
    """In files that are as open as their folder, and with nothing left beside them."""
    path.parent.chmod(0o750)
    tree = make_tree()
    save_tree(path, tree, {"round": 3})
    tensors, about = read_tensors(path)
    back = restore(path, tensors, make_tree())
    assert about == {"round": 3}
    assert isinstance(back["server"], Server) and back["nothing"] == {}
    assert torch.equal(back["server"].memberships, tree["server"].memberships)
    for one, two in ((tree["server"].shared, back["server"].shared), (tree["clients"], back["clients"])):
        assert one.keys() == two.keys() and all(torch.equal(leaf, one[name]) for name, leaf in two.items())
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_cut_anywhere_is_refused(path):
    save_tree(path, make_tree(), {})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_refused(lambda: read_tensors(path), CheckpointError, "tree.safetensors cannot be read")
        assert path.read_bytes() == whole[:length]


ZEROS = torch.zeros
BAD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "too few": ({"a": ZEROS(2)}, "lacks tensor 'b'"),
    "too many": ({"a": ZEROS(2), "b": ZEROS(3), "c": ZEROS(1)}, "unknown tensor 'c'"),
    "another shape": ({"a": ZEROS(2), "b": ZEROS(4)}, "has 'b' as torch.float32 (4,), expected torch.float32 (3,)"),
    "another type": ({"a": ZEROS(2), "b": ZEROS(3).double()}, "has 'b' as torch.float64"),
    "not a number": ({"a": ZEROS(2), "b": torch.tensor([0, torch.nan, 1])}, "values in 'b' that are not finite"),
    "off the simplex": ({"server.memberships": torch.tensor([[0.5, 0.4]])}, "server.memberships[0]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(path, case):
    tree, words = BAD[case]
    save_tree(path, tree, {})
    template = {"a": ZEROS(2), "b": ZEROS(3)}
    assert_refused(lambda: restore(path, read_tensors(path)[0], template), CheckpointError, words)


def test_what_is_no_tree_of_tensors_is_neither_read_nor_written(path):
    assert_refused(lambda: read_tensors(path), CheckpointError, "there is no")
    with pytest.raises(AttributeError):
        save_tree(path, {"a": 3}, {})
    with pytest.raises(TypeError, match="two leaves share a name"):
        save_tree(path, {"a.b": ZEROS(1), "a": {"b": ZEROS(1)}}, {})
    assert list(path.parent.iterdir()) == []
    save_file({"a": ZEROS(2)}, path)  # without a checksum
    assert_refused(lambda: read_tensors(path), CheckpointError, "cannot be read")


# ---------------------------------------------------------------------- the bytes of tensors


def written(named: dict, about: str = "{}") -> bytes:
    file = io.BytesIO()
    tensor_file.write_tensors(file, named, about)
    return file.getvalue()


def expected_bytes(named: dict[str, torch.Tensor], about: str = "{}") -> bytes:
    """By the safetensors package, from copies."""
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


TREES = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), tensors(), max_size=6)


@given(named=TREES.filter(lambda tree: "__metadata__" not in tree), about=st.text(max_size=9), again=st.booleans())
def test_the_bytes_are_those_of_the_safetensors_package(named, about, again) -> None:
    about = json.dumps({"about": about})
    if again:
        named |= {f"{name} again": tensor for name, tensor in named.items()}  # two names for the same memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BLOCK", 64)
        assert written(named, about) == expected_bytes(named, about)


def test_tensors_of_every_type_and_rows_of_a_file_are_stored_as_the_safetensors_package_does(monkeypatch) -> None:
    every = {str(dtype): torch.ones(24, dtype=torch.uint8).view(dtype) for dtype in TYPES}
    assert written(every) == expected_bytes(every)
    refused = {"x": torch.zeros(1, dtype=torch.complex128)}
    assert_refused(lambda: written(refused), WriteError, "'x' is torch.complex128", "use one of")
    values = torch.arange(10_000.0).reshape(-1, 2)
    rows = MappedRows(values, torch.arange(len(values)).flip(0))
    assert written({"x": rows}) == expected_bytes({"x": values.flip(0)})
    monkeypatch.setattr(MappedRows, "blocks", lambda rows: [slice(3)])
    assert_refused(lambda: written({"x": rows}), WriteError, "'x' gave 24 bytes instead of 40,000")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the maps of this process")
def test_what_may_stay_in_the_file_is_not_copied_into_memory(path) -> None:
    x = torch.arange(40_000.0)
    save_tree(path, {"clients": {"x": x}, "server": x}, {})

    def in_file(tensor: torch.Tensor) -> bool:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        return any(first <= tensor.data_ptr() < last for first, last in ranges)

    tensors, _ = read_tensors(path, mapped=("clients.",))
    assert [in_file(tensors[name]) for name in ("clients.x", "server")] == [True, False]
    assert tensors["clients.x"].equal(x) and tensors["server"].equal(x)


# ---------------------------------------------------------------------- writes that fail


class InterruptedRows:
    """Ctrl-C comes between two blocks of rows."""

    shape, dtype = torch.Size((9, 2)), torch.float32

    def blocks(self) -> list[slice]:
        return [slice(row, row + 1) for row in range(9)]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        if rows.start == 5:
            raise KeyboardInterrupt
        return torch.ones(1, 2)


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    text = path.with_name("a.json")
    save_tree(path, {"a": ZEROS(9, 2)}, {})
    write_json(text, {"a": 1})
    before = path.read_bytes(), text.read_bytes()
    path.with_name(f"{path.name}.partial").write_bytes(b"left by a kill")
    with pytest.raises(KeyboardInterrupt):
        save_tree(path, {"a": InterruptedRows()}, {})

    def fail(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for call in (lambda: save_tree(path, {"a": torch.ones(2)}, {}), lambda: write_json(text, {"a": 2})):
        assert_refused(call, WriteError, "cannot be written (No space")
    assert (path.read_bytes(), text.read_bytes()) == before
    assert sorted(path.parent.iterdir()) == sorted([path, text])


# ---------------------------------------------------------------------- settings and memberships

KEYS, VALUES = st.text(min_size=1, max_size=5), st.integers(-9, 9) | st.booleans() | st.text(max_size=5)
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=3), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=5
)


@given(settings=TABLES)
def test_settings_survive_a_round_trip_through_toml(tmp_path_factory, settings: dict) -> None:
    """Infinity and lists of tables too; what is None is left out."""
    file = tmp_path_factory.getbasetemp() / "settings.toml"
    methods = [{"lr": 0.1}, {"lr": float("-inf"), "seeds": [0, 1]}]
    kept = {"settings": settings, "limit": float("inf"), "methods": methods}
    write_toml(file, {**kept, "path": None, "methods": [{**methods[0], "path": None}, methods[1]]})
    assert tomllib.loads(file.read_text(encoding="utf-8")) == kept


def test_rounds_with_fewer_models_get_columns_of_zeros(tmp_path):
    """Clustered FL cuts a cluster in two on the way, so its memberships get wider."""
    by_round = {5: torch.ones(3, 1), 10: torch.eye(2)[[0, 1, 0]], 15: torch.eye(3)}
    log = tmp_path / "memberships.log"
    log.write_bytes(b"".join(membership_record(round, c, 7) for round, c in by_round.items()))
    found = read_membership_log(log, log.stat().st_size, 3, 7)
    for round, c in by_round.items():
        assert torch.equal(found[round], torch.nn.functional.pad(c, (0, 3 - c.shape[1])))
