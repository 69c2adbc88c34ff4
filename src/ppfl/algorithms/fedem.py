"""FedEM (Marfoq, Neglia, Bellet, Kameni and Vidal, 2021): every client's data are a mixture of K distributions.

All share the K models, each client has mixture weights pi_i over them, and its model is sum_k pi_ik p(y | x, theta_k).
A round is one step of EM, at the models a client receives:
E  q_i(n, k) ~ pi_ik exp(-loss(theta_k; x_n, y_n)), for all its samples n
M  pi_ik <- mean_n q_i(n, k);  theta_ik <- local SGD on mean_n q_i(n, k) loss(theta_k; x_n, y_n) from theta_k
and the server's theta_k <- sum_{i in S} p_i theta_ik / sum_{i in S} p_i, with S the clients of the round.

The q of a round stay as they are while its models move: that is what makes it EM, and a step for every theta_k by
itself. The loss it reports is what these steps descend, the bound mean_n sum_k q_nk (loss_nk + log(q_nk / pi_k)), which
lies above the mixture's own and touches it where q, pi and theta belong together.

What leaves a client: its changes of all K models, in a sum. Its pi stay with it.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.errors import SettingError
from ..core.population import Population
from ..core.shared import Shared
from ..core.simplex import entropy, uniform
from .batches import Batch, LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work
from .descent import LocalTraining, NonNegative, descend
from .fedavg import mean
from .model_losses import losses_of_models


class FedEMServer(NamedTuple):
    shared: Shared


class FedEMClient(NamedTuple):
    membership: Tensor  # (C, K), pi_i


class FedEM(LocalTraining):
    """FedEM with the population's K canonical models as components."""

    name: ClassVar[str] = "fedem"

    weight_decay: NonNegative = 5e-4  # as in the authors' code, like momentum and schedule

    def check(self, problem: Problem) -> None:
        mix = problem.population.mix.name
        if mix != "predictions":
            raise SettingError(
                f'fedem predicts by a mixture of predictions, the mix is "{mix}"; set mix = "predictions"'
            )

    def init(self, problem: Problem) -> tuple[FedEMServer, FedEMClient]:
        like = problem.weights
        pi = uniform(problem.n_clients, problem.population.k, dtype=like.dtype, device=like.device)
        return FedEMServer(problem.population.initial(problem.seed, distinct=True)), FedEMClient(pi)

    def work(
        self, population: Population, task: float, shared: Shared, own: Any, client: FedEMClient, data: LocalData
    ) -> Work:
        q = Responsibilities(population, shared, client.membership, data)

        def push(at: Shared, velocity: Shared, momentum: float, batch: Batch) -> Tensor:
            weights = q.of(batch).mul_(batch.share[:, None])
            return population.push_weighted_models(at, velocity, momentum, batch.x, batch.y, weights, data.space)

        ends = shared.copies(len(data.weight), data.space)
        met = descend(push, ends, data, self, lr=task)
        change = ends.map(Tensor.sub_, shared)
        bound = met.loss + entropy(q.mean) - q.mean_entropy  # mean_n sum_k q_nk log(q_nk / pi_k), pi being their mean
        return Work(FedEMClient(q.mean), Upload({"change": Sum(None, change)}, {}), bound, met.samples)

    def merge(
        self, problem: Problem, server: FedEMServer, plan: Plan, totals: dict[str, Total], rows: Any
    ) -> FedEMServer:
        return FedEMServer(server.shared.map(torch.add, mean(totals["change"])))

    def personal(self, server: FedEMServer, clients: FedEMClient) -> Personal:
        return Personal(server.shared, clients.membership, own=False)


class Responsibilities:
    """q_i(n, k) of all samples of a chunk of clients, client after client."""

    def __init__(self, population: Population, shared: Shared, pi: Tensor, data: LocalData) -> None:
        self._q = pi.new_empty(int(data.sizes.sum()), population.k)
        first = data.sizes.cumsum(0) - data.sizes
        self._moved_by = (first - data.start).to(pi.device)[:, None]  # (C, 1): from rows of the data to rows of q
        self.mean, self.mean_entropy = torch.zeros_like(pi), torch.zeros_like(pi[:, 0])
        for block in losses_of_models(population, shared, data):
            which, batch = block.which, block.batch
            q = (pi[which].log()[:, :, None] - block.losses).softmax(dim=1)  # (C, K, B)
            real = batch.share > 0
            self._q[(batch.rows + self._moved_by[which])[real]] = q.transpose(1, 2)[real]
            self.mean[which] += block.mean(q)
            self.mean_entropy[which] += block.mean(entropy(q.transpose(1, 2)))

    def of(self, batch: Batch) -> Tensor:
        """(C, K, B) of the first C clients' samples in a batch, to be written to."""
        return self._q[batch.rows + self._moved_by[: len(batch.x)]].transpose(1, 2)
