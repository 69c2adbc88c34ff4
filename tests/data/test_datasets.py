"""CIFAR-10, FEMNIST, digit domains and drawn digits: images keep label and client; hostile files are refused."""

import bz2
import json
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from readers import digit_domains
from readers.digit_domains import DOMAINS
from readers.drawn_digits import drawn_digits
from scipy.io import savemat

from kit.files import cifar_batch, limited, python2_cifar_batch, write_bytes, write_leaf, write_mnist, write_tff
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import FEMNIST_CLASSES, build, cifar10, femnist
from ppfl.data.datasets.cifar import read_cifar10_batch

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
    for name in [*(f"data_batch_{at}" for at in range(1, 6)), "test_batch"]:
        assert_refused(lambda: cifar10(tmp_path), DataError, "cifar-10" if name == "data_batch_1" else name)
        write_bytes(tmp_path / "cifar-10-batches-py" / name, pickle.dumps(cifar_batch(PIXELS)))
    f = build("cifar10", folder=tmp_path, partition={"name": "iid", "clients": 6}, test_fraction=0)
    assert (f.n_clients, f.classes[1], f.train.x.shape) == (6, "automobile", (120, 3, 32, 32))


def calls(function, *arguments):
    """An object whose pickle calls a function."""
    return type("Calls", (), {"__reduce__": lambda self: (function, arguments)})()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_what_a_pickle_names_is_never_called(tmp_path, protocol):
    file = str(tmp_path / "touched")
    system, evaluate = calls(os.system, f"touch {file}"), calls(eval, f"open({file!r}, 'w')")
    for call in (system, evaluate, calls(np.save, file, 1), calls(getattr, {}, "get")):
        path = write_bytes(tmp_path / "b", pickle.dumps(cifar_batch(PIXELS, data=call), protocol))
        assert_refused(lambda: read_cifar10_batch(path), DataError, "extract it again")
        more = pickle.dumps(cifar_batch(PIXELS, extra=call), protocol or 2)
        assert torch.equal(read_cifar10_batch(write_bytes(path, more))[1], torch.arange(20) % 10)
    assert [found.name for found in tmp_path.iterdir()] == ["b"]


def test_broken_cifar_batches_are_refused(tmp_path):
    good = pickle.dumps(cifar_batch(PIXELS), 2)
    for content in (
        good[:-50],  # cut
        pickle.dumps(cifar_batch(np.array([{}], dtype=object))),  # objects
        pickle.dumps(cifar_batch(PIXELS[:, :100].copy())),  # other shape
        pickle.dumps(cifar_batch(PIXELS.view("<u4"))),  # other type
        pickle.dumps(cifar_batch(PIXELS, labels=[10] * 20)),  # label of 10
        good[:-1] + b"\x96" + (1 << 40).to_bytes(8, "little") + b".",  # an empty array of any size
    ):
        path = write_bytes(tmp_path / "b", content)
        assert_refused(lambda: read_cifar10_batch(path), DataError, "extract it again")
    for more in (
        b"r\xff\xff\xff\x7f",  # a high memo index
        b")" + b"2\x86" * 60 + b"0",  # copies of copies
        b")" + b"".join(b"q%ch%c\x86" % (at, at) for at in range(60)) + b"Ns",  # nested tuples as a key
    ):  # these would take far more memory or time than the file is long, if the pickle was loaded
        found, _ = read_cifar10_batch(write_bytes(path, good[:-1] + more + b"."))
        torch.testing.assert_close(found, torch.from_numpy(PIXELS).reshape(20, 3, 32, 32) / 255)


SIZES = {"ann": 8, "bob": 5, "eve": 3}
LABELS = {writer: RNG.integers(0, 62, size) for writer, size in SIZES.items()}
PAPER = {  # light, with a little ink
    writer: np.where(RNG.random((size, 28, 28)) < 0.9, 255, RNG.integers(0, 256, (size, 28, 28))).astype(np.uint8)
    for writer, size in SIZES.items()
}


def save(path, writers=tuple(SIZES), rows=slice(None)):
    """Images of these writers in the format that the name of the file says."""
    if path.suffix == ".npz":
        order = np.random.default_rng(1).permutation(16)
        x, y = (np.concatenate([*part.values()])[order] for part in (PAPER, LABELS))
        np.savez(path, x=x, y=y, client=np.repeat(np.arange(3), [*SIZES.values()])[order], writer_id=np.array(writers))
        return path
    if path.suffix == ".h5":
        pixels = {w: (PAPER[w][rows] / 255).astype(np.float32) for w in writers}
        return write_tff(path, {w: {"pixels": pixels[w], "label": LABELS[w][rows]} for w in writers})
    return write_leaf(path, {w: (PAPER[w][rows].reshape(-1, 784) / 255, LABELS[w][rows]) for w in writers})


TRAIN, TEST = {"rows": slice(2, None)}, {"rows": slice(2)}
FEMNIST = {
    "LEAF": {"all_data_0.json": {"writers": ("ann", "bob")}, "all_data_1.json": {"writers": ("eve",)}},
    "LEAF, train and test": {"train/a_9.json": TRAIN, "test/a_9.json": TEST},
    "TFF, train and test": {"fed_emnist_train.h5": TRAIN, "fed_emnist_test.h5": TEST},
    "npz": {"writers.npz": {}},
}


def writers(folder=None, test_fraction=0.2, **settings):
    return femnist(folder, **settings).federation(test_fraction=test_fraction)


def pairs(images, labels):
    return [(int(label), np.asarray(image).tobytes()) for image, label in zip(images, labels, strict=True)]


@pytest.mark.parametrize("source", FEMNIST)
def test_every_writer_has_its_own_images_in_every_format(tmp_path, source):
    for name, what in FEMNIST[source].items():
        save(tmp_path / name, **what)
    f = writers(tmp_path, min_samples=1)
    assert (set(f.ids), f.classes, f.train.x.shape[1:]) == (set(SIZES), FEMNIST_CLASSES, (1, 28, 28))
    for writer in f.ids:
        found = [pairs(part.x, part.y) for part in f.client(writer).values()]
        expected = pairs(255 - PAPER[writer], LABELS[writer])
        assert sorted(pair for part in found for pair in part) == sorted(expected)
        assert "train and test" not in source or found[1] == expected[:2]
    assert set(writers(tmp_path, min_samples=4).ids) == {"ann", "bob"}
    assert_refused(lambda: writers(tmp_path), DataError, "0 of 3 clients have at least 30 samples")
    with limited(bytes=5_000):
        assert_refused(lambda: writers(tmp_path, min_samples=1), DataError, "limit of 5,000")


def test_femnist_by_settings_at_random_and_as_numbers(tmp_path, monkeypatch):
    path = save(tmp_path / "femnist" / "all_data_0.json")
    assert len({writers(file=path, min_samples=1, clients=1, seed=seed).ids for seed in range(20)}) == 3
    assert_refused(lambda: writers(file=path, min_samples=4, clients=3), DataError, "2 of 3 clients", "expected 3")
    numbers = build("femnist", file=save(tmp_path / "a.json.gz"), min_samples=3, image=False).train.x
    torch.testing.assert_close(numbers, writers(file=path, min_samples=3).train.x.flatten(1) / 255)
    monkeypatch.setenv("PPFL_DATA", str(tmp_path))
    assert build("femnist", min_samples=8).ids == ("ann",)
    monkeypatch.delenv("PPFL_DATA")
    assert_refused(lambda: build("femnist"), DataError, "no folder for femnist", "PPFL_DATA")


def leaf(pixel=1.0, label=0, size=784):
    writer = {"x": [[pixel] * size], "y": [label]}
    return json.dumps({"users": ["ann"], "num_samples": [1], "user_data": {"ann": writer}}).encode()


def test_broken_femnist_is_refused(tmp_path):
    for content, words in (
        (b"[" * 100_000, "is not FEMNIST"),
        (b'{"users": ["a"], "users": ["b"]}', "a name occurs twice"),
        (leaf(label=62), "label 62 of client 'ann'"),
        (leaf(size=10), "expected (28, 28) or (784,)"),
        (leaf().replace(b"[1], ", b"[2], "), "differs from the number of labels"),
        (leaf(pixel=255), "numbers from 0 to 1"),
        (leaf(pixel=0.0), "light ink on a dark background"),
        (leaf().replace(b"ann", rb"a\u0000"), "NUL"),
    ):
        path = write_bytes(tmp_path / "a.json", content)
        assert_refused(lambda: writers(None, 0, file=path, min_samples=1), DataError, words)
    assert_refused(lambda: femnist(tmp_path, file=path), SettingError, "both folder and file")
    arrays = {"x": PAPER["ann"], "y": LABELS["ann"], "client": np.zeros(8, int), "writer_id": np.array(["ann"])}
    for change, words in (
        ({"x": PAPER["bob"]}, "expected the same for all"),
        ({"client": np.ones(8, int)}, "positions in writer_id"),
        ({"client": None}, "expected x, y and client"),
    ):
        path = tmp_path / "a.npz"
        np.savez(path, **{name: array for name, array in (arrays | change).items() if array is not None})
        assert_refused(lambda: writers(None, 0, file=path, min_samples=1), DataError, words)


N = 60
DIGITS = (np.arange(N) % 10).astype(np.uint8)
LEVELS = {"svhn": 0, "usps": 1, "mnist_m": 2, "mnist": 3}  # all pixels of an image have the value 4 * position + level
SHAPES = {"svhn": (32, 32, 3), "usps": (16, 16), "mnist_m": (32, 32, 3), "mnist": (28, 28)}


def images(domain):
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


def domains(*asked, seed=0, **settings):
    return digit_domains.read(*asked, seed=seed, **settings).federation(seed=seed)


def shades_of(samples):
    """The pixel value of each image, which is the same for all its pixels."""
    x = ((samples.x + 1) * 127.5).flatten(1)
    assert (x.max(1).values - x.min(1).values).max() < 1e-3
    return x.mean(1).round().long().numpy()


def test_every_image_goes_to_one_client_of_its_domain_with_its_label_whatever_other_domains_there_are(folder):
    f = domains(folder, samples=N, clients_per_domain=3)
    assert (f.train.x.shape[1:], f.n_classes) == ((3, 28, 28), 10)
    seen = {domain: [] for domain in LEVELS}
    for id, mixture in zip(f.ids, f.truth.memberships, strict=True):
        domain = DOMAINS[int(mixture.argmax())]
        assert id.split("-")[0] == domain
        for part in f.client(id).values() if domain != "drawn" else ():
            found = shades_of(part)
            assert (found % 4 == LEVELS[domain]).all() and part.y.tolist() == DIGITS[found // 4].tolist()
            seen[domain] += (found // 4).tolist()
    assert all(sorted(positions) == list(range(N)) for positions in seen.values())
    everything, some = domains(folder, samples=30), domains(folder, ["mnist", "drawn"], samples=30)
    assert some.ids == ("mnist", "drawn")
    for id in some.ids:
        assert all(torch.equal(part.x, everything.client(id)[split].x) for split, part in some.client(id).items())


def test_official_files_give_the_same_images(folder):
    labels, usps = np.where(DIGITS == 0, 10, DIGITS)[:, None], images("usps").reshape(N, -1) / 127.5 - 1
    (folder / "b" / "svhn").mkdir(parents=True)
    savemat(folder / "b" / "svhn" / "train_32x32.mat", {"X": np.moveaxis(images("svhn"), 0, -1), "y": labels})
    rows = [" ".join(f"{i}:{pixel:.6f}" for i, pixel in enumerate(row, 1)) for row in usps]
    lines = [f"{label + 1} {row}\n".encode() for row, label in zip(rows, DIGITS, strict=True)]
    for name, part in (("usps.bz2", lines[:40]), ("usps.t.bz2", lines[40:])):
        write_bytes(folder / "b" / "usps" / name, bz2.compress(b"".join(part)))
    for domain in ("svhn", "usps"):
        archive, file = (domains(place, [domain], samples=N, seed=2) for place in (folder, folder / "b"))
        torch.testing.assert_close(file.train.x, archive.train.x, atol=1e-5, rtol=0)
        assert torch.equal(file.train.y, archive.train.y)


def test_domains_without_their_files_are_refused(folder, monkeypatch):
    (folder / "digits5" / "usps.npz").unlink()
    assert_refused(lambda: domains(folder, samples=10), DataError, "no usps.npz or usps.bz2", "'usps' out of")
    write_bytes(folder / "svhn" / "train_32x32.mat", b"nonsense")
    (folder / "digits5" / "svhn.npz").unlink()
    assert_refused(lambda: domains(folder, ["svhn"], samples=10), DataError, "train_32x32.mat is damaged")
    monkeypatch.delenv("PPFL_DATA", raising=False)
    assert build("readers.digit_domains:read", domains=["drawn"], samples=10).ids == ("drawn",)
    assert_refused(lambda: build("readers.digit_domains:read"), DataError, "no folder for mnist", "PPFL_DATA")


def test_drawn_digits_are_coloured_balanced_legible_and_each_depends_on_seed_and_position_only():
    """The nearest image by shape, light on dark or dark on light, mostly has the same label; chance is a tenth."""
    x, y = drawn_digits(2400, seed=1)
    again, labels = drawn_digits(530, seed=1)  # more than one chunk
    assert torch.equal(again, x[:530]) and torch.equal(labels, y[:530])
    assert not torch.equal(drawn_digits(530, seed=2)[0], again)
    assert (x.dtype, x.shape[1:]) == (torch.float32, (3, 28, 28)) and x.min() >= 0 and x.max() <= 1
    assert (y.bincount(minlength=10) - 240).abs().max() < 5 * 240**0.5  # five standard deviations
    assert ((x[:, 0] - x[:, 1]).flatten(1).abs().mean(1) > 0.01).float().mean() > 0.9
    light = F.avg_pool2d(x.mean(1, keepdim=True), 2)[:, 0]
    light = light - light.flatten(1).median(1).values[:, None, None]
    shapes = F.normalize(light[:, 2:-2, 3:-3].flatten(1))
    nearest = (shapes[2000:] @ shapes[:2000].T).abs().argmax(1)
    assert (y[:2000][nearest] == y[2000:]).float().mean() > 0.75
