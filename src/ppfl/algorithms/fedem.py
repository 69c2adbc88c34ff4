"""FedEM (Marfoq, Neglia, Bellet, Kameni and Vidal, 2021): every client's data are a mixture of K distributions.

All share the K models, each client has mixture weights pi_i over them, and its model is sum_k pi_ik p(y | x, theta_k).
A round is one EM step with the models that a client receives:
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

from ..core.backends import Backend, Batch
from ..core.population import Mixture, Models, Population
from ..core.settings import NonNegative
from ..core.simplex import entropy, uniform
from ..core.trees import Params, expand, subtract_
from ..errors import SettingError
from .contract import Problem, Sum, Upload, Work
from .fedavg import Averaging, NetworkServer
from .local.batches import LocalData
from .local.memberships import losses_of_models
from .local.sgd import descend


class MembershipClient(NamedTuple):
    """Client state of methods whose clients keep their memberships."""

    membership: Tensor  # (C, K)


class FedEM(Averaging):
    """FedEM with the population's K canonical models as components."""

    several_models: ClassVar[bool] = True

    weight_decay: NonNegative = 5e-4  # as in the authors' code, like momentum and schedule

    def check(self, problem: Problem) -> None:
        mix = problem.population.mix.name
        if mix != "predictions":
            raise SettingError(
                f'fedem predicts by a mixture of predictions, the mix is "{mix}"; set mix = "predictions"'
            )

    def init_server(self, problem: Problem) -> NetworkServer:
        return self.server_from(problem.population.initial_models(problem.seed, distinct=True))

    def init_client(self, population: Population) -> MembershipClient:
        return MembershipClient(uniform(1, population.k, dtype=population.dtype)[0])

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: MembershipClient, data: LocalData) -> Work:
        q = Responsibilities(shared, state.membership, data)

        def add_gradients(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
            weights = q.of(batch).mul_(batch.share[:, None])
            return data.backend.add_weighted_gradients(at, velocity, momentum, weights, batch)

        start = expand(shared, len(data.weight))
        ends = data.space.empty_like(start)
        loss = descend(add_gradients, ends, data, self.sgd(task), start=start)
        change = Sum(None, subtract_(ends, shared))
        # the bound adds mean_n sum_k q_nk log(q_nk / pi_k), and pi is the mean of the q
        bound = loss._replace(loss=loss.loss + entropy(q.mean) - q.mean_entropy)
        return Work(MembershipClient(q.mean), Upload({"change": change}, metrics=bound.metrics()))

    def model(self, backend: Backend, shared: Params, own: dict[str, Tensor], state: MembershipClient) -> Models:
        return Mixture(shared, state.membership)


class Responsibilities:
    """q_i(n, k) of all samples of a chunk of clients, client after client."""

    def __init__(self, models: Params, pi: Tensor, data: LocalData) -> None:
        self._q = pi.new_empty(int(data.sizes.sum()), data.backend.population.k)
        first = data.sizes.cumsum(0) - data.sizes
        self._offset = (first - data.start).to(pi.device)[:, None]  # (C, 1): from rows of the data to rows of q
        self.mean, self.mean_entropy = torch.zeros_like(pi), torch.zeros_like(pi[:, 0])
        for block in losses_of_models(models, data):
            which, batch = block.which, block.batch
            q = (pi[which].log()[:, :, None] - block.losses).softmax(dim=1)  # (C, K, B)
            real = batch.share > 0
            self._q[(batch.rows + self._offset[which])[real]] = q.transpose(1, 2)[real]
            self.mean[which] += block.mean(q)
            self.mean_entropy[which] += block.mean(entropy(q.transpose(1, 2)))

    def of(self, batch: Batch) -> Tensor:
        """(C, K, B) of the first C clients' samples in a batch, to be written to."""
        return self._q[batch.rows + self._offset[: len(batch.x)]].transpose(1, 2)
