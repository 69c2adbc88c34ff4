"""IFCA (Ghosh, Chung, Yin and Ramchandran, 2020): K models, and every client in the cluster whose model fits it best.

k_i = argmin_k f_i(theta_k) on all of a client's training data, anew in every round it takes part in; then
theta_k <- theta_k + sum_{i in S: k_i = k} p_i (theta_i - theta_k) / sum_{i in S: k_i = k} p_i, with S the clients of
the round and theta_i the end of a local run from theta_{k_i}: the paper's model averaging. A model that nobody chose
stays as it is. Where networks have a common part, all clients move it together: the paper's weight sharing.

Equal models would leave nothing to choose, so they start from K draws, and which clients end up together depends on
these: the paper asks for a good start, or for several.

What leaves a client: its change, ONE model's size, and its choice as K numbers, both in a sum.
"""

from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.errors import SettingError
from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work
from .descent import LocalTraining, Met, descend_networks, per_client
from .model_losses import losses_of_models


class IFCAServer(NamedTuple):
    shared: Shared


class IFCAClient(NamedTuple):
    membership: Tensor  # (C, K), one-hot: the last choice; of a client that has made none, the first model


class IFCA(LocalTraining):
    """IFCA with as many clusters as the population has canonical models, by whichever mix."""

    name: ClassVar[str] = "ifca"

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # plain steps, as in the authors' code

    def check(self, problem: Problem) -> None:
        if problem.population.k > problem.n_clients:
            raise SettingError(
                f"k is {problem.population.k} but there are {problem.n_clients} clients; "
                f"a cluster needs at least one client: set k <= {problem.n_clients}"
            )

    def init(self, problem: Problem) -> tuple[IFCAServer, IFCAClient]:
        first = torch.zeros(problem.n_clients, dtype=torch.long, device=problem.weights.device)
        membership = one_hot(first, problem.population.k).to(problem.weights)
        return IFCAServer(problem.population.initial(problem.seed, distinct=True)), IFCAClient(membership)

    def work(
        self, population: Population, task: float, shared: Shared, own: Any, client: IFCAClient, data: LocalData
    ) -> Work:
        choice = mean_losses_of_models(population, shared, data).argmin(dim=1)
        met, change = train_in_clusters(population, shared, choice, data, self, lr=task)
        membership = one_hot(choice, population.k).to(data.weight)
        return Work(IFCAClient(membership), Upload({"change": Sum(membership, change)}, {}), *met)

    def merge(
        self, problem: Problem, server: IFCAServer, plan: Plan, totals: dict[str, Total], rows: Any
    ) -> IFCAServer:
        return IFCAServer(moved_by_clusters(server.shared, totals["change"]))

    def personal(self, server: IFCAServer, clients: IFCAClient) -> Personal:
        return Personal(server.shared, clients.membership, own=False)


def mean_losses_of_models(population: Population, shared: Shared, data: LocalData) -> Tensor:
    """f_i(theta_k) on all of each client's data, (C, K)."""
    found = data.weight.new_zeros(len(data.weight), population.k)
    for block in losses_of_models(population, shared, data):
        found[block.which] += block.mean(block.losses)
    return found


def train_in_clusters(
    population: Population, shared: Shared, cluster: Tensor, data: LocalData, settings: LocalTraining, lr: float
) -> tuple[Met, Shared]:
    """A local run of each client's own cluster's network (C,), and what it changed, leaves (C, ...)."""
    of_client = {name: theta[cluster] for name, theta in shared.canonical.items()}
    starts = Shared(shared.spread(len(cluster)).common, of_client)
    ends = starts.room(data.space, "values").map(Tensor.copy_, starts)
    met = descend_networks(population, ends, data, settings, lr)
    return met, ends.map(Tensor.sub_, starts)


def moved_by_clusters(shared: Shared, change: Total) -> Shared:
    """Every model by the mean change of its members, where it has any; the common part by everybody's."""
    members = change.weight  # (K,): sum_i p_i over each cluster's members
    counted = torch.where(members > 0, members, 1)  # without members the sum of changes is 0
    return Shared(
        {name: value + change.value.common[name].sum(0) / members.sum() for name, value in shared.common.items()},
        {
            name: theta + change.value.canonical[name] / per_client(counted, theta)
            for name, theta in shared.canonical.items()
        },
    )
