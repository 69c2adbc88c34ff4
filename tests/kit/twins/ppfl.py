"""PPFL from the paper's pseudocode, both algorithms and every way of mixing and averaging."""

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from kit.twins.plain import Outcome
from ppfl.core.draws import uniform


def loss(given, models, c, x, y):
    """The mean loss of a client with membership c."""
    population, net = given.problem.population, given.net
    if population.mix.name == "weights":
        canonical = population.canonical_names
        mixed = {name: torch.tensordot(c, v, 1) if name in canonical else v for name, v in models.items()}
        return cross_entropy(functional_call(net, mixed, (x,)), y)
    outputs = [functional_call(net, given.model(models, k), (x,)) for k in range(len(c))]
    if population.mix.name == "outputs":
        return cross_entropy(sum(c[k] * output for k, output in enumerate(outputs)), y)
    mixed = sum(c[k] * output.softmax(1) for k, output in enumerate(outputs))
    return -mixed[torch.arange(len(y)), y].log().mean()


def membership_step(given, models, c, i, pull):
    """Eq. (16), as written or with the step eta / p_i; entries kept above the floor of 1e-6."""
    data, settings = given.federation.train.client(i), given.method
    c = c.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(given, models, c, data.x, data.y), c)
    G = given.p[i] * slope + pull
    if settings.membership_scale == "own":
        G = G / given.p[i]
    new = (c.detach().log() - settings.membership_lr * G).softmax(0)
    above = (new - 1e-6).clamp_min(0)
    return 1e-6 + above * (1 - len(c) * 1e-6) / above.sum()


def train_models(given, models, c, i, t, share=1.0, pace=1.0):
    """Local SGD; gradients count as much as `share`, those for canonical models also as much as `pace`."""
    settings, canonical = given.method, given.problem.population.canonical_names
    mine = {name: value.clone().requires_grad_() for name, value in models.items()}
    momentum, decay = settings.momentum, settings.weight_decay
    optimizer = torch.optim.SGD(mine.values(), given.lr(t), momentum=momentum, weight_decay=decay)
    for x, y in given.batches(i, t):
        optimizer.zero_grad()
        loss(given, mine, c, x, y).backward()
        for name, value in mine.items():
            value.grad *= share * (pace if name in canonical else 1)
        optimizer.step()
    return {name: value.detach() for name, value in mine.items()}


def mean_over_members(given, models, ends, decayed, c, p):
    """theta_k over the members of model k, the common part over everyone: what a client's gradients did to theta_k
    counts |c_i|^2, what weight decay did counts c_ik, over sum_i p_i c_ik or at least a tenth of an even share."""
    new = mean_over_everyone(ends, p)
    for name in given.problem.population.canonical_names:
        for k, theta in enumerate(models[name]):
            move = 0.0
            for i, (end, left) in enumerate(zip(ends, decayed, strict=True)):
                by_gradients, by_decay = end[name][k] - left[name][k], left[name][k] - theta
                move = move + p[i] * ((c[i] ** 2).sum() * by_gradients + c[i, k] * by_decay)
            new[name][k] = theta + move / max(p @ c[:, k], 0.1 / c.shape[1] * p.sum())
    return new


def mean_over_everyone(ends, p):
    return {name: sum(w * end[name] for w, end in zip(p, ends, strict=True)) / p.sum() for name in ends[0]}


def ppfl(given):
    """Order "random" is Algorithm 1, "alternating" is Algorithm O1."""
    settings, p, M, K = given.method, given.p, len(given.clients), given.problem.population.k
    models = given.problem.population.initial_models(given.seed, distinct=True)
    C = torch.full((M, K), 1.0 / K, dtype=torch.float64)
    W = given.problem.affinity.neighbours(torch.eye(M, dtype=torch.float64))
    L = torch.diag(W.sum(1)) - W
    for t in given.rounds:
        who, both = given.taking_part(t), settings.order == "alternating"
        theta_block = both or float(uniform(given.seed, "block", t)) < settings.block_probability
        if both or not theta_block:
            pull, before = 2 * settings.penalty * L @ C, C.clone()
            for i in who:
                C[i] = membership_step(given, models, before[i], i, pull[i])
        if theta_block and settings.averaging == "everyone":
            models = mean_over_everyone([train_models(given, models, C[i], i, t) for i in who], p[who])
        elif theta_block:
            ends = [train_models(given, models, C[i], i, t, pace=1 / float((C[i] ** 2).sum())) for i in who]
            decayed = [train_models(given, models, C[i], i, t, share=0.0) for i in who]
            models = mean_over_members(given, models, ends, decayed, C[who], p[who])
    return Outcome(given.networks(models), C)
