"""One training step of each image network beside its convolutions alone, by turns, in CPU milliseconds on one core.

.venv/bin/python bench/convolution_steps.py
"""

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from convolution_limit import LAYOUTS, convolution_inputs, one_batch
from tables import table
from torch import Tensor, nn
from workloads import convolutions

from ppfl.core import Loss, loss_by_name
from ppfl.data import SampleSpec
from ppfl.networks.images import cnn, resnet18
from ppfl.runs.run import keep_freed_memory

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
from readers.digits_cnn import digits_cnn

TURNS, BATCH = 9, 32


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    grey, coloured = (1, 28, 28), (3, 28, 28)
    return {
        "part c of the bench": (convolutions(clients=1).net, (3, 32, 32)),
        "cnn 16, 32, hidden 128": (cnn(*images(grey, 62), channels=(16, 32), hidden=(128,)), grey),
        "resnet18, width 16": (resnet18(*images(grey, 62), width=16), grey),
        "digits_cnn": (digits_cnn(*images(coloured, 10)), coloured),
    }


def images(shape: tuple[int, ...], classes: int) -> tuple[SampleSpec, Loss]:
    """What a network of images is built from."""
    names = tuple(map(str, range(classes)))
    spec = SampleSpec(shape=shape, dtype=torch.float32, target_dtype=torch.int64, classes=names)
    return spec, loss_by_name("cross_entropy")


def step(net: nn.Module, x: Tensor, y: Tensor) -> None:
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()


def cpu_milliseconds(ways: list[Callable[[], None]]) -> list[float]:
    """The lower quartile of each, which other load on the machine affects least."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(TURNS):
        for way, times in zip(ways, found, strict=True):
            clock = time.process_time()
            way()
            times.append(1e3 * (time.process_time() - clock))
    return [sorted(times)[TURNS // 4] for times in found]


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for name, (net, shape) in networks().items():
        x, y = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
        last, x_last = copy.deepcopy(net).to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        inputs = convolution_inputs(net, x)
        alone = [torch.no_grad()(one_batch(inputs, layout)) for layout in LAYOUTS]
        found = cpu_milliseconds([*alone, lambda: step(net, x, y), lambda: step(last, x_last, y)])  # noqa: B023
        limit = min(found[:2])
        shares = [f"{limit / seconds:.0%}" for seconds in found[2:]]
        rows.append((name, *(f"{seconds:.1f}" for seconds in found), *shares))
    head = ("alone, first", "alone, last", "step, first", "step, last", "of limit, first", "of limit, last")
    print(table(("", *head), rows))


if __name__ == "__main__":
    main()
