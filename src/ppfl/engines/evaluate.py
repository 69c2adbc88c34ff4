"""Every client's personal model on its own data, and the objective over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.batches import Batch, LocalData, id_keys
from ..algorithms.contract import Personal, Problem
from ..core.objective import membership_gradient, objective, stationarity
from ..core.shared import Shared
from ..core.simplex import harden
from ..core.workspace import Workspace
from ..data import Federation
from ..data.federation import Split
from .ranks import ALONE, Ranks

BLOCK_BYTES = 16 * 2**20


class Evaluation(NamedTuple):
    """Per client: mean loss, mean score (accuracy for classifiers), number of samples."""

    loss: Tensor  # (M,)
    score: Tensor  # (M,)
    samples: Tensor  # (M,)

    @property
    def pooled(self) -> float:
        """Mean over samples: every client's own model on its own data, as in the paper."""
        return float((self.score * self.samples).sum() / self.samples.sum())

    @property
    def pooled_loss(self) -> float:
        return float((self.loss * self.samples).sum() / self.samples.sum())

    @property
    def per_client(self) -> Tensor:
        """Scores of the clients that have samples."""
        return self.score[self.samples > 0]

    @property
    def mean(self) -> float:
        """Mean over clients, all alike."""
        return float(self.per_client.mean())

    def worst_tenth(self, higher_is_better: bool = True) -> float:
        """Mean over the tenth of the clients that fares worst."""
        ordered = self.per_client.sort(descending=not higher_is_better).values
        return float(ordered[: max(1, len(ordered) // 10)].mean())


def evaluate(
    problem: Problem,
    personal: Personal,
    federation: Federation,
    split: Split = "test",
    *,
    hard: bool = False,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Loss and score of every client on a split of its own data. hard: by the max rule."""
    population, space = problem.population, Workspace()
    sums = torch.zeros(3, federation.n_clients, dtype=torch.float64)
    for who, batch, shared, c in _blocks(problem, personal, federation, split, space, ranks):
        chosen = harden(c) if hard else c
        prediction, loss = population.judge(shared, chosen, batch.x, batch.y, own=personal.own, space=space)
        score = population.loss.score(prediction.flatten(0, 1), batch.y.flatten(0, 1)).reshape(batch.share.shape)
        means = torch.stack([loss * batch.share, score * batch.share, batch.share]).sum(dim=2)
        sums[:, who] += (means * batch.real).double().cpu()
    ranks.add(sums)
    loss, score = sums[:2] / sums[2].clamp_min(1)
    return Evaluation(loss, score, sums[2])


def client_losses(problem: Problem, personal: Personal, federation: Federation, ranks: Ranks = ALONE) -> Tensor:
    """f_i on all training data, (M,)."""
    return evaluate(problem, personal, federation, "train", ranks=ranks).loss


def objective_value(
    problem: Problem, personal: Personal, federation: Federation, penalty: float, ranks: Ranks = ALONE
) -> float:
    """F(theta, C) of Eq. (9) on all training data."""
    losses = client_losses(problem, personal, federation, ranks).to(problem.weights)
    if personal.memberships is None:
        return float(problem.weights @ losses)
    return float(objective(losses, personal.memberships, problem.weights, problem.affinity, penalty))


def stationarity_value(
    problem: Problem,
    shared: Shared,
    memberships: Tensor,
    federation: Federation,
    penalty: float,
    eta: float,
    ranks: Ranks = ALONE,
) -> float:
    """Section 3.2: how far (theta, C) is from a stationary point of F, on full gradients."""
    personal = Personal(shared, memberships, own=False)
    slopes = torch.zeros_like(memberships)
    theta: Shared = pytree.tree_map(torch.zeros_like, shared)
    for who, batch, _, c in _blocks(problem, personal, federation, "train", None, ranks):
        share = batch.real / federation.train.sizes[who].to(batch.real)
        slope, _ = problem.population.membership_gradients(shared, c, *batch[:3])
        slopes[who] += share[:, None] * slope
        gradient, _ = problem.population.theta_gradients(shared, c, *batch[:3], own=False)
        weighted = share * problem.weights[who]
        theta = pytree.tree_map(lambda sum_, g, w=weighted: sum_ + torch.tensordot(w, g, dims=1), theta, gradient)
    for leaf in (slopes, *theta.leaves()):
        ranks.add(leaf)
    G = membership_gradient(slopes, memberships, problem.weights, problem.affinity, penalty)
    return float(stationarity(pytree.tree_leaves(theta), memberships, G, eta))


def _blocks(
    problem: Problem,
    personal: Personal,
    federation: Federation,
    split: Split,
    space: Workspace | None,
    ranks: Ranks,
) -> Iterator[tuple[Tensor, Batch, Shared, Tensor]]:
    """Blocks of this process's clients, of like size, and of their samples, with the models that belong to them."""
    samples = federation.split(split)
    keys, sizes = id_keys(problem.ids), samples.sizes.cpu() * ranks.mine(federation.train.sizes.cpu())
    sample = samples.x[:1].numel() * samples.x.element_size()
    a_client = int(sizes.max()) * sample + problem.population.bytes_of_local_run()
    pieces = max(1, min(samples.n_clients, samples.n_clients * a_client // BLOCK_BYTES))
    for who in sizes.argsort(descending=True, stable=True).tensor_split(pieces):
        who = who[sizes[who] > 0]
        if len(who) == 0:
            continue
        data = LocalData(samples, problem.weights, keys, who, problem.seed, 0, space)
        chosen = who.to(problem.weights.device)
        c = problem.weights.new_ones(len(who), 1) if personal.memberships is None else personal.memberships[chosen]
        shared = personal.shared.map(itemgetter(chosen)) if personal.own else personal.shared
        for batch in data.everything(block=max(1, BLOCK_BYTES // (sample * len(who)))):
            n = len(batch.x)
            yield who[:n], batch, shared.first(n) if personal.own else shared, c[:n]
