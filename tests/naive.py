"""Algorithms 1 and O1, Local and FedAvg again, written straight from the pseudocode with one client, one model and
one sample batch at a time, torch.optim and plain autograd. Slow, and as plain as can be: what the product must
agree with. Only the draws (which batch, which block, who takes part) are shared with it."""

import copy

import torch
from ppfl.algorithms.batches import LocalData, id_keys
from torch import nn

from ppfl.core.draws import uniform


class NaivePopulation:
    """K copies of a network, and clients' predictions by each way of mixing."""

    def __init__(self, net, k, mix, shared):
        self.mix, self.nets = mix, [copy.deepcopy(net) for _ in range(k)]
        with torch.no_grad():
            for i, one in enumerate(self.nets):
                for name, parameter in one.named_parameters():
                    parameter.copy_(shared.canonical[name][i])

    def loss(self, c, x, y):
        if self.mix == "outputs":
            mixed = sum(c[k] * net(x) for k, net in enumerate(self.nets))
            return nn.functional.cross_entropy(mixed, y)
        if self.mix == "predictions":
            mixed = sum(c[k] * net(x).softmax(1) for k, net in enumerate(self.nets))
            return -mixed[torch.arange(len(y)), y].log().mean()
        names = [name for name, _ in self.nets[0].named_parameters()]
        weights = {
            name: sum(c[k] * dict(net.named_parameters())[name] for k, net in enumerate(self.nets)) for name in names
        }
        return nn.functional.cross_entropy(torch.func.functional_call(self.nets[0], weights, (x,)), y)

    def parameters(self):
        return [p for net in self.nets for p in net.parameters()]


def batches_of(federation, client, settings, seed, round):
    """The batches the product draws for one client, as (x, y) without padding."""
    data = LocalData(federation.train, federation.weights, id_keys(federation.ids), torch.tensor([client]), seed, round)
    for batch in settings.batches(data):
        real = batch.share[0] > 0
        yield batch.x[0][real], batch.y[0][real]


def local_sgd(model, loss, batches, lr, settings):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    for x, y in batches:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


def average(models, weights):
    """sum_i w_i theta_i / sum_i w_i, parameter by parameter, into a new model."""
    mean = copy.deepcopy(models[0])
    total = sum(weights)
    with torch.no_grad():
        for into, *values in zip(mean.parameters(), *(m.parameters() for m in models), strict=True):
            into.copy_(sum(w / total * v for w, v in zip(weights, values, strict=True)))
    return mean


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


def ppfl(federation, net, k, mix, settings, W, shared, rounds, seed, lr_factor):
    """Both algorithms: order "random" is Algorithm 1, "alternating" is Algorithm O1. Returns nets and C."""
    M, p = federation.n_clients, federation.weights.to(federation.train.x.dtype)
    population, k_models = NaivePopulation(net, k, mix, shared), k
    C = torch.full((M, k), 1.0 / k, dtype=federation.train.x.dtype)
    for t in range(rounds):
        both = settings.order == "alternating"
        theta_block = both or float(uniform(seed, "block", t)) < settings.block_probability
        D = torch.diag(W.sum(1))
        pull = 2 * settings.penalty * (D - W) @ C
        if both or not theta_block:
            new_C = C.clone()
            for i in range(M):
                own = federation.client(federation.ids[i])["train"]
                new_C[i] = membership_step(
                    population, C[i], own.x, own.y, p[i], pull[i], settings.membership_lr,
                    settings.membership_scale == "own",
                )  # fmt: skip
            C = new_C
        if theta_block:
            # as written, or each client with steps lr / |c|^2 of which |c|^2 counts, over the members of a model
            norms = (C**2).sum(1) if settings.averaging == "members" else torch.ones(M)
            results = []
            for i in range(M):
                mine = copy.deepcopy(population)

                def loss(x, y, mine=mine, i=i):
                    return mine.loss(C[i], x, y)

                lr = settings.lr * lr_factor(t) / float(norms[i])
                local_sgd(mine, loss, batches_of(federation, i, settings, seed, t), lr, settings)
                results.append(mine)
            before, population = population, average(results, p * norms)
            if settings.averaging == "members":
                for k in range(k_models):
                    with torch.no_grad():
                        for new, old in zip(population.nets[k].parameters(), before.nets[k].parameters(), strict=True):
                            new.copy_(old + (new - old) * (p @ norms) / (p @ C[:, k]))
    return population, C


def train_network(model, federation, client, settings, seed, t, lr_factor):
    """One client's local round of an ordinary network, in place."""
    local_sgd(
        model,
        lambda x, y: nn.functional.cross_entropy(model(x), y),
        batches_of(federation, client, settings, seed, t),
        settings.lr * lr_factor(t),
        settings,
    )
    return model


def fedavg(federation, net, settings, rounds, seed, lr_factor):
    model, clients = copy.deepcopy(net), range(federation.n_clients)
    for t in range(rounds):
        results = [train_network(copy.deepcopy(model), federation, i, settings, seed, t, lr_factor) for i in clients]
        model = average(results, federation.weights.to(federation.train.x.dtype))
    return model


def local(federation, net, settings, rounds, seed, lr_factor):
    models = [copy.deepcopy(net) for _ in range(federation.n_clients)]
    for t in range(rounds):
        for i, mine in enumerate(models):
            train_network(mine, federation, i, settings, seed, t, lr_factor)
    return models
