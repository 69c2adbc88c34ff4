"""The data of one site: the MNIST images of some digits, split evenly among its clients."""

import torch

from ppfl import Federation
from ppfl.data.dataset_settings import MNIST_PIXELS
from ppfl.data.file_settings import dataset_folder
from ppfl.data.partitions import label_groups
from ppfl.data.readers import read_mnist


def load_digits(digits: list[int], clients: int) -> Federation:
    """The images of these digits (PPFL_DATA/mnist). All sites name all ten classes, so that their models are alike."""
    x, y = read_mnist(dataset_folder(None, None, "mnist"))
    mine = torch.isin(y, torch.tensor(digits))
    mean, deviation = MNIST_PIXELS
    classes = [str(digit) for digit in range(10)]
    assigned = label_groups(y[mine], groups=[digits], clients=clients)
    return Federation.from_arrays((x[mine] - mean) / deviation, y[mine], assigned, classes=classes)
