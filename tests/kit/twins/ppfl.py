"""PPFL, FedAvg and Local again, written straight from the pseudocode: one client, one model and one batch at a time, by
torch.optim and plain autograd. Slow, and as plain as can be: what the package must agree with. Only the draws (which
batch, which block, who takes part) are shared with it.

`lr_of(t)` is the step size of round t, `clients_of(t)` the positions of the clients that take part in it.
"""

import copy

import torch
from torch import nn

from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.algorithms.ppfl_blocks import LEAST_SHARE
from ppfl.core.draws import name_keys, uniform
from ppfl.core.workspace import Workspace

# ---------------------------------------------------------------------- what all of them need


def batches_of(federation, client, settings, seed, round):
    """The batches that one client draws in a round, as (x, y) without padding."""
    at = torch.tensor([client])
    data = LocalData(
        federation.train, weights_of(federation)[at], name_keys(federation.ids)[at], at, Draws(seed, round), Workspace()
    )
    for batch in settings.batches(data):
        real = batch.share[0] > 0
        yield batch.x[0][real], batch.y[0][real]


def data_of(federation, client):
    """A client's training samples."""
    return federation.train.client(client)


def weights_of(federation):
    """p_i, (M,)."""
    return (federation.importance / federation.importance.sum()).float().to(federation.train.x.dtype)


def sgd(model, lr, settings):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def descend(model, loss, batches, lr, settings):
    """Local SGD on loss(x, y), in place."""
    optimizer = sgd(model, lr, settings)
    for x, y in batches:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    return model


def cross_entropy(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def train_network(model, federation, client, settings, seed, t, lr):
    """One client's local round of an ordinary network, in place."""
    batches = batches_of(federation, client, settings, seed, t)
    return descend(model, lambda x, y: cross_entropy(model, x, y), batches, lr, settings)


def average(models, weights):
    """sum_i w_i theta_i / sum_i w_i, parameter by parameter, as a new model."""
    mean, total = copy.deepcopy(models[0]), sum(weights)
    with torch.no_grad():
        for into, *values in zip(mean.parameters(), *(m.parameters() for m in models), strict=True):
            into.copy_(sum(w / total * v for w, v in zip(weights, values, strict=True)))
    return mean


# ---------------------------------------------------------------------- one model for all, one for each


def fedavg(federation, net, settings, rounds, seed, lr_of, clients_of):
    model, p = copy.deepcopy(net), weights_of(federation)
    for t in range(rounds):
        who = clients_of(t)
        ends = [train_network(copy.deepcopy(model), federation, i, settings, seed, t, lr_of(t)) for i in who]
        model = average(ends, p[who])
    return model


def local(federation, net, settings, rounds, seed, lr_of):
    models = [copy.deepcopy(net) for _ in federation.ids]
    for t in range(rounds):
        for i, mine in enumerate(models):
            train_network(mine, federation, i, settings, seed, t, lr_of(t))
    return models


# ---------------------------------------------------------------------- PPFL


class NaivePopulation:
    """K networks with common layers that are one and the same, and a client's loss by each way of mixing."""

    def __init__(self, net, k, mix, models, canonical):
        """models: values by name, those whose names are `canonical` with a leading dimension K."""
        self.mix, self.canonical, self.nets = mix, canonical, [copy.deepcopy(net) for _ in range(k)]
        with torch.no_grad():
            for i, one in enumerate(self.nets):
                for name, parameter in one.named_parameters():
                    parameter.copy_(models[name][i] if name in canonical else models[name])
        first = dict(self.nets[0].named_parameters())
        for other in self.nets[1:]:
            for name in first.keys() - canonical:
                module, _, parameter = name.rpartition(".")
                setattr(other.get_submodule(module), parameter, first[name])

    def loss(self, c, x, y):
        if self.mix == "outputs":
            return nn.functional.cross_entropy(sum(c[k] * net(x) for k, net in enumerate(self.nets)), y)
        if self.mix == "predictions":
            mixed = sum(c[k] * net(x).softmax(1) for k, net in enumerate(self.nets))
            return -mixed[torch.arange(len(y)), y].log().mean()
        each = [dict(net.named_parameters()) for net in self.nets]
        mixed = {
            name: sum(c[k] * one[name] for k, one in enumerate(each)) if name in self.canonical else value
            for name, value in each[0].items()
        }
        return nn.functional.cross_entropy(torch.func.functional_call(self.nets[0], mixed, (x,)), y)

    def common_parameters(self):
        return [p for name, p in self.nets[0].named_parameters() if name not in self.canonical]

    def canonical_parameters(self, k):
        """Of theta_k."""
        return [p for name, p in self.nets[k].named_parameters() if name in self.canonical]

    def parameters(self):
        return self.common_parameters() + [p for k in range(len(self.nets)) for p in self.canonical_parameters(k)]


def membership_step(population, c, x, y, p, pull, eta, scale_by_own_weight):
    """Eq. (16), as written or with the step eta / p_i; entries kept above the floor of 1e-6."""
    c = c.clone().requires_grad_()
    (slope,) = torch.autograd.grad(population.loss(c, x, y), c)
    G = p * slope + pull
    if scale_by_own_weight:
        G = G / p
    new = c.detach() * torch.exp(-eta * G)
    new = new / new.sum()
    above = (new - 1e-6).clamp_min(0)
    return 1e-6 + above * (1 - len(c) * 1e-6) / above.sum()


def descend_at_own_pace(population, c, batches, lr, settings, gradients=True):
    """Local SGD whose gradients for the canonical models are over |c|^2; without `gradients` weight decay alone."""
    optimizer = sgd(population, lr, settings)
    for x, y in batches:
        optimizer.zero_grad()
        population.loss(c, x, y).backward()
        for k in range(len(population.nets)):
            for parameter in population.canonical_parameters(k):
                parameter.grad /= float((c**2).sum())
        if not gradients:
            for parameter in population.parameters():
                parameter.grad.zero_()
        optimizer.step()
    return population


def mean_over_members(before, ends, decayed, c, p):
    """The next population: theta_k over the members of model k, the common part over everyone.

    What a client's gradients did to theta_k counts |c_i|^2, what weight decay did counts c_ik, over sum_i p_i c_ik; a
    model that hardly anyone uses counts as if it had a tenth of an even share.
    """
    new = average(ends, p)
    with torch.no_grad():
        for k in range(len(before.nets)):
            members = max(float(p @ c[:, k]), LEAST_SHARE / len(before.nets) * float(p.sum()))
            columns = zip(
                new.canonical_parameters(k),
                before.canonical_parameters(k),
                *(one.canonical_parameters(k) for one in (*ends, *decayed)),
                strict=True,
            )
            for into, start, *values in columns:
                end, left = values[: len(ends)], values[len(ends) :]
                moves = (
                    p[i] * ((c[i] ** 2).sum() * (end[i] - left[i]) + c[i, k] * (left[i] - start)) for i in range(len(p))
                )
                into.copy_(start + sum(moves) / members)
    return new


def ppfl(federation, population, settings, W, rounds, seed, lr_of, clients_of):
    """Both algorithms: order "random" is Algorithm 1, "alternating" is Algorithm O1. Returns the models and C."""
    M, K, p = federation.n_clients, len(population.nets), weights_of(federation)
    C = torch.full((M, K), 1.0 / K, dtype=federation.train.x.dtype)
    L = torch.diag(W.sum(1)) - W
    for t in range(rounds):
        who = clients_of(t)
        both = settings.order == "alternating"
        theta_block = both or float(uniform(seed, "block", t)) < settings.block_probability
        if both or not theta_block:
            pull, before = 2 * settings.penalty * L @ C, C.clone()
            for i in who:
                own = data_of(federation, i)
                C[i] = membership_step(
                    population, before[i], own.x, own.y, p[i], pull[i], settings.membership_lr,
                    settings.membership_scale == "own",
                )  # fmt: skip
        if not theta_block:
            continue
        ends, decayed = [], []
        for i in who:
            if settings.averaging == "everyone":
                mine = copy.deepcopy(population)
                batches = batches_of(federation, i, settings, seed, t)
                ends.append(descend(mine, lambda x, y, m=mine, c=C[i]: m.loss(c, x, y), batches, lr_of(t), settings))
                continue
            for into, gradients in ((ends, True), (decayed, False)):
                batches = batches_of(federation, i, settings, seed, t)
                mine = copy.deepcopy(population)
                into.append(descend_at_own_pace(mine, C[i], batches, lr_of(t), settings, gradients))
        if settings.averaging == "everyone":
            population = average(ends, p[who])
        else:
            population = mean_over_members(population, ends, decayed, C[who], p[who])
    return population, C
