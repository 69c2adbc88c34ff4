"""The convolutions of a round and nothing else: what a round of a convolutional network cannot be faster than, with the
convolutions that PyTorch has.

For every batch: each convolution forward, its gradient for the filters, and for its input where there is a convolution
below it. Nothing is done for norms, activations, pooling, fully connected layers, the loss or the parameters. Images
and filters lie in the memory layout in which that is fastest, and batches are shared among threads of one core each.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from workloads import Workload

from ppfl.sites.engines import WorkerPool

LAYOUTS = (torch.contiguous_format, torch.channels_last)


class ConvolutionInput(NamedTuple):
    layer: nn.Conv2d
    x: Tensor
    is_first: bool  # its input needs no gradient


def convolution_inputs(net: nn.Module, x: Tensor) -> list[ConvolutionInput]:
    """Every convolution of the network, with what it is given for a batch x."""
    found: list[ConvolutionInput] = []
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: found.append(ConvolutionInput(layer, *inputs, not found)))
        for layer in layers
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return found


def one_batch(inputs: list[ConvolutionInput], layout: torch.memory_format) -> Callable[[], None]:
    """The convolutions of one training step, on tensors that are ready in this layout."""
    ready = []
    with torch.no_grad():
        for layer, x, is_first in inputs:
            laid, weight = x.to(memory_format=layout), layer.weight.detach().to(memory_format=layout)
            ready.append((layer, laid, weight, torch.ones_like(layer(laid)).to(memory_format=layout), is_first))

    def run() -> None:
        for layer, x, weight, slope, is_first in ready:
            geometry = layer.stride, layer.padding, layer.dilation
            torch.conv2d(x, weight, layer.bias, *geometry, layer.groups)
            has_bias = layer.bias is not None
            sizes, wanted = [len(weight)] if has_bias else None, [not is_first, True, has_bias]
            torch.ops.aten.convolution_backward(slope, x, weight, sizes, *geometry, False, [0, 0], layer.groups, wanted)

    return run


def convolutions_alone(workload: Workload) -> Callable[[], None]:
    """One round's convolutions at each call."""
    samples, size = workload.federation.train, workload.batch_size
    assert size is not None
    inputs = convolution_inputs(workload.net, samples.x[:size])
    run = min((one_batch(inputs, layout) for layout in LAYOUTS), key=_seconds)
    batches = sum(-(-n // size) for n in samples.cpu_sizes.tolist())
    pool = WorkerPool(torch.get_num_threads())

    def work(share: list[Tensor]) -> None:
        with torch.no_grad():
            for _ in share:
                run()

    return lambda: pool.run(work, [part.unbind() for part in torch.arange(batches).tensor_split(pool.threads)]) and None


def _seconds(run: Callable[[], None], times: int = 5) -> float:
    """Of the fastest of several calls."""
    found = []
    for _ in range(times):
        clock = time.perf_counter()
        run()
        found.append(time.perf_counter() - clock)
    return min(found)
