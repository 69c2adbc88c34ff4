"""Small federations and networks that the tests share."""

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ppfl.core.population import Population
from ppfl.data.federation import Federation


def make_federation(sizes=(7, 12, 20, 5), dim=4, classes=3, seed=0, dtype=torch.float32, **settings) -> Federation:
    """Clients of unequal size whose labels come from linear models of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), dim, generator=generator, dtype=torch.float64)
    clients = [f"client-{i}" for i, size in enumerate(sizes) for _ in range(size)]
    models = torch.randn(len(sizes), dim, classes, generator=generator, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = torch.einsum("nd,ndc->nc", x, models[owner]).argmax(1)
    federation = Federation.from_arrays(x.float(), y, clients, **{"test_fraction": 0.0, **settings})
    return federation.to(dtype=dtype) if dtype != torch.float32 else federation


def make_contradicting_federation(groups=(0, 1, 0, 0, 1), size=12, dtype=torch.float64) -> Federation:
    """Clients with the same x and two classes; those of group 1 have the two labels the other way round."""
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    clients = [f"client-{i}" for i in range(len(groups)) for _ in range(size)]
    labels = torch.cat([1 - y if group else y for group in groups])
    return Federation.from_arrays(x.repeat(len(groups), 1), labels, clients, test_fraction=0.0).to(dtype=dtype)


def make_net(dim=4, hidden=5, classes=3, seed=0, dtype=torch.float32) -> nn.Module:
    """A two-layer perceptron."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, classes)).to(dtype)


def make_linear(dim=4, classes=3, seed=0, dtype=torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(dim, classes).to(dtype)


def make_population(k=2, mix="outputs", net=None, **settings) -> Population:
    return Population(make_net() if net is None else net, k=k, mix=mix, **settings)


def idx_bytes(array: np.ndarray, code: int = 8) -> bytes:
    """An array as MNIST's files hold it."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def write_mnist(
    folder: Path, images: np.ndarray, labels: np.ndarray, compress: bool = True, name: str = "{}-idx{}-ubyte"
) -> None:
    """MNIST's four files, three quarters of the images in the first two."""
    folder.mkdir(parents=True, exist_ok=True)
    cut = 3 * len(labels) // 4
    for part, rows in (("train", slice(0, cut)), ("t10k", slice(cut, None))):
        for kind, axes, array in (("images", 3, images), ("labels", 1, labels)):
            content, file = idx_bytes(array[rows]), name.format(f"{part}-{kind}", axes)
            (folder / (file + ".gz" * compress)).write_bytes(gzip.compress(content) if compress else content)


def write_tff(path: Path, clients: dict[str, dict[str, np.ndarray | list[str]]]) -> Path:
    """An HDF5 file of TensorFlow Federated: examples/<client>/<field>, with texts as bytes of a fixed length."""
    import h5py

    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for client, fields in clients.items():
            group = examples.create_group(client)
            for field, values in fields.items():
                as_bytes = np.array([text.encode() for text in values], "S") if isinstance(values, list) else values
                group.create_dataset(field, data=as_bytes, compression="gzip")
    return path
