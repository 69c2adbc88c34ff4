"""lr = "auto" finds the step that trains fastest."""

import pytest
import torch
from ppfl.engines import engine_by_name, pose, with_chosen_lr
from ppfl.engines.tune import TRIAL_ROUNDS, _loss_after_trial
from torch import nn

from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import Federation
from support import make_federation, make_net

ENGINE = engine_by_name("stacked")


def regression(scale: float) -> Federation:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(60, 3, generator=g), torch.randn(3, generator=g)
    federation = Federation.from_arrays(scale * x, x @ w, ["a", "b", "c"] * 20, test_fraction=0, task="regression")
    return federation.to(dtype=torch.float64)


def from_zero() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Flatten(0)).double()
    nn.init.zeros_(net[0].weight)
    return net


def test_features_ten_times_larger_take_steps_a_hundred_times_smaller() -> None:
    """w . x is unchanged by (10 x, w / 10), and SGD from 0 follows it exactly with lr / 100."""
    chosen = {}
    for scale in (1.0, 10.0):
        federation = regression(scale)
        problem = pose(Population(from_zero(), k=1, loss="squared"), federation, None, 10, seed=0)
        chosen[scale] = with_chosen_lr(FedAvg(batch_size=5), problem, federation, ENGINE).lr
    assert chosen[10.0] == pytest.approx(chosen[1.0] / 100)


@pytest.mark.parametrize("method", [FedAvg(batch_size=4), Local(batch_size=4), PPFL(batch_size=4)])
def test_no_neighbouring_step_trains_faster(method) -> None:
    federation = make_federation((20, 30, 25))
    problem = pose(Population(make_net(), k=2 if method.name == "ppfl" else 1), federation, None, 10, seed=0)
    chosen = with_chosen_lr(method, problem, federation, ENGINE)
    short = problem._replace(rounds=TRIAL_ROUNDS)
    here, up, down = (
        _loss_after_trial(method.trial(chosen.lr * factor), short, federation, ENGINE)
        for factor in (1, 10**0.5, 0.1**0.5)
    )
    assert here <= up * (1 + 1e-2)  # lr is rounded to three digits
    assert here <= down * (1 + 1e-2)
    assert chosen.model_copy(update={"lr": "auto"}) == method


def test_a_given_step_is_left_alone() -> None:
    federation = make_federation()
    problem = pose(Population(make_net(), k=1), federation, None, 10, seed=0)
    method = FedAvg(lr=0.37)
    assert with_chosen_lr(method, problem, federation, ENGINE) is method


def test_an_open_choice_is_never_used_as_a_number() -> None:
    with pytest.raises(SettingError, match="set a number"):
        FedAvg().step_size(0, 10)
