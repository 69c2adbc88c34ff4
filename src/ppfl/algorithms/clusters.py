"""Methods that sort clients into clusters with a model each: IFCA by which model fits best, CFL by cuts.

IFCA (Ghosh, Chung, Yin and Ramchandran, 2020): K models, and every client in the cluster whose model fits it best.

k_i = argmin_k f_i(theta_k) on all of a client's training data, anew in every round it takes part in; then
theta_k <- theta_k + sum_{i in S: k_i = k} p_i (theta_i - theta_k) / sum_{i in S: k_i = k} p_i, with S the clients of
the round and theta_i the end of a local run from theta_{k_i}: the paper's model averaging. A model that no client chose
stays as it is. Where networks have a common part, all clients move it together: the paper's weight sharing.

Equal models would leave nothing to choose, so they start from K draws, and which clients end up together depends on
these: the paper asks for a good start, or for several.

What leaves a client of IFCA: its change, ONE model's size, and its choice as K numbers, both in a sum.

CFL, clustered federated learning (Sattler, Mueller and Samek, 2020): one cluster, cut in two where it disagrees.

FedAvg within every cluster c, and where it has come to rest while single clients have not,
|sum_{i in c} p_i d_i| / sum_{i in c} p_i < eps1  and  max_{i in c} |d_i| > eps2,  with d_i = theta_i - theta_c,
the cluster is cut in two by the cosines between its clients' d_i, if the most alike clients on different sides are
unlike enough: sqrt((1 - cos) / 2) > gamma. Both sides go on from their cluster's model. Clusters never merge.

The paper's eps are lengths, which depend on the network, the data and the steps. Here they are in units of the mean
length of the clients' first changes, and lengths are taken per step size: else a schedule that shortens the steps
would look like rest. So eps1 says how much of the first pace a cluster may still have, and eps2 how much of it its
fastest client must have. Neither is safe for all problems: with short steps a cluster may never come to rest, and
clients with little data of one kind may keep moving apart, so that they are cut though they agree. Set them, and k,
by what is known of the clients.

The population's k bounds the number of clusters, so that states have one shape. Whether to cut needs the clients'
lengths only. So changes leave one by one in a cut's own round, which follows the one that called for it, and in
which all clients are asked, since every member has to be on one side. One that is lost in it goes with the side that
more clients are on, and if that was wrong, a later cut may part them again.

What leaves a client of CFL: its change, in a sum, with its cluster as K numbers; the length of its change, as a row; in
the round of a cut the change itself, as rows. What is sent: the models in use to all, of which each needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from scipy.cluster.hierarchy import linkage, to_tree
from scipy.spatial.distance import squareform
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.backends import Backend
from ..core.ids import Roster
from ..core.population import Mixture, Models, Population
from ..core.settings import NonNegative
from ..core.trees import Params, expand, map_params, per_client, subtract_
from ..errors import SettingError
from ..io.codec import message
from .contract import Plan, Problem, Rows, Sum, Total, Upload, Work, participants
from .fedavg import Averaging, NetworkServer
from .fedem import MembershipClient
from .local.batches import LocalData
from .local.memberships import losses_of_models
from .local.sgd import LEARNING_RATES, SGD, LocalTraining, TrainingLoss, descend


class IFCA(Averaging):
    """IFCA with as many clusters as the population has canonical models, by whichever mix."""

    several_models: ClassVar[bool] = True

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # plain steps, as in the authors' code

    def check(self, problem: Problem) -> None:
        if problem.population.k > problem.n_clients:
            raise SettingError(
                f"k is {problem.population.k} but there are {problem.n_clients} clients; "
                f"a cluster needs at least one client: set k <= {problem.n_clients}"
            )

    def init_server(self, problem: Problem) -> NetworkServer:
        return self.server_from(problem.population.initial_models(problem.seed, distinct=True))

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        return self.step(server, cluster_changes(problem.population, totals["change"]))

    def init_client(self, population: Population) -> MembershipClient:
        first = one_hot(torch.tensor(0), population.k)  # of a client that has made no choice
        return MembershipClient(first.to(population.dtype))

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: MembershipClient, data: LocalData) -> Work:
        choice = mean_losses_of_models(shared, data).argmin(dim=1)
        loss, change = train_in_clusters(shared, choice, data, self.sgd(task))
        membership = one_hot(choice, data.backend.population.k).to(data.weight)
        upload = Upload({"change": Sum(membership, change)}, metrics=loss.metrics())
        return Work(MembershipClient(membership), upload)

    def model(self, backend: Backend, shared: Params, own: dict[str, Tensor], state: MembershipClient) -> Models:
        return Mixture(shared, state.membership)


def mean_losses_of_models(models: Params, data: LocalData) -> Tensor:
    """f_i(theta_k) on all of each client's data, (C, K)."""
    found = data.weight.new_zeros(len(data.weight), data.backend.population.k)
    for block in losses_of_models(models, data):
        found[block.which] += block.mean(block.losses)
    return found


def train_in_clusters(models: Params, cluster: Tensor, data: LocalData, sgd: SGD) -> tuple[TrainingLoss, Params]:
    """A local run of the network of each client's cluster (C,), and what it changed, leaves (C, ...)."""
    common, canonical = data.backend.population.split(models)
    starts = expand(common, len(cluster)) | {name: theta[cluster] for name, theta in canonical.items()}
    ends = data.space.empty_like(starts)
    for name, start in starts.items():
        ends[name].copy_(start)
    loss = descend(data.backend.add_gradients, ends, data, sgd)
    return loss, subtract_(ends, starts)


def cluster_changes(population: Population, change: Total) -> Params:
    """Of every model the mean change of its members, where it has any; of the common part that of all clients."""
    members = change.weight  # (K,): sum_i p_i over each cluster's members
    counted = torch.where(members > 0, members, 1)  # without members the sum of changes is 0

    def mean_of(name: str, found: Tensor) -> Tensor:
        canonical = name in population.canonical_names
        return found / per_client(counted, found) if canonical else found.sum(0) / members.sum()

    return {name: mean_of(name, found) for name, found in change.value.items()}


class CFLServer(NamedTuple):
    shared: Params
    cluster: Tensor  # (M,), in the order of the roster
    used: Tensor  # (), how many clusters there are
    first_pace: Tensor  # (), mean length of the first changes per step size; 0 before the first round
    cut: Tensor  # (), bool: whether the next round is one of cuts


@message
class CFLTask(NamedTuple):
    lr: float
    cut: bool


class CFL(LocalTraining):
    """Recursive bipartition into at most as many clusters as the population has canonical models."""

    several_models: ClassVar[bool] = True  # at most k clusters
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "eps1": (0.2, 0.4), "eps2": (0.4, 0.7)}

    eps1: NonNegative = 0.2  # 0: never cut
    eps2: NonNegative = 0.4
    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # "single" makes the most alike clients on different sides as unlike as can be, the paper's optimal bipartition;
    # "complete", as in the authors' code, is not chained from one side to the other by a few clients between them
    linkage: Literal["complete", "single"] = "complete"

    @property
    def shows(self) -> tuple[str, ...]:
        return "length", "change"

    # ------------------------------------------------------------------ server

    def init_server(self, problem: Problem) -> CFLServer:
        return CFLServer(
            shared=problem.population.initial_models(problem.seed),
            cluster=torch.zeros(problem.n_clients, dtype=torch.long),
            used=torch.tensor(1),
            first_pace=torch.zeros((), dtype=problem.population.dtype),
            cut=torch.tensor(False),
        )

    def plan(self, problem: Problem, server: CFLServer, round: int) -> Plan:
        task = CFLTask(self.step_size(round, problem.rounds), bool(server.cut))
        who = None if task.cut else participants(problem, self.participation, round)
        return Plan(who, task)

    def possible_tasks(self, round: int, rounds: int, seed: int) -> tuple[CFLTask, ...]:
        lr = self.step_size(round, rounds)
        return CFLTask(lr, cut=False), CFLTask(lr, cut=True)

    def send(
        self, problem: Problem, server: CFLServer, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[Params, dict[str, Tensor]]:
        used, canonical = int(server.used), problem.population.canonical_names
        models = {name: leaf[:used] if name in canonical else leaf for name, leaf in server.shared.items()}
        return models, {"cluster": problem.roster.rows(server.cluster, ids, default=0)}

    def move_server(self, server: CFLServer, before: Roster, after: Roster) -> CFLServer:
        return server._replace(cluster=before.rows(server.cluster, after.ids, default=0))

    def merge(self, problem: Problem, server: CFLServer, task: Any, totals: dict[str, Total], rows: Rows) -> CFLServer:
        change = totals["change"]
        moves = cluster_changes(problem.population, change)
        server = server._replace(shared=map_params(torch.add, server.shared, moves))
        if not server.first_pace > 0:
            mean_length = totals["length"].value[0] / totals["length"].weight[0]
            return server._replace(first_pace=mean_length / task.lr)
        disagreeing = self._disagreeing(problem, server, task, change, rows)
        if task.cut:
            return self._cut(problem, server, disagreeing, rows)._replace(cut=torch.zeros_like(server.cut))
        due = int(server.used) < problem.population.k and bool(disagreeing)
        return server._replace(cut=torch.full_like(server.cut, due))

    def _disagreeing(self, problem: Problem, server: CFLServer, task: CFLTask, change: Total, rows: Rows) -> list[int]:
        """Clusters at rest whose clients are not, the one with the fastest client first."""
        pace = rows.values["length"] / task.lr
        together = _lengths(change.value) / (change.weight * task.lr)  # (K,)
        of_client = server.cluster[problem.roster.positions(rows.ids)]
        fastest = torch.zeros_like(together).scatter_reduce(0, of_client, pace, "amax")
        members = torch.bincount(of_client, minlength=len(together))
        at_odds = (together < self.eps1 * server.first_pace) & (fastest > self.eps2 * server.first_pace)
        found: list[int] = (at_odds & (members > 1)).nonzero()[:, 0].tolist()
        return sorted(found, key=lambda k: -float(fastest[k]))

    def _cut(self, problem: Problem, server: CFLServer, clusters: list[int], rows: Rows) -> CFLServer:
        """These clusters in two each, as long as there are models for them, by the rows of those who came back."""
        cluster, used = server.cluster.clone(), int(server.used)
        canonical = problem.population.canonical_names
        shared = {name: leaf.clone() if name in canonical else leaf for name, leaf in server.shared.items()}
        changes = [leaf.flatten(1) for name, leaf in rows.values.items() if name != "length"]
        ids = problem.roster.ids if rows.ids is None else rows.ids
        who = torch.arange(problem.n_clients)[problem.roster.positions(rows.ids)].to(cluster.device)
        for k in clusters:
            here = (server.cluster[who] == k).nonzero()[:, 0]
            members = who[here]
            likeness = _cosines([leaf[here] for leaf in changes])
            leaves = self._other_side(likeness, [ids[at] for at in here.tolist()])
            across = likeness[leaves][:, ~leaves].max()
            if used == problem.population.k or not ((1 - across) / 2).clamp_min(0).sqrt() > self.gamma:
                continue
            if 2 * int(leaves.sum()) > len(leaves):  # the lost go with them
                cluster[server.cluster == k] = used
            cluster[members] = torch.where(leaves, used, k)
            for name in canonical:
                shared[name][used] = shared[name][k]
            used += 1
        return server._replace(shared=shared, cluster=cluster, used=torch.full_like(server.used, used))

    def _other_side(self, likeness: Tensor, ids: Sequence[str]) -> Tensor:
        """Who leaves (C,) bool: of the two sides the one without the first client by name, so that no order counts."""
        distance = (1 - likeness).double().cpu().numpy()
        tree = to_tree(linkage(squareform(distance, checks=False), method=self.linkage))
        side = torch.zeros(len(ids), dtype=torch.bool, device=likeness.device)
        side[tree.get_left().pre_order()] = True
        return ~side if side[list(ids).index(min(ids))] else side

    # ------------------------------------------------------------------ client

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: Any, data: LocalData) -> Work:
        loss, change = train_in_clusters(shared, own["cluster"], data, self.sgd(task.lr))
        rows = {f"change of {name}": leaf for name, leaf in change.items()} if task.cut else {}
        membership = one_hot(own["cluster"], data.backend.population.k).to(data.weight)
        length = _lengths(change)
        sums = {"change": Sum(membership, change), "length": Sum(None, length)}
        return Work(state, Upload(sums, {"length": length, **rows}, loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: dict[str, Tensor], state: Any) -> Models:
        theta = shared[next(iter(backend.population.canonical_names))]
        return Mixture(shared, one_hot(own["cluster"], len(theta)).to(theta.dtype))


def _lengths(rows: Params) -> Tensor:
    """Euclidean, of each row of leaves (R, ...) over all leaves, (R,)."""
    return torch.stack([leaf.flatten(1).square().sum(1) for leaf in rows.values()]).sum(0).sqrt()


def _cosines(parts: list[Tensor]) -> Tensor:
    """(R, R), between rows that are laid out in several parts (R, ...); 0 with a row of zeros."""
    products = torch.stack([part @ part.T for part in parts]).sum(0)
    length = products.diagonal().sqrt()
    return (products / (length[:, None] * length).clamp_min(torch.finfo(length.dtype).tiny)).clamp(-1, 1)
