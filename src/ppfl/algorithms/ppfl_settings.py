"""What can be set of PPFL, what its server and its clients hold, and the tasks that clients get."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from ..core.settings import Count, NonNegative, Positive, RepeatsOrZero
from ..core.trees import Params
from ..io.codec import message
from .fedavg import Averaging


class PPFLSettings(Averaging):
    """The settings of PPFL beside those of local training and of the server's optimizer."""

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
    start: Literal["gradients", "uniform"] = "gradients"  # "uniform" is the paper's: c_i = 1/K, theta_k all drawn
    share_memberships: bool = True  # False: they stay with the clients; only without a penalty between neighbours
    collapse: bool = True  # short cut 1 for mixed weights; False runs all K models, for checking


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
class PPFLTask(NamedTuple):
    """The blocks to move and the steps to take."""

    theta: bool
    memberships: bool
    lr: float
    membership_lr: float


@message
class MembershipTask(NamedTuple):
    """The task of a newcomer: the membership that fits its data best, with the models as they are."""

    most_steps: int
