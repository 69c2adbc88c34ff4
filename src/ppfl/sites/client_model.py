"""One client's personal model as a plain nn.Module, to be used without ppfl's engines: saved, served, exported."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.adapters import merge_adapters_
from ..core.losses import Loss
from ..core.population import Mixture, Models, Networks, Population
from ..core.trees import Params, weighted_sum


def client_model(population: Population, models: Models, *, predictions: bool, merge: bool = True) -> nn.Module:
    """The model of the one client that `models` has, in evaluation mode.

    The network as it was given to the population, with the client's weights, wherever one network will do. Outputs of
    a nonlinear part, and predictions, cannot be mixed in one set of weights: the module then holds K models.

    It returns what the network returns, an output before the link (logits for a classifier); with mix="predictions"
    there is no such output, and it returns predictions. `predictions`: it always returns predictions.

    merge: low-rank adapters are added to the weights of their layers, which are then plain layers again.

    >>> population = Population(nn.Linear(4, 3), k=2, mix="weights")
    >>> shared = population.initial_models(seed=0, distinct=True)
    >>> client_model(population, Mixture(shared, torch.tensor([[0.3, 0.7]])), predictions=False)
    Linear(in_features=4, out_features=3, bias=True)
    """
    if not isinstance(models, Mixture):
        values = {name: leaf[0] for name, leaf in models.values.items()} if isinstance(models, Networks) else None
        net = network_with(population, models.values if values is None else values)
    elif population.mix.name == "predictions":
        each = [network_with(population, theta) for theta in _split_models(population, models.models)]
        mixture = MixtureOfPredictions(each, models.memberships[0], population.loss).eval()
        return merge_adapters_(mixture) if merge else mixture
    elif population.collapses or models.memberships.shape[1] == 1:
        c = models.memberships[0]
        common, canonical = population.split(models.models)
        mixed = {name: weighted_sum(c, theta) for name, theta in canonical.items()}
        net = network_with(population, {**common, **mixed})
    else:
        net = _with_mixed_outputs(population, models)
    if merge:
        merge_adapters_(net)
    return PredictionModel(net, population.loss).eval() if predictions else net.eval()


class PredictionModel(nn.Module):
    """A network whose outputs become predictions: probabilities for a classifier, rates for counts."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss.inverse_link(self.network(x))


class MixtureOfPredictions(nn.Module):
    """Eq. (7): the mean of what K networks predict, weighted by a membership."""

    membership: Tensor

    def __init__(self, networks: Sequence[nn.Module], membership: Tensor, loss: Loss) -> None:
        super().__init__()
        self.networks, self.loss = nn.ModuleList(networks), loss
        self.register_buffer("membership", membership.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return weighted_sum(self.membership, torch.stack([self.loss.inverse_link(net(x)) for net in self.networks]))


class MixtureOfOutputs(nn.Module):
    """Fig. 2a: the mean of the outputs of K copies of a part of a network, weighted by a membership."""

    membership: Tensor

    def __init__(self, parts: Sequence[nn.Module], membership: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("membership", membership.detach().clone())

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return weighted_sum(self.membership, torch.stack([part(x, *more) for part in self.parts]))


def network_with(population: Population, values: Params) -> nn.Module:
    """The network as it was given, with these values of its trained parameters, on their device."""
    device = next(iter(values.values())).device
    net = copy.deepcopy(population.architecture).to(device)
    for name, parameter in net.named_parameters():
        if name in values:
            parameter.data = values[name].detach().clone()
    return net


def _split_models(population: Population, models: Params) -> list[Params]:
    """The K models one by one."""
    common, canonical = population.split(models)
    k = len(next(iter(canonical.values())))
    return [{**common, **{name: theta[at] for name, theta in canonical.items()}} for at in range(k)]


def _with_mixed_outputs(population: Population, mixture: Mixture) -> nn.Module:
    """The network with every canonical part in K copies, whose outputs are mixed where they stand."""
    nets = [network_with(population, theta) for theta in _split_models(population, mixture.models)]
    c, net = mixture.memberships[0], nets[0]
    if population.canonical_modules == ("",):
        return MixtureOfOutputs(nets, c)
    for path in population.canonical_modules:
        parent, _, name = path.rpartition(".")
        parts = [other.get_submodule(path) for other in nets]
        setattr(net.get_submodule(parent), name, MixtureOfOutputs(parts, c))
    return net
