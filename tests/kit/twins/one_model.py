"""Centralized SGD, FedProx, FedOpt and SCAFFOLD again, straight from their papers' pseudocode: one client at a time, by
torch.optim and plain autograd. Only the draws (which batch, who takes part) are shared with the package."""

import copy

import torch

from kit.twins.ppfl import average, batches_of, cross_entropy, descend, sgd, train_network, weights_of


def centralized(federation, net, settings, rounds, seed, lr_of, clients_of):
    """torch.optim.SGD on the weighted loss of everyone's batches together."""
    model = copy.deepcopy(net)
    optimizer = sgd(model, 1.0, settings)
    for t in range(rounds):
        who = clients_of(t)
        p = weights_of(federation)[who]
        optimizer.param_groups[0]["lr"] = lr_of(t)
        optimizer.zero_grad()
        for weight, i in zip(p / p.sum(), who, strict=True):
            ((x, y),) = batches_of(federation, i, settings, seed, t)
            (weight * cross_entropy(model, x, y)).backward()
        optimizer.step()
    return model


def squared_distance(model, anchor):
    pairs = zip(model.parameters(), anchor.parameters(), strict=True)
    return sum((p - a.detach()).square().sum() for p, a in pairs)


def descend_near(model, anchor, batches, lr, settings):
    """SGD on f + mu/2 |v - anchor|^2, in place."""

    def loss(x, y):
        return cross_entropy(model, x, y) + settings.mu / 2 * squared_distance(model, anchor)

    return descend(model, loss, batches, lr, settings)


def fedprox(federation, net, settings, rounds, seed, lr_of, clients_of):
    """Algorithm 2 of Li et al. (2020), clients weighted by p_i."""
    w, p = copy.deepcopy(net), weights_of(federation)
    for t in range(rounds):
        who = clients_of(t)
        ends = [
            descend_near(copy.deepcopy(w), w, batches_of(federation, i, settings, seed, t), lr_of(t), settings)
            for i in who
        ]
        w = average(ends, p[who])
    return w


def scaffold(federation, net, settings, rounds, seed, lr_of, clients_of):
    """Algorithm 1 of Karimireddy et al. (2020) with option II, clients weighted by p_i. Returns x, c and all c_i.

    Parameters are lists of tensors here. Weight decay is part of the loss: f_i(y) + weight_decay/2 |y|^2.
    """
    net, p = copy.deepcopy(net), weights_of(federation)
    x = [parameter.detach().clone() for parameter in net.parameters()]
    c = [torch.zeros_like(value) for value in x]
    c_i = [[torch.zeros_like(value) for value in x] for _ in federation.ids]
    for t in range(rounds):
        who, lr, y_changes, c_changes = clients_of(t), lr_of(t), [], []
        for i in who:
            y, steps = [value.clone() for value in x], 0
            for batch in batches_of(federation, i, settings, seed, t):
                with torch.no_grad():
                    for parameter, value in zip(net.parameters(), y, strict=True):
                        parameter.copy_(value)
                loss = cross_entropy(net, *batch)
                loss = loss + settings.weight_decay / 2 * sum(q.square().sum() for q in net.parameters())
                g = torch.autograd.grad(loss, list(net.parameters()))
                y = [y_ - lr * (g_ - own + c_) for y_, g_, own, c_ in zip(y, g, c_i[i], c, strict=True)]
                steps += 1
            new = [own - c_ + (x_ - y_) / (steps * lr) for own, c_, x_, y_ in zip(c_i[i], c, x, y, strict=True)]
            y_changes.append([y_ - x_ for y_, x_ in zip(y, x, strict=True)])
            c_changes.append([a - b for a, b in zip(new, c_i[i], strict=True)])
            c_i[i] = new
        share = p[who] / p[who].sum()
        for at in range(len(x)):
            x[at] = x[at] + settings.server_lr * sum(w * d[at] for w, d in zip(share, y_changes, strict=True))
            c[at] = c[at] + sum(w * d[at] for w, d in zip(p[who], c_changes, strict=True))
    return x, c, c_i


def fedopt(federation, net, settings, rounds, seed, lr_of, clients_of):
    """Algorithm 2 of Reddi et al. (2021), number by number, clients weighted by p_i. Returns x, m and v, lists of
    tensors."""
    p, eta, tau, beta1 = weights_of(federation), settings.server_lr, settings.tau, settings.beta1
    x = [parameter.detach().clone() for parameter in net.parameters()]
    m, v = [torch.zeros_like(value) for value in x], [torch.full_like(value, tau**2) for value in x]
    for t in range(rounds):
        for at, delta in enumerate(mean_changes(federation, net, x, settings, seed, t, lr_of(t), clients_of(t), p)):
            for j, d in enumerate(delta.flatten().tolist()):
                old = float(v[at].view(-1)[j])
                if settings.name == "fedadagrad":
                    new = old + d**2
                elif settings.name == "fedadam":
                    new = settings.beta2 * old + (1 - settings.beta2) * d**2
                else:
                    sign = (old > d**2) - (old < d**2)
                    new = old - (1 - settings.beta2) * d**2 * sign
                first = beta1 * float(m[at].view(-1)[j]) + (1 - beta1) * d
                m[at].view(-1)[j], v[at].view(-1)[j] = first, new
                x[at].view(-1)[j] += eta * first / (new**0.5 + tau)
    return x, m, v


def fedopt_by_torch(federation, net, settings, rounds, seed, lr_of, clients_of, optimizer_of):
    """Algorithm 1 of Reddi et al. (2021): the server's optimizer is one of torch.optim, on the pseudo-gradient."""
    p = weights_of(federation)
    x = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = optimizer_of(x)
    for t in range(rounds):
        changes = mean_changes(federation, net, x, settings, seed, t, lr_of(t), clients_of(t), p)
        for value, delta in zip(x, changes, strict=True):
            value.grad = -delta
        optimizer.step()
    return x


def mean_changes(federation, net, x, settings, seed, t, lr, who, p):
    """sum_i p_i (x_i - x) / sum_i p_i after a round of local SGD from x, one tensor per parameter."""
    model = copy.deepcopy(net)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), x, strict=True):
            parameter.copy_(value)
    ends = [train_network(copy.deepcopy(model), federation, i, settings, seed, t, lr) for i in who]
    mean = average(ends, p[who])
    return [end.detach() - value for end, value in zip(mean.parameters(), x, strict=True)]
