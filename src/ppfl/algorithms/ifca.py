"""IFCA (Ghosh, Chung, Yin and Ramchandran, 2020): K models, and every client in the cluster whose model fits it best.

k_i = argmin_k f_i(theta_k) on all of a client's training data, anew in every round it takes part in; then
theta_k <- theta_k + sum_{i in S: k_i = k} p_i (theta_i - theta_k) / sum_{i in S: k_i = k} p_i, with S the clients of
the round and theta_i the end of a local run from theta_{k_i}: the paper's model averaging. A model that no client chose
stays as it is. Where networks have a common part, all clients move it together: the paper's weight sharing.

Equal models would leave nothing to choose, so they start from K draws, and which clients end up together depends on
these: the paper asks for a good start, or for several.

What leaves a client: its change, ONE model's size, and its choice as K numbers, both in a sum.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.backends import Backend
from ..core.population import Mixture, Models, Population
from ..core.trees import Params, expand, per_client, subtract_
from ..errors import SettingError
from .contract import MethodDefaults, Problem, Rows, Sum, Total, Upload, Work
from .fedavg import NetworkServer
from .fedem import MembershipClient
from .local.batches import LocalData
from .local.model_losses import losses_of_models
from .local.sgd import LocalTraining, TrainingLoss, train_networks
from .server_optimizers import OptimizedTraining


class IFCA(MethodDefaults, OptimizedTraining):
    """IFCA with as many clusters as the population has canonical models, by whichever mix.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=4), digits_federation(), IFCA(lr=0.1), rounds=2)
    <Fitted IFCA(lr=0.1), 2 rounds, 40 clients, accuracy ...%, shares ...>
    """

    name: ClassVar[str] = "ifca"
    title: ClassVar[str] = "IFCA"

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # plain steps, as in the authors' code

    def check(self, problem: Problem) -> None:
        if problem.population.k > problem.n_clients:
            raise SettingError(
                f"k is {problem.population.k} but there are {problem.n_clients} clients; "
                f"a cluster needs at least one client: set k <= {problem.n_clients}"
            )

    def init_server(self, problem: Problem) -> NetworkServer:
        start = problem.population.initial_models(problem.seed, distinct=True)
        return NetworkServer(start, self.optimizer_state(start))

    def merge(
        self, problem: Problem, server: NetworkServer, task: Any, totals: dict[str, Total], rows: Rows
    ) -> NetworkServer:
        return NetworkServer(*self.server_step(server, cluster_changes(problem.population, totals["change"])))

    def init_client(self, population: Population) -> MembershipClient:
        first = one_hot(torch.tensor(0), population.k)  # of a client that has made no choice
        return MembershipClient(first.to(population.dtype))

    def work(
        self, backend: Backend, task: float, shared: Params, own: Any, client: MembershipClient, data: LocalData
    ) -> Work:
        choice = mean_losses_of_models(backend, shared, data).argmin(dim=1)
        loss, change = train_in_clusters(backend, shared, choice, data, self, lr=task)
        membership = one_hot(choice, backend.population.k).to(data.weight)
        upload = Upload({"change": Sum(membership, change)}, metrics=loss.metrics())
        return Work(MembershipClient(membership), upload)

    def model(self, backend: Backend, shared: Params, own: Any, client: MembershipClient) -> Models:
        return Mixture(shared, client.membership)


def mean_losses_of_models(backend: Backend, models: Params, data: LocalData) -> Tensor:
    """f_i(theta_k) on all of each client's data, (C, K)."""
    found = data.weight.new_zeros(len(data.weight), backend.population.k)
    for block in losses_of_models(backend, models, data):
        found[block.which] += block.mean(block.losses)
    return found


def train_in_clusters(
    backend: Backend, models: Params, cluster: Tensor, data: LocalData, settings: LocalTraining, lr: float
) -> tuple[TrainingLoss, Params]:
    """A local run of the network of each client's cluster (C,), and what it changed, leaves (C, ...)."""
    common, canonical = backend.population.split(models)
    starts = expand(common, len(cluster)) | {name: theta[cluster] for name, theta in canonical.items()}
    ends = data.space.empty_like(starts)
    for name, start in starts.items():
        ends[name].copy_(start)
    loss = train_networks(backend, ends, data, settings, lr)
    return loss, subtract_(ends, starts)


def cluster_changes(population: Population, change: Total) -> Params:
    """Of every model the mean change of its members, where it has any; of the common part that of all clients."""
    members = change.weight  # (K,): sum_i p_i over each cluster's members
    counted = torch.where(members > 0, members, 1)  # without members the sum of changes is 0

    def mean_of(name: str, found: Tensor) -> Tensor:
        canonical = name in population.canonical_names
        return found / per_client(counted, found) if canonical else found.sum(0) / members.sum()

    return {name: mean_of(name, found) for name, found in change.value.items()}
