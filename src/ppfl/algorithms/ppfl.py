"""PPFL: K canonical models shared by all, a membership vector for every client.

min over theta and C of  sum_i p_i f_i(theta, c_i) + lambda C'LC,  rows of C on the simplex  (Eq. 9).
theta block, Eq. (12):  theta <- theta + sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i
c block, Eq. (16):      c_i <- c_i exp(-eta G_i) / <c_i, exp(-eta G_i)>
With S the clients of the round: all of them, or a draw. Clients outside S keep their memberships, and their
neighbours are pulled to where they last were.

What leaves a client: its weighted change of theta, in a sum (with mixed weights ONE model's size, whatever K
is); its membership, as a row, because neighbours are pulled to it; before the first round, with the "gradients"
start, a short sketch of its first gradient.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.draws import uniform as draw
from ..core.errors import SettingError
from ..core.objective import client_membership_gradient
from ..core.population import Population, Shared
from ..core.simplex import inside, mirror_step, uniform
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work, participants
from .descent import LocalTraining, NonNegative, Positive, descend, descend_mixed_weights, spread
from .fedavg import mean
from .memberships import MembershipLoss
from .schedules import factor


class PPFLServer(NamedTuple):
    shared: Shared
    memberships: Tensor  # (M, K), as last reported


class PPFLClient(NamedTuple):
    membership: Tensor  # (C, K)
    rounds: Tensor  # (C,), how often it took part; a newcomer starts from what the server sends


class Task(NamedTuple):
    theta: bool
    memberships: bool
    lr: float
    membership_lr: float


class PPFL(LocalTraining):
    """Algorithm 1 (order="random") and Algorithm O1 (order="alternating", the default)."""

    name: ClassVar[str] = "ppfl"

    order: Literal["alternating", "random"] = "alternating"
    block_probability: Annotated[float, Field(gt=0, lt=1)] = 0.5  # rho_1, of the theta block in random order
    membership_lr: Positive = 0.5
    membership_steps: Annotated[int, Field(ge=0)] = 1  # 0 freezes the memberships
    membership_batch: Annotated[int, Field(ge=1)] | None = None  # None: the full gradient, sigma_2 = 0
    membership_scale: Literal["own", "weighted"] = "own"  # step eta / p_i, or eta as Eq. (16) is written
    membership_schedule: bool = False  # whether the membership step follows the schedule of lr
    penalty: NonNegative = 1e-5  # lambda; without an affinity nobody pulls
    start: Literal["uniform"] = "uniform"
    collapse: bool = True  # short cut 1 for mixed weights; False runs all K models, for checking

    def check(self, problem: Problem) -> None:
        if problem.population.k > problem.n_clients:
            raise SettingError(
                f"k is {problem.population.k} but there are {problem.n_clients} clients; "
                f"a canonical model needs at least one client: set k <= {problem.n_clients}"
            )

    # ------------------------------------------------------------------ server

    def init(self, problem: Problem) -> tuple[PPFLServer, PPFLClient]:
        k, n = problem.population.k, problem.n_clients
        shared = problem.population.initial(problem.seed, distinct=True)
        c = uniform(n, k, dtype=problem.weights.dtype, device=problem.weights.device)
        return PPFLServer(shared, c), PPFLClient(c.clone(), torch.zeros_like(problem.weights))

    def plan(self, problem: Problem, server: PPFLServer, round: int) -> Plan:
        step = factor(self.schedule, round, problem.rounds)
        theta = self.order == "alternating" or float(draw(problem.seed, "block", round)) < self.block_probability
        task = Task(
            theta=theta,
            memberships=self.membership_steps > 0 and (self.order == "alternating" or not theta),
            lr=self.lr * step,
            membership_lr=self.membership_lr * (step if self.membership_schedule else 1.0),
        )
        who = participants(problem, self.participation, round)
        own = {"membership": server.memberships[who]}
        if task.memberships and self.penalty > 0 and bool(problem.affinity.degree.any()):
            own["degree"] = problem.affinity.degree[who]
            own["neighbours"] = problem.affinity.neighbours(server.memberships)[who]
        return Plan(who, task, server.shared, own)

    def merge(
        self, problem: Problem, server: PPFLServer, plan: Plan, totals: dict[str, Total], rows: dict[str, Tensor]
    ) -> PPFLServer:
        memberships = server.memberships.clone()
        memberships[plan.who] = rows["membership"]
        return PPFLServer(_moved(server.shared, totals), memberships)

    def personal(self, server: PPFLServer, clients: PPFLClient) -> Personal:
        return Personal(server.shared, server.memberships, own=False)

    # ------------------------------------------------------------------ client

    def work(
        self,
        population: Population,
        task: Task,
        shared: Shared,
        own: dict[str, Tensor],
        client: PPFLClient,
        data: LocalData,
    ) -> Work:
        c = torch.where(client.rounds[:, None] > 0, client.membership, own["membership"])
        loss = samples = torch.zeros_like(data.weight)
        sums: dict[str, Sum] = {}
        if task.memberships:
            c, loss, samples = self._move_memberships(population, task, shared, own, c, data)
        if task.theta:
            sums, loss, samples = self._move_theta(population, task, shared, c, data)
        return Work(PPFLClient(c, client.rounds + 1), Upload(sums, {"membership": c}), loss, samples)

    def _move_memberships(
        self,
        population: Population,
        task: Task,
        shared: Shared,
        own: dict[str, Tensor],
        c: Tensor,
        data: LocalData,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mirror steps on the surrogate of Eq. (13), theta and the neighbours fixed."""
        weight = data.weight
        nobody = torch.zeros_like(weight), torch.zeros_like(c)
        degree, neighbours = own.get("degree", nobody[0]), own.get("neighbours", nobody[1])
        scale = 1 / weight[:, None] if self.membership_scale == "own" else 1.0
        first: Tensor | None = None
        for gradient_at in MembershipLoss(population, shared, data, self.membership_batch).steps(self.membership_steps):
            slope, loss = gradient_at(c)
            first = loss if first is None else first
            G = client_membership_gradient(slope, c, weight, degree, neighbours, self.penalty)
            c = inside(mirror_step(c, G * scale, task.membership_lr))
        assert first is not None
        return c, first, data.sizes.to(weight)

    def _move_theta(
        self, population: Population, task: Task, shared: Shared, c: Tensor, data: LocalData
    ) -> tuple[dict[str, Sum], Tensor, Tensor]:
        """Local SGD on theta with c fixed; the change goes into sums."""
        p = data.weight[:, None]
        if self.collapse and population.mix.name == "weights":
            end = descend_mixed_weights(population, shared, c, data, self, task.lr)
            common = pytree.tree_map(torch.sub, end.values.common, spread(shared.common, len(c)))
            sums = {
                "common": Sum(p, (common, end.values.kept - 1)),
                "canonical": Sum(p * c, end.values.moved),
            }
        else:
            start = spread(shared, len(c))
            end = descend(
                lambda at, batch: population.theta_gradients(at, c, batch.x, batch.y, batch.weight),
                start,
                self.batches(data),
                self,
                task.lr,
            )
            sums = {"change": Sum(p, pytree.tree_map(torch.sub, end.values, start))}
        return sums, end.loss, end.samples


def _moved(shared: Shared, totals: dict[str, Total]) -> Shared:
    """Eq. (12), from the change of all K models or, with mixed weights, from a and A of short cut 1."""
    if "change" in totals:
        moved: Shared = pytree.tree_map(torch.add, shared, mean(totals["change"]))
        return moved
    if "canonical" not in totals:
        return shared
    common, lost = mean(totals["common"])
    everyone = totals["common"].weight[0]
    return Shared(
        {name: value + common[name] for name, value in shared.common.items()},
        {
            name: theta * (1 + lost) + totals["canonical"].value[name] / everyone
            for name, theta in shared.canonical.items()
        },
    )
