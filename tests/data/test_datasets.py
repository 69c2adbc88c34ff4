"""CIFAR-10, FEMNIST, digit domains and drawn digits: images keep label and client; hostile files are refused."""

import bz2
import codecs
import json
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.io import savemat

from kit.files import cifar_batch, python2_cifar_batch, write_bytes, write_leaf, write_mnist, write_tff
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import DOMAINS, FEMNIST_CLASSES, build, digit_domains, drawn_digits, read_cifar10, read_femnist
from ppfl.data.cifar import read_cifar10_batch
from ppfl.data.domains import as_coloured
from ppfl.data.limits import limited

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (20, 3072), dtype=np.uint8)


def test_cifar_batches_are_read_whatever_pickled_them(tmp_path):
    old = python2_cifar_batch(PIXELS)
    renamed = old.replace(b"numpy.core.", b"numpy._core.")  # numpy warns of the old name
    np.testing.assert_array_equal(pickle.loads(renamed, encoding="bytes")[b"data"], PIXELS)
    layouts = [cifar_batch(np.asarray(PIXELS, order=order)) for order in "CF"]
    for content in (old, *(pickle.dumps(batch, protocol) for batch in layouts for protocol in (2, 3, 4))):
        x, y = read_cifar10_batch(write_bytes(tmp_path / "b", content))
        torch.testing.assert_close(x, torch.from_numpy(PIXELS).reshape(20, 3, 32, 32) / 255)
        assert y.tolist() == [at % 10 for at in range(20)]


def test_cifar_is_all_six_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    for name in [*(f"data_batch_{at}" for at in range(1, 6)), "test_batch"]:
        write_bytes(folder / name, pickle.dumps(cifar_batch(PIXELS)))
    x, y = read_cifar10(tmp_path)
    assert (len(x), len(y)) == (120, 120) and torch.equal(read_cifar10(folder)[0], x)
    groups = {"name": "label_groups", "groups": [[1, 9], [0, 8], [2, 3, 4, 5, 6, 7]], "clients": 2}
    f = build("cifar10", folder="cifar-10-batches-py", base=tmp_path, partition=groups)
    assert (f.n_clients, f.classes[1], f.train.x.shape[1:]) == (6, "automobile", (3, 32, 32))
    (folder / "test_batch").unlink()
    assert_refused(lambda: read_cifar10(tmp_path), DataError, "no file", "test_batch")
    assert_refused(lambda: read_cifar10(tmp_path / "b"), DataError, "data_batch_1", "cifar-10-python.tar.gz")


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_a_function_is_refused_and_does_nothing(tmp_path, protocol):
    file = str(tmp_path / "touched")
    system, evaluate = Calls(os.system, f"touch {file}"), Calls(eval, f"open({file!r}, 'w')")
    for call in (system, evaluate, Calls(np.save, file, 1), Calls(getattr, {}, "get")):
        path = write_bytes(tmp_path / "b", pickle.dumps(cifar_batch(PIXELS, data=call), protocol))
        assert_refused(lambda: read_cifar10_batch(path), DataError, "asks to load")
    assert [found.name for found in tmp_path.iterdir()] == ["b"]


GOOD_BATCH = pickle.dumps(cifar_batch(PIXELS), 2)
BROKEN_BATCHES = {
    "empty": b"",
    "cut": GOOD_BATCH[:-50],
    "list": [1, 2],
    "no labels": {b"data": PIXELS},
    "other type": cifar_batch(PIXELS.astype(np.int16)),
    "objects": cifar_batch(np.array([{}], dtype=object)),
    "other shape": cifar_batch(PIXELS[:, :100].copy()),
    "label of 10": cifar_batch(PIXELS, labels=[10] * 20),
    "label of text": cifar_batch(PIXELS, labels=["1"] * 20),
    "another encoding of bytes": cifar_batch(PIXELS, extra=Calls(codecs.encode, "x", "rot13")),
    # these would take far more memory or time than the file is long
    "high memo index": GOOD_BATCH[:-1] + b"r\xff\xff\xff\x7f.",
    "nested tuples": GOOD_BATCH[:-1] + b")" + b"2\x86" * 60 + b"0.",
}


@pytest.mark.parametrize("case", BROKEN_BATCHES)
def test_a_broken_cifar_batch_is_refused(tmp_path, case):
    content = BROKEN_BATCHES[case]
    path = write_bytes(tmp_path / "b", content if isinstance(content, bytes) else pickle.dumps(content, 2))
    assert_refused(lambda: read_cifar10_batch(path), DataError, "extract it again")


SIZES = {"ann": 8, "bob": 5, "eve": 3}
LABELS = {writer: RNG.integers(0, 62, size) for writer, size in SIZES.items()}
PAPER = {  # light, with a little ink
    writer: np.where(RNG.random((size, 28, 28)) < 0.9, 255, RNG.integers(0, 256, (size, 28, 28))).astype(np.uint8)
    for writer, size in SIZES.items()
}


def save_leaf(path, writers=tuple(SIZES), rows=slice(None)):
    return write_leaf(path, {w: (PAPER[w][rows].reshape(-1, 784) / 255, LABELS[w][rows]) for w in writers})


def save_tff(path, rows=slice(None)):
    fields = {w: {"pixels": (PAPER[w][rows] / 255).astype(np.float32), "label": LABELS[w][rows]} for w in SIZES}
    return write_tff(path, fields)


def save_npz(path, **changes):
    order = np.random.default_rng(1).permutation(16)
    arrays = {
        "x": np.concatenate([*PAPER.values()])[order],
        "y": np.concatenate([*LABELS.values()])[order],
        "client": np.repeat(np.arange(3), [*SIZES.values()])[order],
        "writer_id": np.array([*SIZES]),
    }
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def save_parts(folder, train: str, test: str, save):
    """The first two images of every writer are the test part."""
    save(folder / train, rows=slice(2, None))
    save(folder / test, rows=slice(2))
    return folder


def save_two_files(folder):
    save_leaf(folder / "all_data_0.json", ("ann", "bob"))
    return save_leaf(folder / "all_data_1.json", ("eve",)).parent


FEMNIST = {
    "LEAF": save_two_files,
    "LEAF, one compressed file": lambda folder: save_leaf(folder / "all_data_0.json.gz"),
    "LEAF, train and test": lambda folder: save_parts(folder, "train/a_9.json", "test/a_9.json", save_leaf),
    "TFF, train and test": lambda folder: save_parts(folder, "fed_emnist_train.h5", "fed_emnist_test.h5", save_tff),
    "TFF, one file": lambda folder: save_tff(folder / "fed_emnist_train.h5"),
    "npz": lambda folder: save_npz(folder / "writers.npz").parent,
}


def pairs(images, labels) -> list[tuple[int, bytes]]:
    return [(int(label), np.asarray(image).tobytes()) for image, label in zip(images, labels, strict=True)]


@pytest.mark.parametrize("source", FEMNIST)
def test_every_writer_has_its_own_images_in_every_format(tmp_path, source):
    path = FEMNIST[source](tmp_path)
    f = read_femnist(path, min_samples=1, test_fraction=0.2)
    assert (set(f.ids), f.classes, f.name) == (set(SIZES), FEMNIST_CLASSES, "femnist")
    assert (f.train.x.dtype, tuple(f.train.x.shape[1:])) == (torch.uint8, (1, 28, 28))
    for writer in f.ids:
        found = {split: pairs(part.x, part.y) for split, part in f.client(writer).items()}
        expected = pairs(255 - PAPER[writer], LABELS[writer])
        assert sorted(pair for part in found.values() for pair in part) == sorted(expected)
        if "train and test" in source:
            assert sorted(found["test"]) == sorted(expected[:2])
    assert set(read_femnist(path, min_samples=4).ids) == {"ann", "bob"}
    assert_refused(lambda: read_femnist(path), DataError, "0 of 3 clients have at least 30 samples")
    with limited(bytes=5_000):
        assert_refused(lambda: read_femnist(path, min_samples=1), DataError, "limit of 5,000")


def test_an_npz_file_may_mark_its_test_rows_and_name_its_clients(tmp_path):
    names, marks = np.repeat([*SIZES], [*SIZES.values()]), np.arange(16) % 3 == 0
    x, y = (np.concatenate([*part.values()]) for part in (PAPER, LABELS))
    path = save_npz(tmp_path / "a.npz", x=x, y=y, client=names, writer_id=None, is_test=marks)
    f = read_femnist(path, min_samples=1)
    assert f.ids == tuple(SIZES) and torch.equal(f.test.x[:, 0], torch.from_numpy(255 - x[marks]))
    save_npz(tmp_path / "b.npz")
    assert_refused(lambda: read_femnist(tmp_path), DataError, "2 npz files")


def test_femnist_by_settings_at_random_and_as_numbers(tmp_path, monkeypatch):
    path = save_leaf(tmp_path / "femnist" / "all_data_0.json")

    def some(clients, seed=0) -> set[str]:
        return set(read_femnist(path, 1, clients, seed=seed).ids)

    assert some(1) < some(2) < some(3) == set(SIZES)
    assert len({tuple(some(1, seed)) for seed in range(20)}) == 3
    assert_refused(lambda: read_femnist(path, 4, 3), DataError, "2 of 3 clients", "expected 3 or more")
    first, again, other = (read_femnist(path, 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.test.x, again.test.x) and not torch.equal(first.test.x, other.test.x)
    numbers = read_femnist(path, 3, image=False, seed=1).train.x
    torch.testing.assert_close(numbers, first.train.x.flatten(1) / 255)
    assert build("femnist", folder="femnist", base=tmp_path, min_samples=4).ids == ("ann", "bob")
    assert build("femnist", file=path, base=tmp_path, min_samples=1, clients=2, image=False).n_clients == 2
    assert_refused(lambda: build("femnist", folder="femnist", file="a.npz"), SettingError, "both folder and file")
    assert_refused(lambda: build("femnist", folder=tmp_path), DataError, "no fed_emnist_train.h5")
    monkeypatch.setenv("PPFL_DATA", str(tmp_path))
    assert build("femnist", min_samples=8).ids == ("ann",)
    monkeypatch.delenv("PPFL_DATA")
    assert_refused(lambda: build("femnist"), DataError, "no folder for femnist", "PPFL_DATA")


def leaf(**changes) -> bytes:
    """A file of one writer, with changes to its images or to the file."""
    writer = {"x": [[1.0] * 784] * 2, "y": [0, 1]} | {key: changes.pop(key) for key in ("x", "y") if key in changes}
    content = {"users": ["ann"], "num_samples": [2], "user_data": {"ann": writer}} | changes
    return json.dumps(content).encode()


SAVE = {"json": write_bytes, "npz": lambda path, changes: save_npz(path, **changes),
        "h5": lambda path, fields: write_tff(path, {"ann": fields})}  # fmt: skip
BROKEN_FEMNIST = {
    "no json": ("json", b"{", "is not FEMNIST"),
    "a list": ("json", b"[1]", "expected users"),
    "nested too deep": ("json", b"[" * 100_000, "is not FEMNIST"),
    "a name twice": ("json", b'{"users": ["a"], "users": ["b"]}', "a name occurs twice"),
    "other names": ("json", leaf(users=["bob"]), "others"),
    "names of another type": ("json", leaf(users=[1, None]), "is not FEMNIST"),
    "other sizes": ("json", leaf(num_samples=[3]), "num_samples differs"),
    "a writer without images": ("json", leaf(user_data={"ann": {"y": [0]}}), "no x and y"),
    "one label too few": ("json", leaf(y=[0]), "labels are"),
    "a label of 62": ("json", leaf(y=[0, 62]), "label 62 of client 'ann'"),
    "small images": ("json", leaf(x=[[1.0] * 10] * 2), "expected (28, 28) or (784,)"),
    "pixels that are bytes": ("json", leaf(x=[[255] * 784] * 2), "numbers from 0 to 1"),
    "not a number": ("json", leaf(x=[[float("nan")] * 784] * 2), "numbers from 0 to 1"),
    "light ink": ("json", leaf(x=[[0.0] * 784] * 2), "light ink on a dark background"),
    "a NUL in a name": ("json", leaf().replace(b"ann", rb"a\u0000"), "NUL"),
    "npz without clients": ("npz", {"client": None}, "expected x, y and client"),
    "npz, no such writer": ("npz", {"client": np.full(16, 3)}, "positions in writer_id"),
    "npz, half a writer": ("npz", {"client": np.full(16, 0.5)}, "positions in writer_id"),
    "npz, few labels": ("npz", {"y": np.zeros(3, int)}, "'y': 3"),
    "npz, fractions as labels": ("npz", {"y": np.full(16, 0.5)}, "labels are float64"),
    "tff, small images": ("h5", {"pixels": np.ones((2, 8, 8)), "label": np.arange(2)}, "client 'ann'"),
    "tff, labels of text": ("h5", {"pixels": np.ones((1, 28, 28)), "label": np.array([b"a"])}, "expected numbers"),
    "tff without pixels": ("h5", {"label": np.arange(2)}, "'pixels' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_FEMNIST)
def test_broken_femnist_is_refused(tmp_path, case):
    kind, content, words = BROKEN_FEMNIST[case]
    path = SAVE[kind](tmp_path / f"fed_emnist_train.{kind}", content)
    assert_refused(lambda: read_femnist(path, min_samples=1, test_fraction=0), DataError, words)


N = 60
DIGITS = (np.arange(N) % 10).astype(np.uint8)
LEVELS = {"svhn": 0, "usps": 1, "mnist_m": 2, "mnist": 3}  # all pixels of an image have the value 4 * position + level
SHAPES = {"svhn": (32, 32, 3), "usps": (16, 16), "mnist_m": (32, 32, 3), "mnist": (28, 28)}


def images(domain: str) -> np.ndarray:
    shades = (4 * np.arange(N) + LEVELS[domain]).astype(np.uint8)
    return np.broadcast_to(shades.reshape(-1, *[1] * len(SHAPES[domain])), (N, *SHAPES[domain])).copy()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "digits5").mkdir()
    for domain in ("svhn", "usps", "mnist_m"):
        parts = {"x_train": images(domain)[:40], "y_train": DIGITS[:40], "x_test": images(domain)[40:]}
        np.savez(tmp_path / "digits5" / f"{domain}.npz", **parts, y_test=DIGITS[40:])
    write_mnist(tmp_path / "mnist", images("mnist"), DIGITS)
    return tmp_path


def shades_of(samples) -> np.ndarray:
    """The pixel value of each image, which is the same for all its pixels."""
    x = ((samples.x + 1) * 127.5).flatten(1)
    assert (x.max(1).values - x.min(1).values).max() < 1e-3
    return x.mean(1).round().long().numpy()


def test_every_image_goes_to_one_client_of_its_domain_with_its_label(folder):
    f = digit_domains(folder, samples=N, clients_per_domain=3)
    assert (f.train.x.shape[1:], f.n_classes, f.truth.name) == ((3, 28, 28), 10, "domain")
    assert f.truth.memberships.argmax(1).tolist() == [domain for domain in range(5) for _ in range(3)]
    seen: dict[str, list[int]] = {domain: [] for domain in LEVELS}
    for id, mixture in zip(f.ids, f.truth.memberships, strict=True):
        domain = DOMAINS[int(mixture.argmax())]
        assert id.split("-")[0] == domain
        for part in f.client(id).values():
            assert len(part) and part.x.min() >= -1 and part.x.max() <= 1
            if domain != "drawn":
                found = shades_of(part)
                assert (found % 4 == LEVELS[domain]).all() and part.y.tolist() == DIGITS[found // 4].tolist()
                seen[domain] += (found // 4).tolist()
    assert all(sorted(positions) == list(range(N)) for positions in seen.values())


def test_a_domain_depends_on_the_seed_and_not_on_other_domains(folder):
    def drawn(samples: int, seed: int = 0) -> set[int]:
        return set(shades_of(digit_domains(folder, ["usps"], samples, seed=seed, test_fraction=0).train))

    assert len(drawn(20)) == 20 and drawn(20) < drawn(40) and drawn(20) != drawn(20, seed=1)
    everything, some = digit_domains(folder, samples=30), digit_domains(folder, ["mnist", "drawn"], samples=30)
    assert some.ids == ("mnist", "drawn")
    for id in some.ids:
        for split, part in some.client(id).items():
            assert torch.equal(part.x, everything.client(id)[split].x)


def test_official_files_give_the_same_images(folder, tmp_path_factory):
    official = tmp_path_factory.mktemp("official")
    for domain in ("svhn", "usps"):
        (official / domain).mkdir()
    labels = np.where(DIGITS == 0, 10, DIGITS)[:, None]
    savemat(official / "svhn" / "train_32x32.mat", {"X": np.moveaxis(images("svhn"), 0, -1), "y": labels})
    lines = [
        f"{label + 1} " + " ".join(f"{i}:{pixel:.6f}" for i, pixel in enumerate(image.ravel() / 127.5 - 1, 1)) + "\n"
        for image, label in zip(images("usps"), DIGITS, strict=True)
    ]
    for name, part in (("usps.bz2", lines[:40]), ("usps.t.bz2", lines[40:])):
        (official / "usps" / name).write_bytes(bz2.compress("".join(part).encode()))
    half = torch.zeros(1, 3, 32, 32)
    half[..., 16:] = 1
    resized = as_coloured(half)  # is not flipped
    assert (resized[..., :12] == -1).all() and (resized[..., 16:] == 1).all()
    for domain in ("svhn", "usps"):
        archive, file = (digit_domains(place, [domain], N, seed=2) for place in (folder, official))
        torch.testing.assert_close(file.train.x, archive.train.x, atol=1e-5, rtol=0)
        assert torch.equal(file.train.y, archive.train.y)


def test_domains_without_their_files_are_refused(folder, monkeypatch):
    np.savez(folder / "digits5" / "usps.npz", x=np.zeros((N, 256), np.uint8), y=DIGITS)
    assert_refused(lambda: digit_domains(folder, ["usps"], 10), DataError, "usps.npz", "(256,)")
    (folder / "digits5" / "usps.npz").unlink()
    assert_refused(lambda: digit_domains(folder, samples=10), DataError, "no usps.npz or usps.bz2", "'usps' out of")
    assert_refused(lambda: digit_domains(folder, samples=61), DataError, "61 samples asked of svhn, which has 60")
    assert_refused(lambda: digit_domains(folder, ["mnist"] * 2, 10), DataError, "'mnist' occur twice")
    (folder / "digits5" / "svhn.npz").unlink()
    mat = write_bytes(folder / "digits5" / "train_32x32.mat", b"nonsense")
    assert_refused(lambda: digit_domains(folder, ["svhn"], 10), DataError, "train_32x32.mat is damaged")
    savemat(mat, {"X": np.zeros((32, 32, 3, 4)), "y": np.ones((4, 1))})
    assert_refused(lambda: digit_domains(folder, ["svhn"], 10), DataError, "X of float64", "expected bytes")
    assert_refused(lambda: build("digit_domains", domains=["emnist"]), SettingError, "digit_domains.domains")
    monkeypatch.delenv("PPFL_DATA", raising=False)
    assert_refused(lambda: build("digit_domains"), DataError, "no folder for digit_domains", "mnist/ and digits5/")
    assert build("digit_domains", domains=["drawn"], samples=10).ids == ("drawn",)
    monkeypatch.setenv("PPFL_DATA", str(folder))
    assert build("digit_domains", domains=["mnist_m", "mnist"], samples=10).ids == ("mnist_m", "mnist")


def test_a_drawn_digit_depends_on_its_seed_and_position_only():
    x, y = drawn_digits(600, seed=1)  # more than one chunk
    again, labels = drawn_digits(530, seed=1)
    assert torch.equal(again, x[:530]) and torch.equal(labels, y[:530])
    assert not torch.equal(drawn_digits(530, seed=2)[0], again)
    assert len({image.numpy().tobytes() for image in x}) == 600
    assert_refused(lambda: drawn_digits(0), DataError, "at least 1")


def test_drawn_digits_are_coloured_balanced_and_legible():
    """The nearest image by shape, light on dark or dark on light, mostly has the same label; chance is a tenth."""
    x, y = drawn_digits(2400)
    assert (x.dtype, x.shape[1:]) == (torch.float32, (3, 28, 28)) and x.min() >= 0 and x.max() <= 1
    assert (y.bincount(minlength=10) - 240).abs().max() < 5 * 240**0.5  # five standard deviations
    assert ((x[:, 0] - x[:, 1]).flatten(1).abs().mean(1) > 0.01).float().mean() > 0.9
    light = F.avg_pool2d(x.mean(1, keepdim=True), 2)[:, 0]
    light = light - light.flatten(1).median(1).values[:, None, None]
    shapes = F.normalize(light[:, 2:-2, 3:-3].flatten(1))
    nearest = (shapes[2000:] @ shapes[:2000].T).abs().argmax(1)
    assert (y[:2000][nearest] == y[2000:]).float().mean() > 0.75
