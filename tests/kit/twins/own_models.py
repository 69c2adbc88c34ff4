"""Ditto, pFedMe and fine-tuning again, straight from their papers' pseudocode: one client at a time, torch.optim and
plain autograd. Only the draws (which batch, who takes part) are shared with the package."""

import copy

import torch

from kit.twins.one_model import descend_near
from kit.twins.ppfl import average, batches_of, train_network, weights_of


def ditto(federation, net, settings, rounds, seed, lr_of, clients_of):
    """The shared model, and the own models of those who took part, by position."""
    w, own, p = copy.deepcopy(net), {}, weights_of(federation)
    for t in range(rounds):
        who, ends = clients_of(t), []
        for i in who:
            ends.append(train_network(copy.deepcopy(w), federation, i, settings, seed, t, lr_of(t)))
            v = own.get(i, copy.deepcopy(w))
            own[i] = descend_near(v, w, batches_of(federation, i, settings, seed, t), lr_of(t), settings)
        w = average(ends, p[who])
    return w, own


def pfedme(federation, net, settings, rounds, seed, lr_of, clients_of):
    """The same. The schedule of lr is that of both kinds of steps."""
    w, own, p = copy.deepcopy(net), {}, weights_of(federation)
    for t in range(rounds):
        who, ends = clients_of(t), []
        outer_lr = settings.outer_lr * lr_of(t) / settings.lr
        for i in who:
            mine, theta = copy.deepcopy(w), own.get(i, copy.deepcopy(w))
            for batch in batches_of(federation, i, settings, seed, t):
                descend_near(theta, mine, [batch] * settings.inner_steps, lr_of(t), settings)
                with torch.no_grad():
                    for to, at in zip(theta.parameters(), mine.parameters(), strict=True):
                        at.sub_(outer_lr * settings.mu * (at - to))
            own[i] = theta
            ends.append(mine)
        mean = average(ends, p[who])
        with torch.no_grad():
            for old, new in zip(w.parameters(), mean.parameters(), strict=True):
                old.copy_((1 - settings.beta) * old + settings.beta * new)
    return w, own


def finetuned(federation, start_of, settings, lr, seed, t):
    """Every client's network after the local run of round t from `start_of(client)`."""
    return [
        train_network(copy.deepcopy(start_of(i)), federation, i, settings, seed, t, lr)
        for i in range(federation.n_clients)
    ]
