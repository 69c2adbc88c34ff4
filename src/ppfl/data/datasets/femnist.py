"""FEMNIST: handwritten characters, and every writer is a client. In the formats of LEAF and TFF, and as npz."""

import json
import string
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppfl.core.settings import Count
from ppfl.data.arrays import as_mask
from ppfl.data.datasets.client_files import Files, TffFile, choose_clients, find_files, open_tff
from ppfl.data.datasets.images import images_as_floats, read_arrays
from ppfl.data.files import check_size, existing_file, open_bounded, reading
from ppfl.data.ids import Holdout, text_ids
from ppfl.data.load import DATASETS, Pool
from ppfl.errors import DataError

FEMNIST_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_SIZE = 28
_PATTERNS = (
    ("fed_emnist_train.h5", "fed_emnist_test.h5"),
    ("train/*.json", "test/*.json"),
    ("all_data_*.json", ""),
    ("all_data/all_data_*.json", ""),
    ("*.npz", ""),
)
_Array = np.ndarray[Any, Any]
_Choose = Callable[[Sequence[str], Callable[[str], int]], list[str]]
# the writer of some images, or of each of them; whether they are for testing, None if the source does not say; images
# (n, 28, 28) of bytes, 255 where there is ink; labels (n,)
_Part = tuple[str | _Array, bool | _Array | None, _Array, _Array]


@DATASETS.register("femnist", base=Holdout)
def femnist(
    folder: Path | None = None,
    file: Path | None = None,
    min_samples: Count = 30,
    clients: Count | None = None,
    image: bool = True,
    seed: int = 0,
) -> Pool:
    """FEMNIST by writer: images of 28 x 28 pixels, 62 classes (digits, capital and small letters).

    The files have dark ink on a light background. It is inverted to ink = 1 on 0, as in MNIST. A test part of the
    source is kept.

    Args:
        folder: A folder with `fed_emnist_train.h5` and `fed_emnist_test.h5` (TFF), with `all_data_*.json` or train/
            and test/ of LEAF, or with one npz file (`x, y, client`, optionally `is_test` and `writer_id`). By default
            the folder femnist/ in PPFL_DATA.
        file: One such file, in the place of a folder.
        min_samples: Writers with fewer images, test images included, are left out.
        clients: Number of the other writers that are taken at random; None: all.
        image: Images with a channel axis, which stay bytes until a batch is formed; otherwise 784 floats.
        seed: Seeds the choice of writers.

    >>> from tempfile import TemporaryDirectory
    >>> writer = {"x": [[1.0] * 783 + [0.0]] * 5, "y": [0, 10, 36, 0, 10]}
    >>> with TemporaryDirectory() as folder:
    ...     leaf = {"users": ["ann"], "num_samples": [5], "user_data": {"ann": writer}}
    ...     _ = Path(folder, "all_data_0.json").write_text(json.dumps(leaf))
    ...     femnist(Path(folder), min_samples=5).federation().describe()
    'femnist: 1 clients, 4 train / 1 test samples (4-4 per client), x (1, 28, 28) bytes scaled to 0..1, 62 classes'
    """
    files = find_files(
        "femnist", file, folder, _PATTERNS, "fed_emnist_train.h5, all_data_*.json or npz file of FEMNIST"
    )
    first, _ = files[0]

    def choose(names: Sequence[str], size_of: Callable[[str], int]) -> list[str]:
        return choose_clients(names, size_of, min_samples, clients, seed, "samples")

    read = {".h5": _from_tff, ".hdf5": _from_tff, ".npz": _from_npz}.get(first.suffix.lower(), _from_leaf)
    writers, marks, images, labels = zip(*read(files, choose), strict=True)
    ink, y = np.concatenate(images), np.concatenate(labels)
    if ink.mean() > 127.5:
        raise DataError(
            f"{first} has light ink on a dark background; expected dark ink on a light one, as LEAF and TFF have it: "
            f'invert it, or read an npz file with name = "npz"'
        )

    def of_rows(values: Sequence[Any], kind: type) -> _Array:
        parts = zip(values, labels, strict=True)
        return np.concatenate([np.broadcast_to(np.asarray(value, dtype=kind), part.shape) for value, part in parts])

    x = torch.from_numpy(ink)[:, None] if image else images_as_floats(ink).flatten(1)
    is_test = None if marks[0] is None else of_rows(marks, bool)
    return Pool(x, y, of_rows(writers, object), is_test, "femnist", FEMNIST_CLASSES)


def _from_tff(files: Files, choose: _Choose) -> list[_Part]:
    with ExitStack() as stack:
        parts = [(stack.enter_context(open_tff(path)), is_test) for path, is_test in files]

        def size_of(writer: str) -> int:
            return sum(part.length(writer, "label") for part, _ in parts)

        return [
            (writer, is_test, *_tff_images(part, writer))
            for writer in choose([*parts[0][0].clients], size_of)
            for part, is_test in parts
            if part.length(writer, "label")
        ]


def _tff_images(part: TffFile, writer: str) -> tuple[_Array, _Array]:
    with reading(part.path, f"has other things than images of client {writer!r}", "download it again"):
        return _paired(part.read(writer, "pixels"), part.read(writer, "label"))


def _from_leaf(files: Files, choose: _Choose) -> list[_Part]:
    writers: dict[str, list[_Part]] = {}
    size = 0
    for path, is_test in files:
        for writer, (x, y) in _read_leaf(path).items():
            if writer in writers or not is_test:
                writers.setdefault(writer, []).append((writer, is_test, x, y))
            size += x.size
        check_size(path, size)
    chosen = choose([*writers], lambda writer: sum(len(y) for *_, y in writers[writer]))
    return [part for writer in chosen for part in writers[writer]]


def _read_leaf(path: Path) -> dict[str, tuple[_Array, _Array]]:
    """The images and labels of every writer in a file of LEAF."""
    path = existing_file(path, "a file all_data_*.json of LEAF")
    with (
        reading(path, "is not FEMNIST as LEAF has it", "make it again with the scripts of LEAF"),
        open_bounded(path) as file,
    ):
        # images become bytes as soon as a writer is complete: as Python numbers they need 30 times the memory
        content = json.load(file, object_pairs_hook=_as_images)
        if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
            raise ValueError("expected users, num_samples and user_data")
        writers, sizes = content["user_data"], content["num_samples"]
        if not isinstance(writers, dict) or not all(isinstance(each, tuple) for each in writers.values()):
            raise ValueError("user_data has no x and y of every writer")
        if sorted(content["users"]) != sorted(writers):
            raise ValueError(f"users has {len(content['users'])} names, but user_data has {len(writers)} others")
        if sizes != [len(writers[writer][1]) for writer in content["users"]]:
            raise ValueError("num_samples differs from the number of labels")
        return writers


def _as_images(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    if not {"x", "y"} <= found.keys():
        return found
    return _paired(np.asarray(found["x"]), np.asarray(found["y"]))


def _from_npz(files: Files, choose: _Choose) -> list[_Part]:
    path, _ = files[0]
    if len(files) > 1:
        raise DataError(f"{path.parent} has {len(files)} npz files; expected one: name it with file = ...")
    with reading(path, "is not FEMNIST as npz", "save arrays x, y and client with numpy.savez"):
        arrays = read_arrays(path)
        if not {"x", "y", "client"} <= arrays.keys():
            raise ValueError(f"it contains {sorted(arrays)}, expected x, y and client")
        sizes = {key: len(arrays[key]) for key in ("x", "y", "client", "is_test") if key in arrays}
        if len({*sizes.values()}) > 1:
            raise ValueError(f"rows of its arrays: {sizes}, expected the same for all")
        clients = arrays["client"]
        if "writer_id" in arrays:
            if clients.dtype.kind not in "iu" or not np.isin(clients, np.arange(len(arrays["writer_id"]))).all():
                raise ValueError("client has other values than positions in writer_id")
            clients = arrays["writer_id"][clients]
        names, positions, counts = np.unique(text_ids(clients), return_inverse=True, return_counts=True)
        size_of = dict(zip(names.tolist(), counts.tolist(), strict=True))
        keep = np.isin(names, choose([*size_of], size_of.__getitem__))[positions]
        is_test = as_mask(arrays["is_test"], len(keep)).numpy()[keep] if "is_test" in arrays else None
        return [(names[positions[keep]], is_test, *_paired(arrays["x"][keep], arrays["y"][keep]))]


def _as_ink(pixels: _Array) -> _Array:
    """Images as bytes (n, 28, 28), from 0 for the light background to 255 for ink."""
    if len(pixels) and pixels.shape[1:] not in ((_SIZE, _SIZE), (_SIZE * _SIZE,)):
        raise ValueError(f"images have shape {pixels.shape[1:]}, expected (28, 28) or (784,)")
    if pixels.dtype != np.uint8:
        if pixels.dtype.kind not in "fiu" or not (np.all(pixels >= 0) and np.all(pixels <= 1)):
            raise ValueError("images have other values than numbers from 0 to 1")
        pixels = np.rint(255 * pixels).astype(np.uint8)
    return np.subtract(255, pixels, dtype=np.uint8).reshape(-1, _SIZE, _SIZE)


def _paired(pixels: _Array, labels: _Array) -> tuple[_Array, _Array]:
    if labels.shape != pixels.shape[:1] or (len(labels) and labels.dtype.kind not in "iu"):
        raise ValueError(f"images have shape {pixels.shape} and labels are {labels.dtype} {labels.shape}")
    return _as_ink(pixels), labels.astype(np.int64)
