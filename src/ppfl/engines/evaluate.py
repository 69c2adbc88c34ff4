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
from ..core.population import Shared
from ..data import Federation, Samples
from ..data.federation import Split

BLOCK_BYTES = 64 * 2**20


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
    problem: Problem, personal: Personal, federation: Federation, split: Split = "test", *, hard: bool = False
) -> Evaluation:
    """Loss and score of every client on a split of its own data. hard: by the max rule."""
    samples = federation.split(split)
    population = problem.population
    sums = torch.zeros(3, federation.n_clients, dtype=torch.float64)
    for who, batch, shared, c in _blocks(problem, personal, samples):
        prediction = population.predict(shared, c, batch.x, own=personal.own, hard=hard)
        score = population.loss.score(prediction.flatten(0, 1), batch.y.flatten(0, 1)).reshape(batch.weight.shape)
        loss = population.mean_losses(shared, c, batch.x, batch.y, batch.weight, own=personal.own)
        count = batch.weight.sum(dim=1)
        sums[:, who] += torch.stack([loss * count, (score * batch.weight).sum(dim=1), count]).double().cpu()
    loss, score = sums[:2] / sums[2].clamp_min(1)
    return Evaluation(loss, score, sums[2])


def client_losses(problem: Problem, personal: Personal, federation: Federation) -> Tensor:
    """f_i on all training data, (M,)."""
    totals = torch.zeros(federation.n_clients)
    for who, batch, shared, c in _blocks(problem, personal, federation.train):
        loss = problem.population.mean_losses(shared, c, batch.x, batch.y, batch.weight, own=personal.own)
        totals[who] += (loss * batch.weight.sum(dim=1)).cpu()
    return totals / federation.train.sizes.cpu()


def objective_value(problem: Problem, personal: Personal, federation: Federation, penalty: float) -> float:
    """F(theta, C) of Eq. (9) on all training data."""
    losses = client_losses(problem, personal, federation).to(problem.weights)
    if personal.memberships is None:
        return float(problem.weights @ losses)
    return float(objective(losses, personal.memberships, problem.weights, problem.affinity, penalty))


def stationarity_value(
    problem: Problem, shared: Shared, memberships: Tensor, federation: Federation, penalty: float, eta: float
) -> float:
    """Section 3.2: how far (theta, C) is from a stationary point of F, on full gradients."""
    personal = Personal(shared, memberships, own=False)
    slopes = torch.zeros_like(memberships)
    theta: Shared = pytree.tree_map(torch.zeros_like, shared)
    for who, batch, _, c in _blocks(problem, personal, federation.train):
        size = federation.train.sizes[who].to(batch.weight)
        share = batch.weight.sum(dim=1) / size
        slope, _ = problem.population.membership_gradients(shared, c, batch.x, batch.y, batch.weight)
        slopes[who] += share[:, None] * slope
        gradient, _ = problem.population.theta_gradients(shared, c, batch.x, batch.y, batch.weight, own=False)
        weighted = share * problem.weights[who]
        theta = pytree.tree_map(lambda sum_, g, w=weighted: sum_ + torch.tensordot(w, g, dims=1), theta, gradient)
    G = membership_gradient(slopes, memberships, problem.weights, problem.affinity, penalty)
    return float(stationarity(pytree.tree_leaves(theta), memberships, G, eta))


def _blocks(problem: Problem, personal: Personal, samples: Samples) -> Iterator[tuple[Tensor, Batch, Shared, Tensor]]:
    """Blocks of clients of like size and of their samples, with the models and memberships that belong to them."""
    keys, sizes = id_keys(problem.ids), samples.sizes.cpu()
    sample = samples.x[:1].numel() * samples.x.element_size()
    width = int(sizes.max()) * sample
    pieces = max(1, min(samples.n_clients, samples.n_clients * width // BLOCK_BYTES))
    for who in sizes.argsort(descending=True, stable=True).tensor_split(pieces):
        who = who[sizes[who] > 0]
        if len(who) == 0:
            continue
        data = LocalData(samples, problem.weights, keys, who, problem.seed, 0)
        chosen = who.to(problem.weights.device)
        c = problem.weights.new_ones(len(who), 1) if personal.memberships is None else personal.memberships[chosen]
        shared = pytree.tree_map(itemgetter(chosen), personal.shared) if personal.own else personal.shared
        for batch in data.everything(block=max(1, BLOCK_BYTES // (sample * len(who)))):
            yield who, batch, shared, c
