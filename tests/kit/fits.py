"""Networks built again from files, files of fits with other contents, and the search for a membership."""

import torch

from ppfl.algorithms.local.memberships import best_memberships
from ppfl.core import simplex
from ppfl.core.simplex import minimize_on_simplex
from ppfl.io.codec import dump, load
from ppfl.networks.description import describe_network, network_from
from ppfl.runs.saved_fit import KIND


def built_again(net):
    """The network as `ppfl.load` makes it where no code is passed; None where it needs the code."""
    description = describe_network(net)
    if description is None:
        return None
    again = network_from(description)
    again.load_state_dict(net.state_dict())
    return again


def change_saved(path, population, **changes):
    """Let the file of a fit say something else of its population and beside, with a digest that is right."""
    content = load(path, KIND)
    about = content["about"]
    content["about"] = about | changes | {"population": about["population"] | population}
    with path.open("wb") as file:
        dump(content, file, KIND)


def quadratic_loss(H, f):
    """c'Hc / 2 + f'c and its slopes, in the precision of c (M, K)."""

    def loss_at(c):
        slope = (H.to(c) @ c[:, :, None])[:, :, 0] + f.to(c)
        return slope, (c * (slope + f.to(c))).sum(1) / 2

    return loss_at


def quadratic_minima(H, f):
    """The losses (M,) on the simplex where the search for a newcomer's membership ends, and at their minimum."""
    loss_at, even = quadratic_loss(H, f), torch.full_like(f, 1 / f.shape[1])
    found, _ = best_memberships(loss_at, even, 500)
    return loss_at(found)[1], loss_at(minimize_on_simplex(H, f, even))[1]


def quadratic_gaps(H, f):
    """<c, g> - min_k g_k relative to 1 + loss, (M,), where the search ends: at most so far are losses from minima."""
    loss_at = quadratic_loss(H.double(), f.double())
    found, _ = best_memberships(quadratic_loss(H, f), torch.full_like(f, 1 / f.shape[1]), 500)
    g, loss = loss_at(found.double())
    return ((found.double() - simplex.FLOOR) * (g - g.amin(1, keepdim=True))).sum(1) / (1 + loss.abs())
