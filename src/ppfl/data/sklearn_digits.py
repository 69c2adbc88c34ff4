"""The digits that come with scikit-learn, so that a first run needs no download."""

import torch
from torch import Tensor

from ppfl.data.federation import Federation
from ppfl.data.partitions import MNIST_GROUPS, label_groups


def digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits of 8 x 8 pixels, flattened, in [0, 1].

    >>> x, y = digits()
    >>> x.shape, y.shape, float(x.max())
    (torch.Size([1797, 64]), torch.Size([1797]), 1.0)
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def digits_federation(clients_per_group: int = 10, seed: int = 0, test_fraction: float = 0.2) -> Federation:
    """The digits in the paper's four MNIST label groups, with about 45 samples per client.

    >>> digits_federation().describe()
    'digits: 40 clients, 1437 train / 360 test samples (28-44 per client), x (64,), 10 classes, 4 true sources'
    """
    x, y = digits()
    clients = label_groups(y, MNIST_GROUPS, clients_per_group, seed)
    return Federation.from_arrays(x, y, clients, seed=seed, test_fraction=test_fraction, name="digits")
