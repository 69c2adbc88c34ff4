"""Digits from several domains, with the same labels but different images: covariate shift, Section O5.4."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ppfl.core.settings import Count
from ppfl.data import Assignment, Pool, Truth, mnist, npz
from ppfl.data.arrays import as_targets
from ppfl.data.datasets.images import images_as_floats, with_channels
from ppfl.data.files import check_size, data_folder, open_bounded, reading
from ppfl.data.partitions import client_names
from ppfl.data.samples import random_rows
from ppfl.errors import DataError, SettingError

from .drawn_digits import SIZE, drawn_digits

Domain = Literal["svhn", "usps", "drawn", "mnist_m", "mnist"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
DOMAIN_SAMPLES = 7438  # images per domain, as in the paper
_Bytes = np.ndarray[Any, Any]


def read(
    folder: Path | None = None,
    domains: Sequence[Domain] = DOMAINS,
    samples: Count = DOMAIN_SAMPLES,
    clients_per_domain: Count = 1,
    seed: int = 0,
) -> Pool:
    """One or more clients per domain, `samples` images per domain, (3, 28, 28) in [-1, 1]; the truth is the domain.

    The folder, by default PPFL_DATA, contains mnist/ (the four idx files) and, in digits5/ or in a folder with the name
    of the domain, svhn.npz or train_32x32.mat, usps.npz or usps.bz2 with usps.t.bz2, and mnist_m.npz (arrays x_train,
    y_train, x_test, y_test or x, y). Training and test images are pooled; of SVHN the training images are enough. The
    domain "drawn" replaces the digits that the paper renders from fonts, and needs no file.

    >>> read(Path("nowhere"), ["drawn"], samples=20, clients_per_domain=2).federation().describe()
    'digit domains: 2 clients, 16 train / 4 test samples (8-8 per client), x (3, 28, 28), 10 classes, 1 true sources'
    """
    if not domains:
        raise SettingError(f"domains is empty; name some of {', '.join(DOMAINS)}")
    if folder is None:
        folder = Path() if set(domains) == {"drawn"} else data_folder("mnist").parent
    found = [_images_of(domain, folder, samples, seed) for domain in domains]  # in random order
    sizes = [len(part) for part in np.array_split(range(samples), clients_per_domain)]
    ids = tuple(name for domain in domains for name in _client_names(domain, clients_per_domain))
    truth = Truth(torch.eye(len(domains)).repeat_interleave(clients_per_domain, 0), "domain")
    clients = Assignment(torch.arange(len(ids)).repeat_interleave(torch.tensor(sizes * len(domains))), ids, truth)
    x, y = torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])
    return Pool(x, y, clients, name="digit domains", classes=[str(digit) for digit in range(10)])


def _client_names(domain: str, count: int) -> list[str]:
    return [domain] if count == 1 else [f"{domain}-{name}" for name in client_names(count)]


def as_coloured(x: Tensor) -> Tensor:
    """Images in [0, 1], (n, rows, columns) or with 1 or 3 channels, as (n, 3, 28, 28) in [-1, 1].

    >>> as_coloured(torch.zeros(2, 16, 16)).shape, float(as_coloured(torch.ones(1, 3, 32, 32)).min())
    (torch.Size([2, 3, 28, 28]), 1.0)
    """
    x = with_channels(x)
    if x.shape[-2:] != (SIZE, SIZE):
        x = F.interpolate(x, (SIZE, SIZE), mode="bilinear", align_corners=False, antialias=True)
    return (2 * x - 1).clamp_(-1, 1).expand(-1, 3, -1, -1)


class _DomainImages(NamedTuple):
    x: Tensor | _Bytes  # in [0, 1], or bytes if all images as floats would need much memory
    y: Tensor


def _mnist(folder: Path) -> tuple[Tensor, Tensor]:
    pool = mnist(folder / "mnist", image=True, standardise=False)
    return pool.x, pool.y


def _images_of(domain: Domain, folder: Path, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    if domain == "drawn":
        x, y = drawn_digits(samples, seed)
        return as_coloured(x), y
    pool = _DomainImages(*_mnist(folder)) if domain == "mnist" else _read(domain, folder)
    rows = random_rows(len(pool.y), samples, seed, domain)
    chosen = pool.x[rows] if isinstance(pool.x, Tensor) else images_as_floats(pool.x[rows.numpy()])
    return as_coloured(chosen), pool.y[rows]


def _read(domain: Domain, folder: Path) -> _DomainImages:
    places = (folder / "digits5", folder / domain)
    for place in places:
        for files, read in _FILE_FORMATS[domain].items():
            paths = [place / name for name in files]
            if all(path.is_file() for path in paths):
                return read(paths)
    wanted = " or ".join(" with ".join(files) for files in _FILE_FORMATS[domain])
    raise DataError(
        f"no {wanted} in {places[0]} or {places[1]}; {_SOURCES[domain]}, "
        f"leave {domain!r} out of domains, or set PPFL_DATA to the folder that has it"
    )


def _from_npz(paths: list[Path]) -> _DomainImages:
    pool = npz(paths[0])
    if not (pool.x.ndim == 3 or (pool.x.ndim == 4 and pool.x.shape[1] in (1, 3))):
        raise DataError(
            f"{paths[0]} has samples of shape {tuple(pool.x.shape[1:])}; expected images (rows, columns), with 3 "
            f"colours last: reshape x"
        )
    return _DomainImages(pool.x, as_targets(pool.y, "classification")[0])


def _from_mat(paths: list[Path]) -> _DomainImages:
    """The original SVHN file: the last axis is the image, and label 10 is the digit 0."""
    from scipy.io import loadmat, whosmat

    with reading(paths[0], "is damaged", "download it again"):
        check_size(paths[0], sum(math.prod(map(int, shape)) for _, shape, _ in whosmat(paths[0])))
        content = loadmat(paths[0], variable_names=["X", "y"])
        x, y = np.moveaxis(content["X"], -1, 0), content["y"].ravel().astype(np.int64) % 10
    if x.dtype != np.uint8 or x.shape != (len(y), 32, 32, 3):
        raise DataError(f"{paths[0]} has X of {x.dtype} {x.shape}; expected bytes (n, 32, 32, 3): download it again")
    return _DomainImages(x, torch.from_numpy(y))


def _from_svmlight(paths: list[Path]) -> _DomainImages:
    """USPS in the format of LIBSVM: 256 pixels in [-1, 1], and labels from 1."""
    from sklearn.datasets import load_svmlight_files

    with reading(paths[0], "is damaged", "download it again"), ExitStack() as stack:
        streams = [stack.enter_context(open_bounded(path)) for path in paths]
        x, y, more, labels = load_svmlight_files(streams, n_features=256, dtype=np.float32)
        check_size(paths[0], (x.shape[0] + more.shape[0]) * 256 * x.dtype.itemsize)
        pixels = torch.from_numpy(np.concatenate([x.toarray(), more.toarray()]).reshape(-1, 16, 16))
        digit = as_targets(np.concatenate([y, labels]), "classification")[0] - 1
    return _DomainImages((pixels + 1) / 2, digit)


_FILE_FORMATS: dict[str, dict[tuple[str, ...], Callable[[list[Path]], _DomainImages]]] = {
    "svhn": {("svhn.npz",): _from_npz, ("train_32x32.mat",): _from_mat},
    "usps": {("usps.npz",): _from_npz, ("usps.bz2", "usps.t.bz2"): _from_svmlight},
    "mnist_m": {("mnist_m.npz",): _from_npz},
}
_SOURCES = {
    "svhn": "get train_32x32.mat, the file of cropped digits of the SVHN authors",
    "usps": "get both files of usps from the data sets of LIBSVM",
    "mnist_m": "save the MNIST-M images as arrays x (n, 28, 28, 3) of bytes and y",
}
