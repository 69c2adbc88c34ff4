"""HDF5 files of TensorFlow Federated: what is asked for is read, and hostile files are refused."""

import sys

import numpy as np
import pytest

from kit.files import write_tff
from ppfl.core.errors import DataError
from ppfl.data.limits import limited
from ppfl.data.tff_files import open_tff

h5py = pytest.importorskip("h5py")
TEXTS = ["to be", "", "né\n" * 30]


@pytest.fixture
def path(tmp_path):
    return write_tff(tmp_path / "a.h5", {"b/c": {}, "ann": {"n": np.arange(6).reshape(3, 2), "s": TEXTS}})


def test_what_was_written_is_read(path):
    with open_tff(path) as file:
        assert "ann" in file.clients
        np.testing.assert_array_equal(file.numbers("ann", "n"), np.arange(6).reshape(3, 2))
        assert [text.decode() for text in file.texts("ann", "s")] == TEXTS
        assert (file.length("ann", "n"), file.length("nobody", "n"), file.texts("nobody", "s")) == (3, 0, [])


def test_without_h5py_the_error_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"needs h5py; install it with: pip install 'ppfl\[hdf5\]'"), open_tff(path):
        pass


@pytest.mark.parametrize("content", [b"", b"text", b"\x89HDF\r\n\x1a\n" + bytes(100)])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not a readable file of TensorFlow Federated.*download it again"):
        open_tff(path).__enter__()
    with pytest.raises(DataError, match="no file"):
        open_tff(tmp_path / "b.h5").__enter__()


def refused(path, pattern, read=lambda file: file.numbers("ann", "x")):
    with pytest.raises(DataError, match=pattern) as caught, open_tff(path) as file:
        read(file)
    assert "\n" not in str(caught.value)


def test_damaged_files_are_refused(path):
    whole = path.read_bytes()
    for cut in range(0, len(whole), 500):
        path.write_bytes(whole[:cut])
        refused(path, "download it again", lambda file: (file.numbers("ann", "n"), file.texts("ann", "s")))


def test_other_names_and_types_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    h5py.File(path, "w").close()
    refused(path, "'examples' is missing")
    with h5py.File(path, "w") as file:
        file["examples"] = 1
    refused(path, "'examples' is a Dataset")
    with h5py.File(path, "w") as file:
        file["examples/ann"] = 1
    refused(path, "'ann' is a Dataset")
    for value, pattern in (
        (1.0, "no rows"),
        (h5py.Empty("f4"), "no rows"),
        (np.array([b"a"]), "expected numbers"),
        (np.zeros(2, [("a", "i4")]), "expected numbers"),
        (np.zeros(2, complex), "expected numbers"),
    ):
        with h5py.File(path, "w") as file:
            file["examples/ann/x"] = value
        refused(path, pattern)
    with h5py.File(path, "w") as file:
        file["examples/ann/x"] = np.zeros((2, 2))
    refused(path, "expected texts", lambda file: file.texts("ann", "x"))
    for kind in (h5py.string_dtype(), h5py.vlen_dtype(np.int32)):
        with h5py.File(path, "w") as file:
            file.create_dataset("examples/ann/x", 2, dtype=kind)
        refused(path, "without a fixed length.*type S$", lambda file: file.texts("ann", "x"))


def test_links_and_data_in_other_files_are_refused(tmp_path):
    secret, path = tmp_path / "secret", tmp_path / "a.h5"
    secret.write_bytes(bytes(range(80)))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.arange(3.0)
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(3.0)
        ann = file.create_group("examples/ann")
        ann["soft"], ann["outside"] = h5py.SoftLink("/y"), h5py.ExternalLink("b.h5", "/x")
        ann.create_dataset("x", (10,), "f8", external=[(str(secret), 0, 80)])
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource("b.h5", "x", (3,))
        ann.create_virtual_dataset("virtual", layout)
        file["examples/link"] = h5py.SoftLink("/examples/ann")
    refused(path, "'soft' is a link", lambda file: file.numbers("ann", "soft"))
    refused(path, "'outside' is a link", lambda file: file.numbers("ann", "outside"))
    refused(path, "'link' is a link", lambda file: file.numbers("link", "x"))
    refused(path, "no rows in this file")
    refused(path, "no rows in this file", lambda file: file.numbers("ann", "virtual"))


def test_sizes_are_checked_before_anything_is_read(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("examples/ann/x", (1 << 40,), "f4", chunks=(1024,))
        file.create_dataset("examples/ann/text", (1 << 33,), "S1", chunks=(1024,))
        file.create_dataset("examples/ann/chunk", (2,), "f4", chunks=(1 << 29,), maxshape=(None,))
        file.create_dataset("examples/ann/many", (1 << 28,), "f4", chunks=(1,))
    assert path.stat().st_size < 1e5
    refused(path, "in chunks of \\(1,\\)", lambda file: file.numbers("ann", "many"))
    refused(path, "in chunks of \\(1024,\\)")
    with h5py.File(path, "a") as file:
        del file["examples/ann/x"], file["examples/ann/text"]
        file.create_dataset("examples/ann/x", (1 << 31,), "f4", chunks=(1 << 28,))
        file.create_dataset("examples/ann/text", (1 << 30,), "S8", chunks=(1 << 26,))
    refused(path, "more than the limit")
    refused(path, "more than the limit", lambda file: file.texts("ann", "text"))
    with limited(bytes=1 << 20):
        refused(path, "more than the limit", lambda file: file.numbers("ann", "chunk"))


def test_all_that_is_read_of_a_file_counts(tmp_path):
    path = write_tff(tmp_path / "a.h5", {name: {"x": np.zeros(100)} for name in ("ann", "bob", "eve")})
    with limited(bytes=1700):
        refused(path, "2,400 bytes when read", lambda file: [file.numbers(name, "x") for name in file.clients])
    with limited(clients=2):
        refused(path, "has 3 clients, more than the limit of 2")
