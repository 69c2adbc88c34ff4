"""Networks written down and built again, and files of saved fits with other contents."""

from pathlib import Path
from typing import Any

from torch import nn

from ppfl.runs.network_description import build_network, describe_network
from ppfl.runs.storage import read_tensors, save_tree


def built_again(net: nn.Module) -> nn.Module | None:
    """The network as `ppfl.load` makes it where no code is passed, with the same values; None where it needs the code.

    The description goes into the file of a fit; this is quicker than to save one.
    """
    description = describe_network(net)
    if description is None:
        return None
    again = build_network(description)
    again.load_state_dict(net.state_dict())
    return again


def read_saved(path: Path) -> dict[str, Any]:
    """What a saved fit says beside its tensors."""
    return read_tensors(path)[1]


def rewrite_saved(path: Path, about: dict[str, Any]) -> Path:
    """Let the file say this instead, with a checksum that is right."""
    return save_tree(path, read_tensors(path)[0], about) or path
