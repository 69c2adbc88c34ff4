"""Centralized SGD, fine-tuning, pFedMe and Ditto again, straight from their papers' pseudocode: one client at a time,
torch.optim and plain autograd. Only the draws (which batch, who takes part) are shared with the product."""

import copy

import torch
from torch import nn

import naive


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def squared_distance(model, anchor):
    pairs = zip(model.parameters(), anchor.parameters(), strict=True)
    return sum((p - a.detach()).square().sum() for p, a in pairs)


def sgd(model, lr, settings):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def weights_of(federation, who):
    return federation.weights.to(federation.train.x.dtype)[who]


def centralized(federation, net, settings, rounds, seed, lr_factor, who_of):
    """torch.optim.SGD on the weighted loss of everyone's batches together."""
    model = copy.deepcopy(net)
    optimizer = sgd(model, 1.0, settings)
    for t in range(rounds):
        who = who_of(t)
        p = weights_of(federation, who)
        optimizer.param_groups[0]["lr"] = settings.lr * lr_factor(t)
        optimizer.zero_grad()
        for weight, i in zip(p / p.sum(), who, strict=True):
            ((x, y),) = naive.batches_of(federation, i, settings, seed, t)
            (weight * loss_of(model, x, y)).backward()
        optimizer.step()
    return model


def near(model, anchor, batches, lr, settings):
    """SGD on f + mu/2 |v - anchor|^2, in place."""
    optimizer = sgd(model, lr, settings)
    for x, y in batches:
        optimizer.zero_grad()
        (loss_of(model, x, y) + settings.mu / 2 * squared_distance(model, anchor)).backward()
        optimizer.step()
    return model


def ditto(federation, net, settings, rounds, seed, lr_factor, who_of):
    w, own = copy.deepcopy(net), {}
    for t in range(rounds):
        who, lr, ends = who_of(t), settings.lr * lr_factor(t), []
        for i in who:
            ends.append(naive.train_network(copy.deepcopy(w), federation, i, settings, seed, t, lr_factor))
            v = own.get(i, copy.deepcopy(w))
            own[i] = near(v, w, naive.batches_of(federation, i, settings, seed, t), lr, settings)
        w = naive.average(ends, weights_of(federation, who))
    return w, own


def pfedme(federation, net, settings, rounds, seed, lr_factor, who_of):
    w, own = copy.deepcopy(net), {}
    for t in range(rounds):
        who, lr, ends = who_of(t), settings.lr * lr_factor(t), []
        for i in who:
            mine, theta = copy.deepcopy(w), own.get(i, copy.deepcopy(w))
            for batch in naive.batches_of(federation, i, settings, seed, t):
                near(theta, mine, [batch] * settings.inner_steps, lr, settings)
                with torch.no_grad():
                    for to, at in zip(theta.parameters(), mine.parameters(), strict=True):
                        at.sub_(settings.outer_lr * lr_factor(t) * settings.mu * (at - to))
            own[i] = theta
            ends.append(mine)
        mean = naive.average(ends, weights_of(federation, who))
        with torch.no_grad():
            for old, new in zip(w.parameters(), mean.parameters(), strict=True):
                old.copy_((1 - settings.beta) * old + settings.beta * new)
    return w, own


def finetuned(federation, start_of, batches_by, lr, seed, t):
    """Every client's network after the local run of round t from `start_of(client)`."""
    ends = []
    for i in range(federation.n_clients):
        model = copy.deepcopy(start_of(i))
        batches = naive.batches_of(federation, i, batches_by, seed, t)
        naive.local_sgd(model, lambda x, y, model=model: loss_of(model, x, y), batches, lr, batches_by)
        ends.append(model)
    return ends
