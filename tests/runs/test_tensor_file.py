"""Files of tensors are written in blocks: the safetensors package, which writes them at once, is the oracle."""

import io
import json
import os
import signal
import zlib
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ppfl.core import WriteError
from ppfl.data.inputs import MappedRows
from ppfl.runs import tensor_file
from ppfl.runs.checksums import checksum_of_tensors, joined, memory_of
from ppfl.runs.storage import read_tensors, save_tree

BLOCK = 64


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK", BLOCK)


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


def spread(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() and len(tensor) else tensor


LAYOUTS = [lambda x: x, lambda x: x.mT if x.dim() > 1 else x, spread, lambda x: x[::2] if x.dim() else x]


@st.composite
def tensors(draw) -> torch.Tensor:
    shape, dtype = draw(st.lists(st.integers(0, 7), max_size=3)), draw(st.sampled_from([*tensor_file._TYPES]))
    count, seed = torch.Size(shape).numel() * dtype.itemsize, draw(st.integers(0, 99))
    bits = torch.randint(2, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    made = bits.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    return draw(st.sampled_from(LAYOUTS))(made)


TREES = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), tensors(), max_size=6)


@settings(max_examples=100, deadline=None)
@given(named=TREES.filter(lambda tree: "__metadata__" not in tree), about=st.text(max_size=9), again=st.booleans())
def test_the_bytes_are_those_of_the_safetensors_package(named, about, again) -> None:
    about = json.dumps({"about": about})
    if again:
        named |= {f"{name} again": tensor for name, tensor in named.items()}  # two names for the same memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BLOCK", BLOCK)
        assert written(named, about) == expected_bytes(named, about)


def test_tensors_of_every_type_stand_where_the_safetensors_package_puts_them() -> None:
    named = {str(dtype): torch.ones(24, dtype=torch.uint8).view(dtype) for dtype in tensor_file._TYPES}
    assert written(named) == expected_bytes(named)
    with pytest.raises(WriteError, match="'x' is torch.complex128, which a safetensors file cannot hold; use one of"):
        written({"x": torch.zeros(1, dtype=torch.complex128)})


def test_rows_of_a_file_are_stored_like_a_tensor(monkeypatch) -> None:
    values = torch.arange(10_000.0).reshape(-1, 2)
    which = torch.arange(len(values)).flip(0)
    assert written({"x": MappedRows(values, which)}) == expected_bytes({"x": values.flip(0)})
    monkeypatch.setattr(MappedRows, "blocks", lambda rows: [slice(3)])
    with pytest.raises(WriteError, match="'x' gave 24 bytes instead of 40,000"):
        written({"x": MappedRows(values, which)})


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_checksums_of_parts_give_that_of_the_whole(first, second) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_checksum_covers_names_types_shapes_and_text() -> None:
    x = torch.arange(4)
    trees = {"a": x}, {"b": x}, {"a": x.reshape(2, 2)}, {"a": x.view(torch.float64)}, {"a": x + 1}
    assert len({checksum_of_tensors(tree, about) for tree in trees for about in ("", "t")}) == 2 * len(trees)


class Sink(io.RawIOBase):
    """Takes bytes, and keeps how many came at a time and in whose memory they were."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.memories: set[tuple[int, int]] = set()  # address, size

    def write(self, content: bytes | memoryview) -> int:
        self.sizes.append(len(content))
        if isinstance(content, memoryview):
            memory = content.obj.base.untyped_storage()
            self.memories.add((memory.data_ptr(), memory.nbytes()))
        return len(content)

    def seek(self, *_) -> int:
        return 0


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_no_more_than_a_block_is_copied_however_large_a_tensor_is(layout, monkeypatch) -> None:
    block, sink = 2**12, Sink()
    monkeypatch.setattr(tensor_file, "BLOCK", block)
    x = LAYOUTS[layout](torch.zeros(50, 3000))  # a row takes more than a block, a row of the transpose less
    tensor_file.write_tensors(sink, {"now": x, "kept": x, "wide": x[None]}, "{}")
    assert sum(sink.sizes[1:-1]) == 3 * x.nbytes  # between the header and the checksum
    assert max(sink.sizes) <= block
    own = x.untyped_storage()
    copies = [size for address, size in sink.memories if address != own.data_ptr()]
    assert max(copies, default=0) <= block
    assert not (layout == 0 and copies)  # what is contiguous is written from where it is


def test_what_is_read_is_copied_once_at_most_and_checked_in_blocks(tmp_path, monkeypatch) -> None:
    block, x, ones = 2**12, torch.arange(40_000.0), torch.ones(3000)
    monkeypatch.setattr(tensor_file, "BLOCK", block)
    save_tree(tmp_path / "x", {"clients": {"x": x}, "server": ones}, {})
    sizes: dict[str, list[int]] = {"clone": [], "isfinite": []}
    for name, found in sizes.items():
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, real=real, found=found: (found.append(self.nbytes), real(self))[1]
        )
    for mapped, copied in ((("clients.",), [ones.nbytes]), ((), [x.nbytes, ones.nbytes])):
        tensors, _ = read_tensors(tmp_path / "x", mapped=mapped)
        assert sorted(sizes["clone"]) == sorted(copied)
        assert max(sizes["isfinite"]) <= block
        assert sum(sizes["isfinite"]) == x.nbytes + ones.nbytes
        assert tensors["clients.x"].equal(x)
        assert tensors["server"].equal(ones)
        for found in sizes.values():
            found.clear()


@pytest.mark.usefixtures("small_blocks")
def test_an_error_between_two_blocks_leaves_the_old_file_alone(tmp_path, monkeypatch) -> None:
    path = tmp_path / "tree.safetensors"
    save_tree(path, {"a": torch.zeros(100)}, {})
    before, seen, real = path.read_bytes(), [], zlib.crc32

    def interrupt(*args) -> int:
        seen.append(len(list(tmp_path.iterdir())))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(tensor_file.zlib, "crc32", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_tree(path, {"a": torch.ones(100)}, {})
    monkeypatch.undo()
    assert seen[-1] == 2  # it was being written beside the old one
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


class KilledOnTheWay:
    """Rows of which some can be read before the process is killed."""

    shape, dtype = torch.Size((9, 2)), torch.float32

    def blocks(self) -> list[slice]:
        return [slice(row, row + 1) for row in range(9)]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        if rows.start == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot copy a process")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_between_two_blocks_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "tree.safetensors"
    save_tree(path, {"a": torch.zeros(9, 2)}, {"round": 1})
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            save_tree(path, {"a": KilledOnTheWay()}, {})
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert path.with_name(path.name + ".partial").exists()
    assert read_tensors(path)[0]["a"].equal(torch.zeros(9, 2))
    save_tree(path, {"a": torch.ones(9, 2)}, {"round": 2})  # what the kill left is not in the way
    assert read_tensors(path)[0]["a"].equal(torch.ones(9, 2))
    assert list(tmp_path.iterdir()) == [path]
