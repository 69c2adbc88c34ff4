"""One client, one network and one batch at a time, by torch.optim. Only the draws are shared with the package."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from kit.local_work import local_data
from kit.training import positions_of


class Given:
    """What the pseudocode of a method starts from."""

    def __init__(self, federation, problem, method):
        self.federation, self.problem, self.method, self.seed = federation, problem, method, problem.seed
        self.clients, self.rounds = range(federation.n_clients), range(problem.rounds)
        self.p = weights_of(federation)

    @property
    def net(self):
        """A fresh copy of the network."""
        return copy.deepcopy(self.problem.population.net)

    def model(self, models, k):
        """The parameters of the k-th network; in `models` those of the canonical part have a leading dimension K."""
        canonical = self.problem.population.canonical_names
        return {name: value[k] if name in canonical else value for name, value in models.items()}

    def networks(self, models):
        """K networks with these parameters."""
        found = [self.net for _ in range(self.problem.population.k)]
        for k, net in enumerate(found):
            net.load_state_dict(self.model(models, k))
        return found

    def lr(self, t):
        return self.method.local.step_size(t, len(self.rounds))

    def taking_part(self, t):
        return positions_of(self.problem, self.method, t)

    def batches(self, client, t):
        return batches_of(self.federation, client, self.method, self.seed, t)

    def train(self, model, client, t):
        """Local SGD of one client, in place."""
        return train_network(model, self.federation, client, self.method, self.seed, t, self.lr(t))


class Outcome(NamedTuple):
    """Every client's network, or K networks and every client's membership."""

    networks: list[nn.Module]
    memberships: Tensor | None = None  # (M, K)


def batches_of(federation, client, settings, seed, round, purpose="theta"):
    """The batches that one client draws in a round, as (x, y) without padding."""
    epochs, steps = settings.local_epochs or (None if settings.local_steps else 1), settings.local_steps
    data = local_data(federation, [client], seed=seed, round=round)
    for batch in data.steps(settings.batch_size, epochs, steps, purpose):
        real = batch.share[0] > 0
        yield batch.x[0][real], batch.y[0][real]


def weights_of(federation):
    """p_i, (M,)."""
    return (federation.importance / federation.importance.sum()).float().to(federation.train.x.dtype)


def descend(model, loss, batches, lr, settings, parameters=None):
    """Local SGD on loss(x, y), in place; of these parameters alone where some are given."""
    moving = parameters or model.parameters()
    optimizer = torch.optim.SGD(moving, lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    for x, y in batches:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    return model


def train_network(model, federation, client, settings, seed, t, lr, parameters=None, purpose="theta"):
    """One client's local round of an ordinary network, in place."""
    batches = batches_of(federation, client, settings, seed, t, purpose)
    return descend(model, lambda x, y: cross_entropy(model(x), y), batches, lr, settings, parameters)


def average(models, weights):
    """sum_i w_i theta_i / sum_i w_i, as a new model."""
    mean = sum(w * vector(model) for w, model in zip(weights, models, strict=True)) / sum(weights)
    return with_values(copy.deepcopy(models[0]), mean)


def vector(model):
    """All parameters in one row."""
    return parameters_to_vector(model.parameters()).detach()


def with_values(model, values):
    """The model, with this row of parameters written into it."""
    vector_to_parameters(values, model.parameters())
    return model
