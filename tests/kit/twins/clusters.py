"""IFCA, FedEM and CFL again, from their papers' pseudocode: one client, one model, one batch at a time."""

import copy
from itertools import combinations

import torch
from sklearn.cluster import AgglomerativeClustering
from torch import nn

from kit.twins.ppfl import average, batches_of, data_of, descend, train_network, weights_of


def networks(net, models):
    """K networks with the values of a population whose parts are all canonical."""
    found = [copy.deepcopy(net) for _ in next(iter(models.values()))]
    for k, one in enumerate(found):
        one.load_state_dict({name: theta[k] for name, theta in models.items()})
    return found


def losses(net, x, y):
    return nn.functional.cross_entropy(net(x), y, reduction="none")


def best_model(nets, data):
    """The number of the network with the least mean loss."""
    with torch.no_grad():
        means = [float(losses(net, data.x, data.y).mean()) for net in nets]
    return means.index(min(means))


def mean_within(nets, choice, ends, p):
    """Each cluster's network averaged over its members' ends; without members, as it was."""
    new = []
    for k, net in enumerate(nets):
        members = [i for i, chosen in enumerate(choice) if chosen == k]
        new.append(average([ends[i] for i in members], [p[i] for i in members]) if members else net)
    return new


def ifca(federation, nets, settings, rounds, seed, lr_of):
    clients, choice = range(federation.n_clients), []
    for t in range(rounds):
        choice = [best_model(nets, data_of(federation, i)) for i in clients]
        ends = [
            train_network(copy.deepcopy(nets[choice[i]]), federation, i, settings, seed, t, lr_of(t)) for i in clients
        ]
        nets = mean_within(nets, choice, ends, weights_of(federation))
    return nets, choice


def responsibilities(nets, pi, x, y):
    """(N, K)"""
    with torch.no_grad():
        joint = torch.stack([pi[k] * torch.exp(-losses(net, x, y)) for k, net in enumerate(nets)], dim=1)
    return joint / joint.sum(1, keepdim=True)


def fedem(federation, nets, settings, rounds, seed, lr_of):
    M, K, p = federation.n_clients, len(nets), weights_of(federation)
    pi = torch.full((M, K), 1 / K, dtype=federation.train.x.dtype)
    for t in range(rounds):
        new_pi, ends = pi.clone(), []
        for i in range(M):
            data = data_of(federation, i)
            new_pi[i] = responsibilities(nets, pi[i], data.x, data.y).mean(0)
            mine = copy.deepcopy(nets)
            for k, model in enumerate(mine):

                def weighted(x, y):
                    q = responsibilities(nets, pi[i], x, y)[:, k]
                    return (q * losses(model, x, y)).sum() / len(y)

                descend(model, weighted, batches_of(federation, i, settings, seed, t), lr_of(t), settings)
            ends.append(mine)
        nets = [average([mine[k] for mine in ends], p) for k in range(K)]
        pi = new_pi
    return nets, pi


def vector(end, start):
    return torch.cat([(a - b).detach().flatten() for a, b in zip(end.parameters(), start.parameters(), strict=True)])


def in_two(likeness, linkage):
    """One of the two sides, as positions: of all pairs of sides the one whose most alike clients across are least
    alike ("single"), or by complete linkage."""
    positions = range(len(likeness))
    if linkage == "complete":
        tree = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
        return set(tree.fit_predict((1 - likeness).numpy()).nonzero()[0].tolist())
    sides = [set(side) for size in positions[1:] for side in combinations(positions, size)]
    return min(sides, key=lambda side: max(likeness[a, b] for a in side for b in positions if b not in side))


def cfl(federation, net, k, settings, rounds, seed, lr_of):
    """The last two values: each client's cluster, and in which rounds (from 0) there were cuts."""
    clients, p = range(federation.n_clients), weights_of(federation)
    nets, cluster, first, due, cuts = [copy.deepcopy(net)], [0 for _ in clients], None, False, []
    for t in range(rounds):
        lr = lr_of(t)
        ends = [train_network(copy.deepcopy(nets[cluster[i]]), federation, i, settings, seed, t, lr) for i in clients]
        d = [vector(ends[i], nets[cluster[i]]) for i in clients]
        nets = mean_within(nets, cluster, ends, p)
        length = [float(d[i].norm()) / lr for i in clients]
        if first is None:
            first = sum(float(p[i]) * length[i] for i in clients) / float(p.sum())
            continue
        split = []
        for c in range(len(nets)):
            members = [i for i in clients if cluster[i] == c]
            together = float((sum(p[i] * d[i] for i in members) / sum(p[i] for i in members)).norm()) / lr
            fastest = max(length[i] for i in members)
            if len(members) > 1 and together < settings.eps1 * first and fastest > settings.eps2 * first:
                split.append((fastest, c, members))
        if due:
            cuts.append(t)
            for _, c, members in sorted(split, reverse=True):
                if len(nets) == k:
                    break
                D = torch.stack([d[i] / d[i].norm() for i in members])
                likeness = D @ D.T
                side = {members[at] for at in in_two(likeness, settings.linkage)}
                if min(members, key=lambda i: federation.ids[i]) in side:
                    side = set(members) - side
                across = max(
                    float(likeness[members.index(a), members.index(b)]) for a in side for b in members if b not in side
                )
                if ((1 - across) / 2) ** 0.5 > settings.gamma:
                    cluster = [len(nets) if i in side else cluster[i] for i in clients]
                    nets.append(copy.deepcopy(nets[c]))
            due = False
        else:
            due = len(nets) < k and len(split) > 0
    return nets, cluster, cuts
