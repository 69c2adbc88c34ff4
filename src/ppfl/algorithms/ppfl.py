"""PPFL: K canonical models shared by all, a membership vector for every client.

min over theta and C of  sum_i p_i f_i(theta, c_i) + lambda C'LC,  rows of C on the simplex  (Eq. 9).
theta block, Eq. (12):  theta_k <- theta_k + sum_{i in S} p_i |c_i|^2 (theta_ik - theta_k) / sum_{i in S} p_i c_ik
c block, Eq. (16):      c_i <- c_i exp(-eta G_i) / <c_i, exp(-eta G_i)>
With theta_ik the end of local SGD on f_i, and S the clients of the round: all of them, or a draw. Clients outside S
keep their memberships, and their neighbours are pulled to where they last were.

As written (averaging="everyone") Eq. (12) has sum_{i in S} p_i (theta_ik - theta_k) / sum_{i in S} p_i, which is how
the common part moves. The gradient for theta_k has a factor c_ik, so that a model that a quarter of the clients use
learns at a quarter of the pace; the mean over members, sum p_i c_ik, is a step of its own for every canonical model.
And a client's own network moves |c_i|^2 as fast as it would alone, which the server would draw out to a length that no
client has tried. So a client takes steps of lr / |c_i|^2 for the canonical models, and |c_i|^2 of where they lead it
counts. To first order nothing changes, and both edges are exact: equal memberships of equal models are FedAvg, one-hot
ones clustered FL.

What leaves a client: its weighted change of theta, in a sum (with mixed weights ONE model's size, whatever K
is); its membership, as a row, because neighbours are pulled to it; before the first round, with the "gradients"
start, a short sketch of its first gradient. That survey asks everyone, and again until K clients or more have answered
in one round; whoever is lost in it starts evenly, as a newcomer does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..core.draws import uniform as draw
from ..core.errors import SettingError
from ..core.objective import client_membership_gradient
from ..core.population import Population
from ..core.shared import Shared
from ..core.simplex import inside, mirror_step, uniform
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work, participants
from .descent import (
    LEARNING_RATES,
    LocalTraining,
    NonNegative,
    Positive,
    descend_mixed_weights,
    descend_models,
    kept_of_start,
    per_client,
)
from .fedavg import mean
from .memberships import MembershipSteps
from .schedules import factor
from .start import gradient_sketch, memberships_from_sketches

LEAST_SHARE = 0.1  # of an even share: a model that hardly anyone uses is not sped up without bound


class PPFLServer(NamedTuple):
    shared: Shared
    memberships: Tensor  # (M, K), as last reported
    started: Tensor  # (), bool: whether these have their start; until then rounds are surveys


class PPFLClient(NamedTuple):
    membership: Tensor  # (C, K)
    rounds: Tensor  # (C,), how often it took part; a newcomer starts from what the server sends


class Task(NamedTuple):
    """The blocks to move and the steps to take; neither block: send a sketch of the first gradient."""

    theta: bool
    memberships: bool
    lr: float
    membership_lr: float
    sketch_seed: int | None = None


class PPFL(LocalTraining):
    """Algorithm 1 (order="random") and Algorithm O1 (order="alternating", the default)."""

    name: ClassVar[str] = "ppfl"
    by_client: ClassVar[tuple[str, ...]] = ("memberships",)
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "membership_lr": (0.1, 0.3, 0.5, 1.0)}

    order: Literal["alternating", "random"] = "alternating"
    block_probability: Annotated[float, Field(gt=0, lt=1)] = 0.5  # rho_1, of the theta block in random order
    membership_lr: Positive = 0.5
    # None: 20 where outputs can be kept, so that they cost next to nothing, else 1. 0 freezes the memberships.
    membership_steps: Annotated[int, Field(ge=0)] | None = None
    membership_batch: Annotated[int, Field(ge=1)] | None = None  # None: the full gradient, sigma_2 = 0
    membership_scale: Literal["own", "weighted"] = "own"  # step eta / p_i, or eta as Eq. (16) is written
    membership_schedule: bool = False  # whether the membership step follows the schedule of lr
    penalty: NonNegative = 0.0  # lambda; it weighs a sum over all pairs, so it is strong where all are alike
    averaging: Literal["members", "everyone"] = "members"
    warmup: Annotated[int, Field(ge=0)] = 5  # rounds (a tenth at most) in which lr rises and memberships wait
    start: Literal["gradients", "uniform"] = "gradients"  # "uniform" is the paper's: c_i = 1/K, theta_k all drawn
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
        shared = problem.population.initial(problem.seed, distinct=not self._surveys(problem.population))
        c = uniform(n, k, dtype=problem.weights.dtype, device=problem.weights.device)
        started = torch.tensor(not self._surveys(problem.population), device=c.device)
        return PPFLServer(shared, c, started), PPFLClient(c.clone(), torch.zeros_like(problem.weights))

    def plan(self, problem: Problem, server: PPFLServer, round: int) -> Plan:
        if not bool(server.started):
            everyone = torch.arange(problem.n_clients)
            return Plan(everyone, Task(False, False, 0.0, 0.0, sketch_seed=problem.seed), server.shared, {})
        warming_up = round < (warm := min(self.warmup, problem.rounds // 10))
        both = self.order == "alternating"
        theta = both or warming_up or float(draw(problem.seed, "block", round)) < self.block_probability
        slower = factor(self.schedule, round, problem.rounds) if self.membership_schedule else 1.0
        task = Task(
            theta=theta,
            memberships=self.membership_steps != 0 and not warming_up and (both or not theta),
            lr=self.step_size(round, problem.rounds) * min(1.0, (round + 1) / (warm + 1)),
            membership_lr=self.membership_lr * slower,
        )
        who = participants(problem, self.participation, round)
        own = {"membership": server.memberships[who]}
        pulled = self.penalty > 0 and bool(problem.affinity.degree.any())
        if task.memberships and pulled:
            degree, neighbours = problem.affinity.majorant(server.memberships)
            own |= {"degree": degree[who], "neighbours": neighbours[who]}
        return Plan(who, task, server.shared, own, private=not pulled)

    def merge(
        self, problem: Problem, server: PPFLServer, plan: Plan, totals: dict[str, Total], rows: dict[str, Tensor]
    ) -> PPFLServer:
        memberships, who = server.memberships.clone(), plan.who
        if "sketch" in rows:
            if len(who) < problem.population.k:
                return server
            theirs = problem.weights[who], tuple(problem.ids[i] for i in who.tolist()), problem.population.k
            memberships[who] = memberships_from_sketches(rows["sketch"], *theirs, problem.seed)
            return server._replace(memberships=memberships, started=torch.ones_like(server.started))
        memberships[who] = rows["membership"]
        return server._replace(shared=_moved(server.shared, totals), memberships=memberships)

    def personal(self, server: PPFLServer, clients: PPFLClient) -> Personal:
        return Personal(server.shared, server.memberships, own=False)

    def trial(self, lr: float) -> PPFL:
        """Memberships wait: a step that is too long must not spoil them, and lr is about theta."""
        frozen = {"membership_steps": 0, "warmup": 0, "order": "alternating"}
        return super().trial(lr).model_copy(update=frozen)

    def _surveys(self, population: Population) -> bool:
        return self.start == "gradients" and population.k > 1

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
        if task.sketch_seed is not None:
            sketch = gradient_sketch(population, shared, data, task.sketch_seed)
            nothing_met = torch.zeros_like(data.weight)
            return Work(client, Upload({}, {"sketch": sketch}), nothing_met, nothing_met)
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
        scale = 1 / weight[:, None] if self.membership_scale == "own" else torch.ones_like(weight)[:, None]
        alone = weight[:, None] * scale  # all there is to G where nobody pulls
        first: Tensor | None = None
        steps = (20 if population.caches_outputs else 1) if self.membership_steps is None else self.membership_steps
        for gradient_at in MembershipSteps(population, shared, data, self.membership_batch).steps(steps):
            slope, loss = gradient_at(c)
            first = loss if first is None else first
            if "degree" in own:
                pull = own["degree"], own["neighbours"], self.penalty
                G = client_membership_gradient(slope, c, weight, *pull) * scale
            else:
                G = slope * alone
            c = inside(mirror_step(c, G, task.membership_lr))
        assert first is not None
        return c, first, data.sizes.to(weight)

    def _move_theta(
        self, population: Population, task: Task, shared: Shared, c: Tensor, data: LocalData
    ) -> tuple[dict[str, Sum], Tensor, Tensor]:
        """Local SGD on theta with c fixed; theta_k ends at kept theta_k + push_k, and the push goes into a sum."""
        collapse = self.collapse and population.collapses
        descend = descend_mixed_weights if collapse else descend_models
        as_alone = self.averaging == "members"
        met, common, pushes = descend(population, shared, c, data, self, task.lr, as_alone=as_alone)
        kept = kept_of_start(data, self, task.lr)
        sums = {
            "common": Sum(None, common),
            "kept": Sum(c if self.averaging == "members" else None, {} if kept is None else kept - 1),
            "push": Sum(c if collapse else None, pushes),
        }
        return sums, *met


def _moved(shared: Shared, totals: dict[str, Total]) -> Shared:
    """Eq. (12) for the common part; the canonical models' kept values and pushes over those who count."""
    if "push" not in totals:
        return shared
    common, kept, push = mean(totals["common"]), totals["kept"], totals["push"]
    k = len(next(iter(shared.canonical.values())))
    counted = torch.maximum(kept.weight, LEAST_SHARE / k * totals["common"].weight)  # (K,) or (1,)

    def canonical(theta: Tensor, push: Tensor) -> Tensor:  # push: (K, ...), or (1, K, ...) from K models a client
        moved = theta + (push if push.dim() == theta.dim() else push[0]) / per_client(counted, theta)
        return moved if isinstance(kept.value, dict) else moved + theta * per_client(kept.value / counted, theta)

    return Shared(
        {name: value + common[name] for name, value in shared.common.items()},
        {name: canonical(theta, push.value[name]) for name, theta in shared.canonical.items()},
    )
