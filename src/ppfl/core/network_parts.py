"""Parts of a network: which are canonical, where they stand, and which outputs a loss can be taken of."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError
from .losses import Loss
from .mixing import MixedModule

AFFINE = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding}
RESHAPING = {nn.Flatten, nn.Unflatten, nn.Identity}


def canonical_modules(net: nn.Module, canonical: str | Sequence[str]) -> tuple[str, ...]:
    """The named submodules, checked; the whole network is the one named ''."""
    if canonical == "all":
        return ("",)
    if isinstance(canonical, nn.Module):
        raise ModelError("canonical is a module; give its name in the network, such as canonical='head'")
    names = (canonical,) if isinstance(canonical, str) else tuple(canonical)
    known = {name for name, module in net.named_modules() if name and trains(module)}
    for name in names:
        if name not in known:
            frozen = bool(name) and name in dict(net.named_modules()) and [*net.get_submodule(name).parameters()] != []
            fault = "is frozen (requires_grad=False)" if frozen else "is no submodule with parameters"
            choices = ", ".join(map(repr, sorted(known)))
            raise ModelError(f"canonical names {name!r}, which {fault}; it must be 'all' or among {choices}")
        if any(name != other and name.startswith(other + ".") for other in names):
            raise ModelError(f"canonical names {name!r} twice: it is part of another named submodule; drop one")
    if len(set(names)) < len(names) or not names:
        raise ModelError(f"canonical is {names!r}; name at least one submodule, each once")
    return names


def is_in_module(parameter: str, modules: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to one of these submodules."""
    return any(module == "" or parameter.startswith(module + ".") for module in modules)


def trains(module: nn.Module) -> bool:
    """Whether it has a parameter that is not frozen."""
    return any(p.requires_grad for p in module.parameters())


def are_affine(net: nn.Module, modules: tuple[str, ...]) -> bool:
    """Whether the output of each of these submodules is affine in its parameters: then to mix them is to mix those.

    >>> are_affine(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), ("2",))
    True
    """
    return all(_is_affine(net.get_submodule(name)) for name in modules)


def _is_affine(module: nn.Module) -> bool:
    if type(module) is nn.Sequential:
        learned = [child for child in module if any(True for _ in child.parameters())]
        others = [child for child in module if child not in learned]
        return len(learned) == 1 and _is_affine(learned[0]) and all(type(m) in RESHAPING for m in others)
    return type(module) in AFFINE and not (isinstance(module, nn.Embedding) and module.max_norm is not None)


def with_tensors_of(net: nn.Module, other: nn.Module) -> nn.Module:
    """A copy of `net` with the very tensors of `other`, whose parameters and buffers have the same names: the two
    always have the same values, and take the memory of one."""
    parameters, buffers = dict(other.named_parameters()), dict(other.named_buffers())
    same: dict[int, Any] = {id(mine): parameters[name] for name, mine in net.named_parameters()}
    same |= {id(mine): buffers[name] for name, mine in net.named_buffers()}
    return copy.deepcopy(net, same)


def with_mixed_modules(net: nn.Module, modules: tuple[str, ...]) -> nn.Module:
    """A copy of the network whose canonical submodules mix their outputs where they stand."""
    mixed = copy.deepcopy(net)
    for path in modules:
        if path:
            parent, _, name = path.rpartition(".")
            setattr(mixed.get_submodule(parent), name, MixedModule(mixed.get_submodule(path)))
    return mixed


def run_and_watch(net: nn.Module, x: Tensor, modules: tuple[str, ...]) -> tuple[Tensor, bool]:
    """Output of the network on x, and whether it is, as an object, what its one canonical module returned."""
    seen: list[Any] = []
    handle = net.get_submodule(modules[0]).register_forward_hook(lambda _module, _x, out: seen.append(out))
    try:
        with torch.no_grad():
            output = net(x)
    finally:
        handle.remove()
    return output, len(modules) == 1 and len(seen) == 1 and seen[0] is output


def refuse_outputs(loss: Loss, output: Any, y: Tensor, n_classes: int | None) -> None:
    """Refuse outputs (B, ...) that a loss cannot be taken of, given targets y (B, ...)."""
    if not isinstance(output, Tensor):
        raise ModelError(f"the network returns a {type(output).__name__}; it must return one tensor (B, ...)")
    _refuse_number_of_outputs(loss.name, output, n_classes)
    try:
        losses = loss.per_sample(output, y)
        found = f"losses of shape {tuple(losses.shape)}"
    except (RuntimeError, IndexError) as error:
        losses, found = None, str(error).splitlines()[0]
    if losses is None or losses.shape != y.shape[:1]:
        raise ModelError(
            f"the {loss.name} loss cannot be taken of outputs {tuple(output.shape)} and targets {tuple(y.shape)}: "
            f"{found}; it must give one loss per sample, ({len(y)},)"
        )


def _refuse_number_of_outputs(loss: str, output: Tensor, n_classes: int | None) -> None:
    if loss == "cross_entropy" and n_classes is not None and output.shape[-1] < n_classes:
        raise ModelError(
            f"the network has {output.shape[-1]} outputs but the labels go up to {n_classes - 1}; "
            f"give its last layer {n_classes} outputs"
        )
    if loss == "logistic" and output[0].numel() != 1:
        raise ModelError(
            f"the logistic loss needs one output per sample, the network has {output[0].numel()}; "
            "give its last layer one output or use the cross_entropy loss"
        )
