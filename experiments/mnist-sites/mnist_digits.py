"""The data of one site: the MNIST images of some digits, split evenly among its clients."""

import torch

from ppfl.data import Pool, label_groups, mnist


def load_digits(digits: list[int], clients: int) -> Pool:
    """The images of these digits (PPFL_DATA/mnist). All sites name all ten classes, so that their models are alike."""
    pool = mnist()
    mine = torch.isin(pool.y, torch.tensor(digits))
    x, y = pool.x[mine], pool.y[mine]
    assigned = label_groups(y, groups=[digits], clients=clients)
    return Pool(x, y, assigned, classes=[str(digit) for digit in range(10)])
