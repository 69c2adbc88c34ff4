"""Files of networks that other programs read: weights as safetensors, and low-rank adapters as `peft` reads them.

adapter_config.json         rank, alpha, and which layers of the network have adapters
adapter_model.safetensors   the factors A and B of each, and modules that were trained as a whole
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..core.adapters import AdaptedLayer, adapted_layers
from ..errors import ModelError, WriteError
from ..io.files import make_folder, write_bytes, write_text

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of all names in the file


def save_weights(path: Path, module: nn.Module) -> None:
    """The state dict of a module as safetensors, which other programs read too."""
    write_bytes(path, _package_bytes(module.state_dict()))


def save_adapter(net: nn.Module, folder: str | Path) -> Path:
    """Write the adapters of `net` to a folder, which is made where it is not there.

    `peft.PeftModel.from_pretrained(base, folder)` then gives the same outputs; `base` is the network without adapters.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"{folder} is a file; give the name of a folder for the adapter")
    layers, whole = adapted_layers(net), _trained_modules(net)
    if not layers:
        raise ModelError("the network has no adapters to save; make some: Population(net, canonical=lora(...), k=4)")
    _refuse_what_peft_cannot_hold(layers, whole)
    first = next(iter(layers.values()))
    tensors = {
        _PREFIX + name: value
        for layer, adapter in layers.items()
        for name, value in _factors_as_in_peft(layer, adapter)
    }
    for module in whole:
        values = net.get_submodule(module).state_dict()
        tensors |= {f"{_PREFIX}{module}.{name}": value for name, value in values.items()}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "target_modules": "|".join(map(re.escape, layers)),  # a pattern for whole names: a list is for endings of names
        "modules_to_save": whole or None,
        "inference_mode": True,
    }
    make_folder(folder)
    write_bytes(folder / WEIGHTS, _package_bytes(tensors))
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return folder


def _factors_as_in_peft(name: str, layer: AdaptedLayer) -> list[tuple[str, Tensor]]:
    """A and B with their names. Of an embedding A is the transpose of what torch calls the weight."""
    down, up = layer.down.weight, layer.up.weight
    if isinstance(layer.base, nn.Embedding):
        return [(f"{name}.lora_embedding_A", down.T), (f"{name}.lora_embedding_B", up)]
    return [(f"{name}.lora_A.weight", down), (f"{name}.lora_B.weight", up)]


def _trained_modules(net: nn.Module) -> list[str]:
    """The innermost modules with trained parameters that are no part of an adapter."""
    adapters = tuple(f"{name}." for name in adapted_layers(net))
    trained = [n for n, p in net.named_parameters() if p.requires_grad and not (adapters and n.startswith(adapters))]
    if loose := [name for name in trained if "." not in name]:
        raise ModelError(
            f"the trained parameter {loose[0]!r} belongs to the network itself, and peft saves whole modules; put it "
            f"into a submodule, or save the model: fitted.model(client).state_dict()"
        )
    return sorted({name.rpartition(".")[0] for name in trained})


def _refuse_what_peft_cannot_hold(layers: dict[str, AdaptedLayer], whole: list[str]) -> None:
    for name, layer in layers.items():
        base: Any = layer.base
        if hasattr(base, "dilation") and (set(base.dilation) != {1} or base.padding_mode != "zeros"):
            raise ModelError(
                f"{name!r} is a convolution with dilation {base.dilation} and {base.padding_mode} padding, and the "
                f"adapters of peft have neither; save the model instead: fitted.model(client).state_dict()"
            )
        if clash := [module for module in whole if re.match(rf"(^|.*\.){re.escape(module)}($|\..*)", name)]:
            raise ModelError(
                f"peft takes the adapter {name!r} for a part of {clash[0]!r}, which was trained as a whole; give the "
                f"modules other names, or save the model: fitted.model(client).state_dict()"
            )


def _package_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as the safetensors package writes them, for other programs."""
    # clones, as it refuses tensors that share memory
    copies = {name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for name, leaf in tensors.items()}
    return bytes(safetensors.torch.save(copies, {"format": "pt"}))
