"""Methods with one model for all, and Local, from their papers' pseudocode; clients are weighted by p_i."""

import copy

import torch
from torch.nn.functional import cross_entropy

from kit.twins.plain import Outcome, average, descend, vector, with_values
from ppfl.algorithms.server_optimizers import OPTIMIZERS


def local(given):
    models = [given.net for _ in given.clients]
    for t in given.rounds:
        for i, mine in enumerate(models):
            given.train(mine, i, t)
    return Outcome(models)


def pooled(given):
    """torch.optim.SGD on the weighted loss of everyone's batches together."""
    model, settings = given.net, given.method
    momentum = settings.server_optimizer.momentum
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum, weight_decay=settings.weight_decay)
    for t in given.rounds:
        who = given.taking_part(t)
        optimizer.zero_grad()
        for weight, i in zip(given.p[who] / given.p[who].sum(), who, strict=True):
            ((x, y),) = given.batches(i, t)
            (weight * cross_entropy(model(x), y)).backward()
        optimizer.step()
    return model


def federated(given, train_client, server_step=lambda w, mean: mean):
    """Clients train copies of w, and the server takes their weighted mean, or a step of its own towards it."""
    w = given.net
    for t in given.rounds:
        who = given.taking_part(t)
        ends = [train_client(copy.deepcopy(w), w, i, t) for i in who]
        w = server_step(w, average(ends, given.p[who]))
    return Outcome([w for _ in given.clients])


def fedavg(given):
    return federated(given, lambda mine, w, i, t: given.train(mine, i, t))


def descend_near(model, anchor, batches, lr, settings):
    """SGD on f + mu/2 |v - anchor|^2, in place."""

    def loss(x, y):
        pairs = zip(model.parameters(), anchor.parameters(), strict=True)
        distance = sum((p - a.detach()).square().sum() for p, a in pairs)
        return cross_entropy(model(x), y) + settings.mu / 2 * distance

    return descend(model, loss, batches, lr, settings)


def fedprox(given):
    """Algorithm 2 of Li et al. (2020)."""
    return federated(given, lambda mine, w, i, t: descend_near(mine, w, given.batches(i, t), given.lr(t), given.method))


def fedopt(given):
    """Algorithms 1 and 2 of Reddi et al. (2021)."""
    settings, m = given.method.server_optimizer, 0.0
    name = OPTIMIZERS.name_of(type(settings))
    v = 0.0 if name == "momentum" else settings.tau**2

    def server_step(w, mean):
        nonlocal m, v
        d = vector(mean) - vector(w)
        if name == "momentum":
            m = settings.momentum * m + d
            return with_values(w, vector(w) + settings.lr * m)
        m = settings.beta1 * m + (1 - settings.beta1) * d
        if name == "adagrad":
            v = v + d**2
        elif name == "adam":
            v = settings.beta2 * v + (1 - settings.beta2) * d**2
        else:
            v = v - (1 - settings.beta2) * d**2 * torch.sign(v - d**2)
        return with_values(w, vector(w) + settings.lr * m / (v**0.5 + settings.tau))

    return federated(given, lambda mine, w, i, t: given.train(mine, i, t), server_step)


def scaffold(given):
    """Algorithm 1 of Karimireddy et al. (2020) with option II, on f_i(y) + weight_decay/2 |y|^2."""
    net, p, settings = given.net, given.p, given.method
    x = vector(net)
    c, c_i = torch.zeros_like(x), [torch.zeros_like(x) for _ in given.clients]
    for t in given.rounds:
        who, lr, before, ends = given.taking_part(t), given.lr(t), c, []
        for i in who:
            y, steps = x, 0
            for features, labels in given.batches(i, t):
                loss = cross_entropy(with_values(net, y)(features), labels)
                g = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(net.parameters()))])
                y, steps = y - lr * (g + settings.weight_decay * y - c_i[i] + before), steps + 1
            new = c_i[i] - before + (x - y) / (steps * lr)
            c = c + p[i] * (new - c_i[i])
            c_i[i] = new
            ends.append(y)
        x = x + settings.server_lr * (p[who] / p[who].sum() @ torch.stack(ends) - x)
    return Outcome([with_values(net, x) for _ in given.clients])
