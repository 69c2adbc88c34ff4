"""FedSim and FedAlt again, from the pseudocode of Pillutla et al. (2022): one client at a time, torch.optim, plain
autograd. u is what the server holds, v[i] what client i holds; both are parameters by name."""

import copy

import torch

from kit.twins.ppfl import batches_of, cross_entropy, weights_of


def values(model, names):
    return {name: p.detach().clone() for name, p in model.named_parameters() if name in names}


def train_part(model, names, federation, client, settings, seed, t, lr):
    """Local SGD on the named parameters with the others fixed, in place."""
    moving = [p for name, p in model.named_parameters() if name in names]
    optimizer = torch.optim.SGD(moving, lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    for x, y in batches_of(federation, client, settings, seed, t):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


def federated(train_client, federation, net, personal, rounds, clients_of):
    """The server's side, which both methods share: sends u, gets u_i, takes the mean weighted by p_i."""
    everything = {name for name, _ in net.named_parameters()}
    p = weights_of(federation)
    u, v = values(net, everything - personal), [values(net, personal) for _ in federation.ids]
    for t in range(rounds):
        received = []
        for i in clients_of(t):
            model = copy.deepcopy(net)
            model.load_state_dict({**u, **v[i]})
            train_client(model, i, t)
            v[i] = values(model, personal)
            received.append((p[i], values(model, everything - personal)))
        total = sum(weight for weight, _ in received)
        u = {name: sum(weight * u_i[name] for weight, u_i in received) / total for name in u}
    return u, v


def fedsim(federation, net, personal, method, rounds, seed, lr_of, clients_of):
    everything = {name for name, _ in net.named_parameters()}

    def train_client(model, i, t):
        train_part(model, everything, federation, i, method, seed, t, lr_of(t))

    return federated(train_client, federation, net, personal, rounds, clients_of)


def fedalt(federation, net, personal, method, personal_training, rounds, seed, lr_of, clients_of):
    everything = {name for name, _ in net.named_parameters()}

    def train_client(model, i, t):
        train_part(model, personal, federation, i, personal_training, seed, t, lr_of(t))
        train_part(model, everything - personal, federation, i, method, seed, t, lr_of(t))

    return federated(train_client, federation, net, personal, rounds, clients_of)
