"""Digit domains read from small files: which client gets which image, and errors about missing files."""

import bz2

import numpy as np
import pytest
import torch
from scipy.io import savemat

from kit.files import write_mnist
from ppfl.core.errors import DataError, SettingError
from ppfl.data import DOMAINS, build, digit_domains
from ppfl.data.domains import as_coloured

N = 60
LABELS = (np.arange(N) % 10).astype(np.uint8)
LEVELS = {"svhn": 0, "usps": 1, "mnist_m": 2, "mnist": 3}  # all pixels of an image have the value 4 * position + level
SHAPES = {"svhn": (32, 32, 3), "usps": (16, 16), "mnist_m": (32, 32, 3), "mnist": (28, 28)}


def images(domain: str) -> np.ndarray:
    shades = (4 * np.arange(N) + LEVELS[domain]).astype(np.uint8)
    return np.broadcast_to(shades.reshape(-1, *[1] * len(SHAPES[domain])), (N, *SHAPES[domain])).copy()


def save_npz(path, domain: str):
    x = images(domain)
    path.parent.mkdir(exist_ok=True)
    np.savez(path, x_train=x[:40], y_train=LABELS[:40], x_test=x[40:], y_test=LABELS[40:])


@pytest.fixture
def folder(tmp_path):
    for domain in ("svhn", "usps", "mnist_m"):
        save_npz(tmp_path / "digits5" / f"{domain}.npz", domain)
    write_mnist(tmp_path / "mnist", images("mnist"), LABELS)
    return tmp_path


def shades(samples) -> np.ndarray:
    """The pixel value of each image, which is the same for all its pixels."""
    x = ((samples.x + 1) * 127.5).flatten(1)
    assert (x.max(1).values - x.min(1).values).max() < 1e-3
    return x.mean(1).round().long().numpy()


@pytest.mark.parametrize("clients", [1, 3])
def test_every_image_goes_to_one_client_of_its_domain_with_its_label(folder, clients):
    f = digit_domains(folder, samples=N, clients_per_domain=clients)
    assert f.n_clients == 5 * clients
    assert (f.train.x.shape[1:], f.n_classes, f.truth.name) == ((3, 28, 28), 10, "domain")
    assert f.truth.memberships.argmax(1).tolist() == [d for d in range(5) for _ in range(clients)]
    seen: dict[str, list[int]] = {domain: [] for domain in LEVELS}
    for id, mixture in zip(f.ids, f.truth.memberships, strict=True):
        domain = DOMAINS[int(mixture.argmax())]
        assert id.split("-")[0] == domain
        for part in f.client(id).values():
            assert len(part) and part.x.min() >= -1 and part.x.max() <= 1
            if domain != "drawn":
                found = shades(part)
                assert (found % 4 == LEVELS[domain]).all()
                assert part.y.tolist() == LABELS[found // 4].tolist()
                seen[domain] += (found // 4).tolist()
    assert all(sorted(positions) == list(range(N)) for positions in seen.values())


def test_samples_depend_on_the_seed(folder):
    def drawn(samples: int, seed: int = 0) -> set[int]:
        return set(shades(digit_domains(folder, ["usps"], samples, seed=seed, test_fraction=0).train))

    assert len(drawn(20)) == 20
    assert drawn(20) < drawn(40)
    assert drawn(20) != drawn(20, seed=1)


def test_domains_do_not_depend_on_each_other(folder):
    everything, some = digit_domains(folder, samples=30), digit_domains(folder, ["mnist", "drawn"], samples=30)
    assert some.ids == ("mnist", "drawn")
    for id in some.ids:
        for split, part in some.client(id).items():
            assert torch.equal(part.x, everything.client(id)[split].x)


def test_official_files_and_archives_give_the_same_images(folder, tmp_path_factory):
    official = tmp_path_factory.mktemp("official")
    for domain in ("svhn", "usps"):
        (official / domain).mkdir()
    labels = np.where(LABELS == 0, 10, LABELS)[:, None]
    savemat(official / "svhn" / "train_32x32.mat", {"X": np.moveaxis(images("svhn"), 0, -1), "y": labels})
    lines = [
        f"{label + 1} " + " ".join(f"{i}:{pixel:.6f}" for i, pixel in enumerate(image.ravel() / 127.5 - 1, 1)) + "\n"
        for image, label in zip(images("usps"), LABELS, strict=True)
    ]
    for name, part in (("usps.bz2", lines[:40]), ("usps.t.bz2", lines[40:])):
        (official / "usps" / name).write_bytes(bz2.compress("".join(part).encode()))
    for domain in ("svhn", "usps"):
        archive, file = (digit_domains(place, [domain], N, seed=2) for place in (folder, official))
        torch.testing.assert_close(file.train.x, archive.train.x, atol=1e-5, rtol=0)
        assert torch.equal(file.train.y, archive.train.y)


def test_an_image_of_the_right_size_is_only_scaled_and_repeated():
    grey = torch.rand(4, 28, 28)
    assert torch.equal(as_coloured(grey), (2 * grey - 1)[:, None].expand(-1, 3, -1, -1))


def test_resizing_does_not_flip_images():
    half = torch.zeros(1, 3, 32, 32)
    half[..., 16:] = 1
    resized = as_coloured(half)
    assert (resized[..., :12] == -1).all() and (resized[..., 16:] == 1).all()


def test_errors_about_missing_files_say_what_to_do(folder, monkeypatch):
    (folder / "digits5" / "usps.npz").unlink()
    with pytest.raises(
        DataError, match=r"no usps.npz or usps.bz2 with usps.t.bz2 in .*digits5.*get both.*'usps' out of"
    ):
        digit_domains(folder, samples=10)
    with pytest.raises(DataError, match="61 samples asked of svhn, which has 60"):
        digit_domains(folder, samples=N + 1)
    monkeypatch.delenv("PPFL_DATA", raising=False)
    with pytest.raises(DataError, match="no folder for digit_domains.*mnist/ and digits5/"):
        build("digit_domains")
    assert build("digit_domains", domains=["drawn"], samples=10).ids == ("drawn",)
    monkeypatch.setenv("PPFL_DATA", str(folder))
    assert build("digit_domains", domains=["svhn", "mnist"], samples=10).ids == ("svhn", "mnist")


def test_files_without_images_are_refused(folder):
    np.savez(folder / "digits5" / "usps.npz", x=np.zeros((N, 256), np.uint8), y=LABELS)
    with pytest.raises(DataError, match=r"usps.npz has samples of shape \(256,\); expected images"):
        digit_domains(folder, ["usps"], 10)
    (folder / "digits5" / "svhn.npz").unlink()
    path = folder / "digits5" / "train_32x32.mat"
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"train_32x32.mat is damaged .*download it again"):
        digit_domains(folder, ["svhn"], 10)
    savemat(path, {"X": np.zeros((32, 32, 3, 4)), "y": np.ones((4, 1))})
    with pytest.raises(DataError, match=r"X of float64 \(4, 32, 32, 3\); expected bytes"):
        digit_domains(folder, ["svhn"], 10)
    with pytest.raises(DataError, match="'mnist' occur twice"):
        digit_domains(folder, ["mnist", "mnist"], 10)
    with pytest.raises(SettingError, match="digit_domains.domains"):
        build("digit_domains", domains=["emnist"])


def test_real_domains_are_five_clients_of_equal_size(real_data, monkeypatch):
    if not (real_data / "digits5").is_dir() or not (real_data / "mnist").is_dir():
        pytest.skip("no digits5/ or mnist/ in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build("digit_domains")
    assert f.ids == ("svhn", "usps", "drawn", "mnist_m", "mnist")
    assert (f.train.sizes + f.test.sizes).tolist() == [7438] * 5
    assert (f.label_counts() > 0).all()
