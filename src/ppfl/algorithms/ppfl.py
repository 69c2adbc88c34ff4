"""PPFL: K canonical models shared by all, a membership vector for every client.

min over theta and C of  sum_i p_i f_i(theta, c_i) + lambda C'LC,  rows of C on the simplex  (Eq. 9).
theta block, Eq. (12):  theta_k <- theta_k + sum_{i in S} p_i |c_i|^2 (theta_ik - theta_k) / sum_{i in S} p_i c_ik
c block, Eq. (16):      c_i <- c_i exp(-eta G_i) / <c_i, exp(-eta G_i)>
With theta_ik the end of local SGD on f_i, and S the clients of the round: all of them, or a draw. Clients outside S
keep their memberships, and their neighbours are pulled to where they last were.

As written (averaging="everyone") Eq. (12) has sum_{i in S} p_i (theta_ik - theta_k) / sum_{i in S} p_i, which is how
the common part moves. The gradient for theta_k has a factor c_ik, so that a model that a quarter of the clients use
learns at a quarter of the pace; the mean over members, sum p_i c_ik, is a step of its own for every canonical model.
And a client's own network moves |c_i|^2 as fast as it would alone, which the server would stretch to a length that no
client has tried. So a client takes steps of lr / |c_i|^2 for the canonical models, and |c_i|^2 of where they lead it
counts. To first order nothing changes, and both edges are exact: equal memberships of equal models are FedAvg, one-hot
ones clustered FL.

What leaves a client: its weighted change of theta, in a sum (with mixed weights ONE model's size, whatever K is). With
share_memberships = true also two rows: its membership, because neighbours are pulled to it, and before the first round,
with the "gradients" start, a short sketch of its first gradient with its importance p_i. With share_memberships = false
there are no rows: memberships stay with their clients, the server keeps nothing per client, and the start is found from
sums in ten messages, as it is with start = "sums" whatever is shared. The start asks everyone, or where participation
is below 1 the clients of its round (at least ten per canonical model), and again until K clients or more have answered
in one round. Where it did not ask everyone, clients place themselves when they first work, by a sketch that stays with
them; else those who were lost in it start evenly, as newcomers do.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..core.backends import Backend
from ..core.draws import uniform as draw
from ..core.population import Mixture, Models, Population
from ..core.settings import Count, NonNegative, Positive, RepeatsOrZero
from ..core.simplex import uniform
from ..core.trees import Params
from ..errors import SettingError
from ..io.codec import message
from .contract import Plan, Problem, Roster, Rows, Sum, Total, Upload, Work, participants
from .fedavg import Averaging
from .local.batches import LocalData
from .local.memberships import MembershipSteps
from .local.sgd import LEARNING_RATES, TrainingLoss
from .ppfl_client import PPFLTask, Stationarity, mean_change, move_memberships, move_theta, stationarity_upload
from .ppfl_start import (
    PRIVATE_STAGES,
    Placement,
    Survey,
    answer_survey,
    merge_survey,
    place_newcomers,
    plan_survey,
    send_survey,
    surveyed_clients,
)

MOST_MEMBERSHIP_STEPS = 500  # of a newcomer; it ends as soon as its membership is found


class PPFLServer(NamedTuple):
    shared: Params  # canonical leaves (K, ...)
    memberships: Tensor  # (M, K), as last reported; (0, K) where they stay with the clients
    started: Tensor  # (), bool: whether these have their start; until then rounds are surveys
    survey: Any = {}  # a PrivateStart between the messages of a survey
    placement: Any = {}  # a Placement, where clients come after the survey, to place themselves
    optimizer: Any = {}  # the state of the server's optimizer


class PPFLClient(NamedTuple):
    membership: Tensor  # (C, K)
    placed: Tensor  # (C,), 1 once it has a membership of its own; until then it takes the one that it is sent
    point: Tensor  # (C, d), its sketch along the main directions of all, for the private start


@message
class MembershipTask(NamedTuple):
    """The task of a newcomer: the membership that fits its data best, with the models as they are."""

    most_steps: int


class PPFL(Averaging):
    """Algorithm 1 (order="random") and Algorithm O1 (order="alternating", the default).

    docs/settings.md says what each setting does, under `[method]`.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=4), digits_federation(), PPFL(lr=0.1, local_epochs=2), rounds=2)
    <Fitted PPFL(lr=0.1, local_epochs=2), 2 rounds, 40 clients, accuracy ...%, shares ...>
    """

    name: ClassVar[str] = "ppfl"
    title: ClassVar[str] = "PPFL"
    several_models: ClassVar[bool] = True
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "membership_lr": (0.1, 0.3, 0.5, 1.0)}

    order: Literal["alternating", "random"] = "alternating"
    block_probability: Annotated[float, Field(gt=0, lt=1)] = 0.5  # rho_1, of the theta block in random order
    membership_lr: Positive = 0.5
    # None: 20 where outputs can be kept, so that they cost next to nothing, else 1. 0 freezes the memberships.
    membership_steps: RepeatsOrZero | None = None
    membership_batch: Count | None = None  # None: the full gradient, sigma_2 = 0
    membership_scale: Literal["own", "weighted"] = "own"  # step eta / p_i, or eta as Eq. (16) is written
    membership_schedule: bool = False  # whether the membership step follows the schedule of lr
    penalty: NonNegative = 0.0  # lambda; it weighs a sum over all pairs, so it is strong where all are alike
    averaging: Literal["members", "everyone"] = "members"
    warmup: RepeatsOrZero = 5  # rounds (a tenth at most) in which lr rises and memberships wait
    # "uniform" is the paper's: c_i = 1/K, theta_k all drawn; "sums": no client's sketch is seen, whatever is shared
    start: Literal["gradients", "sums", "uniform"] = "gradients"
    share_memberships: bool = True  # False: they stay with the clients; only without a penalty between neighbours

    @property
    def uses_affinity(self) -> bool:
        return self.penalty > 0

    @property
    def shows(self) -> tuple[str, ...]:
        if not self.share_memberships:
            return ()
        return ("membership", "sketch", "importance") if self.start == "gradients" else ("membership",)

    def penalty_value(self, problem: Problem, server: PPFLServer) -> float:
        return self.penalty * float(problem.affinity.penalty(server.memberships)) if self._pulls(problem) else 0.0

    def check(self, problem: Problem) -> None:
        if problem.population.k > problem.n_clients:
            raise SettingError(
                f"k is {problem.population.k} but there are {problem.n_clients} clients; "
                f"a canonical model needs at least one client: set k <= {problem.n_clients}"
            )
        if not self.share_memberships and self._pulls(problem):
            raise SettingError(
                f"share_memberships is false and penalty is {self.penalty:g} with an affinity between clients, but a "
                f"client is pulled to its neighbours' memberships; set penalty = 0, or share_memberships = true"
            )

    # ------------------------------------------------------------------ server

    def init_server(self, problem: Problem) -> PPFLServer:
        surveys = self.start != "uniform" and problem.population.k > 1
        shared = problem.population.initial_models(problem.seed, distinct=not surveys)
        rows = problem.n_clients if self.share_memberships else 0
        c = uniform(rows, problem.population.k, dtype=problem.population.dtype)
        placement: Any = {}
        if surveys and surveyed_clients(problem, self.participation, 0) is not None:
            placement = Placement.empty(problem, shared)
        optimizer = self.optimizer_state(shared)
        return PPFLServer(shared, c, torch.tensor(not surveys), placement=placement, optimizer=optimizer)

    def plan(self, problem: Problem, server: PPFLServer, round: int) -> Plan:
        if not bool(server.started):
            return plan_survey(self, problem, server, round)
        return Plan(participants(problem, self.participation, round), self._step(round, problem.rounds, problem.seed))

    def possible_tasks(self, round: int, rounds: int, seed: int) -> tuple[Any, ...]:
        stages = {"gradients": ("sketch",) if self.share_memberships else PRIVATE_STAGES, "sums": PRIVATE_STAGES}
        return *(Survey(stage) for stage in stages.get(self.start, ())), self._step(round, rounds, seed)

    def _step(self, round: int, rounds: int, seed: int) -> PPFLTask:
        """What is to be done in a round (from 0) once the start is known."""
        warming_up = round < (warm := min(self.warmup, rounds // 10))
        both = self.order == "alternating"
        theta = both or warming_up or float(draw(seed, "block", round)) < self.block_probability
        move = self.membership_steps != 0 and not warming_up
        slower = self.schedule_factor(round, rounds) if self.membership_schedule else 1.0
        return PPFLTask(
            theta=theta,
            memberships=move and (both or not theta),
            lr=self.step_size(round, rounds) * min(1.0, (round + 1) / (warm + 1)),
            membership_lr=self.membership_lr * slower,
        )

    def send(
        self, problem: Problem, server: PPFLServer, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shared: dict[str, Any] = {"models": server.shared}
        if isinstance(task, Survey):
            return send_survey(problem, server), {}
        if isinstance(task, PPFLTask) and server.placement:
            shared["placement"] = server.placement
        if not self.share_memberships:
            return shared, {}
        rows, own = problem.roster.rows, {}
        own["membership"] = rows(server.memberships, ids, default=1 / problem.population.k)
        moves = isinstance(task, Stationarity) or (isinstance(task, PPFLTask) and task.memberships)
        if moves and self._pulls(problem):
            degree, neighbours = problem.affinity.majorant(server.memberships)
            own |= {"degree": rows(degree, ids, default=0), "neighbours": rows(neighbours, ids, default=0)}
        return shared, own

    def merge(
        self, problem: Problem, server: PPFLServer, task: Any, totals: dict[str, Total], rows: Rows
    ) -> PPFLServer:
        if isinstance(task, Survey):
            return merge_survey(problem, server, task, totals, rows)
        if "moves" in totals:
            server = self.step(server, mean_change(problem.population, server.shared, totals))
        if not self.share_memberships:
            return server
        memberships = server.memberships.clone()
        memberships[problem.roster.positions(rows.ids)] = rows.values["membership"]
        return server._replace(memberships=memberships)

    def newcomer_plans(self, problem: Problem, server: PPFLServer) -> list[Plan]:
        """One exchange, to the end: memberships are all that a newcomer has to find."""
        return [Plan(None, MembershipTask(MOST_MEMBERSHIP_STEPS))]

    def move_server(self, server: PPFLServer, before: Roster, after: Roster) -> PPFLServer:
        if not self.share_memberships:
            return server
        even = 1 / server.memberships.shape[1]
        return server._replace(memberships=before.rows(server.memberships, after.ids, default=even))

    def for_trial(self, lr: float) -> PPFL:
        """Memberships wait: a step that is too long must not spoil them, and lr is about theta."""
        frozen = {"membership_steps": 0, "warmup": 0, "order": "alternating"}
        return super().for_trial(lr).model_copy(update=frozen)

    def stationarity_task(self, problem: Problem) -> Stationarity:
        return Stationarity(self.membership_lr)

    def stationarity(self, totals: dict[str, Total], metrics: dict[str, float]) -> float:
        """Section 3.2: |grad_theta F|^2 + (|C - C_+|_1 / eta)^2, with C_+ the mirror step on the full gradient."""
        theta = sum(float(leaf.double().square().sum()) for leaf in totals["gradient"].value.values())
        return theta + (metrics["moved"] / self.membership_lr) ** 2

    def _pulls(self, problem: Problem) -> bool:
        return self.penalty > 0 and bool(problem.affinity.degree.any())

    # ------------------------------------------------------------------ client

    def init_client(self, population: Population) -> PPFLClient:
        c = uniform(1, population.k, dtype=population.dtype)[0]
        return PPFLClient(c, c.new_zeros(()), c.new_zeros(max(1, population.k - 1)))

    def work(self, task: Any, shared: Any, own: dict[str, Tensor], state: PPFLClient, data: LocalData) -> Work:
        if isinstance(task, Survey):
            return answer_survey(task, shared, state, data)
        c = self._membership(own, state)
        if isinstance(task, Stationarity):
            return Work(state, stationarity_upload(task, shared["models"], own, c, data, self.penalty))
        sums: dict[str, Sum] = {}
        rows: dict[str, Tensor] = {}
        loss = TrainingLoss(torch.zeros_like(data.weight), torch.zeros_like(data.weight))
        if isinstance(task, MembershipTask):
            c, losses = MembershipSteps(shared["models"], data, None).best(c, task.most_steps)
            loss = TrainingLoss(losses, data.sizes.to(losses))
        else:
            if "placement" in shared:
                c = place_newcomers(shared["placement"], c, state.placed, data)
            if task.memberships:
                c, loss = move_memberships(self, task, shared["models"], own, c, data)
            if task.theta:
                sums, loss = move_theta(self, task, shared["models"], c, data)
            rows = {"membership": c} if self.share_memberships else {}
        placed = state._replace(membership=c, placed=torch.ones_like(state.placed))
        return Work(placed, Upload(sums, rows, loss.metrics()))

    def model(self, backend: Backend, shared: Any, own: dict[str, Tensor], state: PPFLClient) -> Models:
        return Mixture(shared["models"], self._membership(own, state))

    def _membership(self, own: dict[str, Tensor], client: PPFLClient) -> Tensor:
        sent = own.get("membership", client.membership)
        return torch.where(client.placed[:, None] > 0, client.membership, sent)
