"""Networks written down and built again, files of saved fits with other contents, and the search for a membership."""

import torch

from ppfl.algorithms.local.memberships import best_memberships
from ppfl.core.simplex_program import minimize_on_simplex
from ppfl.runs.network_description import build_network, describe_network
from ppfl.runs.storage import read_tensors, save_tree


def built_again(net):
    """The network as `ppfl.load` makes it where no code is passed; None where it needs the code."""
    description = describe_network(net)
    if description is None:
        return None
    again = build_network(description)
    again.load_state_dict(net.state_dict())
    return again


def read_saved(path):
    """What a saved fit says beside its tensors."""
    return read_tensors(path)[1]


def rewrite_saved(path, about):
    """Let the file say this instead, with a checksum that is right."""
    save_tree(path, read_tensors(path)[0], about)


def quadratic_minima(H, f):
    """c'Hc / 2 + f'c on the simplex, (M,), where the search for a newcomer's membership ends, and at its minimum."""

    def loss_at(c):
        slope = (H @ c[:, :, None])[:, :, 0] + f
        return slope, (c * (slope + f)).sum(1) / 2

    even = torch.full_like(f, 1 / f.shape[1])
    found, _ = best_memberships(loss_at, even, 500)
    return loss_at(found)[1], loss_at(minimize_on_simplex(H, f, even))[1]
