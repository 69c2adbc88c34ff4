"""IFCA, FedEM and CFL, from their papers' pseudocode: one client, one model, one batch at a time."""

import copy
from itertools import combinations

import torch
from sklearn.cluster import AgglomerativeClustering
from torch import nn

from kit.twins.plain import Outcome, average, descend, vector


def k_draws(given):
    """K networks, and even memberships."""
    k = given.problem.population.k
    networks = given.networks(given.problem.population.initial_models(given.seed, distinct=True))
    return networks, torch.full((len(given.clients), k), 1 / k, dtype=torch.float64)


def losses(net, x, y):
    return nn.functional.cross_entropy(net(x), y, reduction="none")


def mean_within(nets, choice, ends, p):
    """Each cluster's network averaged over its members' ends; without members, as it was."""
    new = []
    for k, net in enumerate(nets):
        members = [i for i, chosen in enumerate(choice) if chosen == k]
        new.append(average([ends[i] for i in members], [p[i] for i in members]) if members else net)
    return new


def ifca(given):
    nets, memberships = k_draws(given)
    for t in given.rounds:
        who = given.taking_part(t)
        data = [given.federation.train.client(i) for i in who]
        choice = [int(torch.stack([losses(net, own.x, own.y).mean() for net in nets]).argmin()) for own in data]
        ends = [given.train(copy.deepcopy(nets[k]), i, t) for i, k in zip(who, choice, strict=True)]
        nets = mean_within(nets, choice, ends, given.p[who])
        memberships[who] = torch.eye(len(nets), dtype=torch.float64)[choice]
    return Outcome(nets, memberships)


def responsibilities(nets, pi, x, y):
    """(N, K)"""
    with torch.no_grad():
        joint = torch.stack([pi[k] * torch.exp(-losses(net, x, y)) for k, net in enumerate(nets)], dim=1)
    return joint / joint.sum(1, keepdim=True)


def fedem(given):
    nets, pi = k_draws(given)
    for t in given.rounds:
        who, new_pi, ends = given.taking_part(t), pi.clone(), []
        for i in who:
            data = given.federation.train.client(i)
            new_pi[i] = responsibilities(nets, pi[i], data.x, data.y).mean(0)
            mine = copy.deepcopy(nets)
            for k, model in enumerate(mine):

                def weighted(x, y):
                    q = responsibilities(nets, pi[i], x, y)[:, k]
                    return (q * losses(model, x, y)).mean()

                descend(model, weighted, given.batches(i, t), given.lr(t), given.method)
            ends.append(mine)
        nets = [average([mine[k] for mine in ends], given.p[who]) for k in range(len(nets))]
        pi = new_pi
    return Outcome(nets, pi)


def in_two(likeness, linkage):
    """One of the two sides, as positions: by complete linkage, or so that the most alike across are least alike."""
    positions = range(len(likeness))
    if linkage == "complete":
        tree = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
        return set(tree.fit_predict((1 - likeness).numpy()).nonzero()[0].tolist())
    sides = [set(side) for size in positions[1:] for side in combinations(positions, size)]
    return min(sides, key=lambda side: max(likeness[a, b] for a in side for b in positions if b not in side))


def cfl(given):
    """A cluster that stands still while its members pull apart is due to be cut in the round after."""
    clients, p, settings, k = given.clients, given.p, given.method, given.problem.population.k
    nets, cluster, first, due = [given.net], [0 for _ in clients], None, False
    for t in given.rounds:
        ends = [given.train(copy.deepcopy(nets[cluster[i]]), i, t) for i in clients]
        d = [(vector(ends[i]) - vector(nets[cluster[i]])) / given.lr(t) for i in clients]
        nets = mean_within(nets, cluster, ends, p)
        length = torch.stack([change.norm() for change in d])
        if first is None:
            first = p @ length / p.sum()
            continue
        split = []
        for c in range(len(nets)):
            members = [i for i in clients if cluster[i] == c]
            together = (sum(p[i] * d[i] for i in members) / p[members].sum()).norm()
            fastest = length[members].max()
            if len(members) > 1 and together < settings.eps1 * first and fastest > settings.eps2 * first:
                split.append((float(fastest), c, members))
        cut_now, due = due, not due and len(nets) < k and len(split) > 0
        for _, c, members in sorted(split, reverse=True):
            if len(nets) == k or not cut_now:
                break
            D = torch.stack([d[i] / length[i] for i in members])
            likeness = D @ D.T
            side = {members[at] for at in in_two(likeness, settings.linkage)}
            if min(members, key=lambda i: given.federation.ids[i]) in side:
                side = set(members) - side
            inside = torch.tensor([i in side for i in members])
            across = float(likeness[inside][:, ~inside].max())
            if ((1 - across) / 2) ** 0.5 > settings.gamma:
                cluster = [len(nets) if i in side else cluster[i] for i in clients]
                nets.append(copy.deepcopy(nets[c]))
    return Outcome(nets, torch.eye(len(nets), dtype=torch.float64)[cluster])
