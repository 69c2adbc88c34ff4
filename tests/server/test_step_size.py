"""lr = "auto" finds the step that trains fastest."""

import pytest
import torch
from torch import nn

from kit.networks import make_net, with_seed
from kit.problems import make_federation
from kit.refusals import SettingError, assert_refused
from kit.training import Recording, assert_same, connect
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core import Population
from ppfl.data import Federation
from ppfl.server import begin, choose_lr, client_states, evaluate, make_problem, step_size, train
from ppfl.sites import Evaluate, Train


def ready(federation, population, rounds=10):
    transport = connect(federation, population, "stacked", kind=Recording)
    return make_problem(population, transport, rounds=rounds, seed=0), transport


def chosen_for(federation, population) -> float:
    return choose_lr(FedAvg(batch_size=5), *ready(federation, population)).lr


def drawn(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(samples, 3, generator=g), torch.randn(3, generator=g)
    return x, x @ w


def test_features_ten_times_larger_take_steps_a_hundred_times_smaller():
    """w . x is unchanged by (10 x, w / 10), and SGD from 0 follows it exactly with lr / 100."""
    (x, y), chosen = drawn(60), []
    net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Flatten(0)).double()
    nn.init.zeros_(net[0].weight)
    for scale in (1, 10):
        federation = Federation.from_arrays(scale * x, y, ["a", "b", "c"] * 20, test_fraction=0, task="regression")
        chosen.append(chosen_for(federation.to(dtype=torch.float64), Population(net, k=1, loss="squared")))
    assert chosen[1] == pytest.approx(chosen[0] / 100)


def test_a_client_whose_updates_are_refused_does_not_decide_on_the_step_size():
    net = with_seed(lambda: nn.Sequential(nn.Linear(3, 2)), dtype=torch.float32)
    nn.init.zeros_(net[0].weight)
    (x, y), ids = drawn(160), [f"c{at % 8}" for at in range(160)]
    bad = torch.tensor([client == "c3" for client in ids])
    spoiled = Federation.from_arrays(torch.where(bad[:, None], 1000 * x, x), (y > 0).long() ^ bad, ids, test_fraction=0)
    others = spoiled.select([client for client in spoiled.ids if client != "c3"])
    assert chosen_for(spoiled, Population(net, k=1)) == chosen_for(others, Population(net, k=1))


@pytest.mark.parametrize("method", [FedAvg(batch_size=4), Local(batch_size=4), PPFL(batch_size=4)])
def test_no_neighbouring_step_trains_faster(method):
    federation, population = make_federation((20, 30, 25)), Population(make_net(), k=2 if method.name == "ppfl" else 1)

    def loss_after(lr: float) -> float:
        problem, transport = ready(federation, population, rounds=step_size.TRIAL_ROUNDS)
        trial = method.for_trial(lr)
        *_, (state, _) = train(trial, problem, transport, begin(trial, problem, transport))
        return evaluate(trial, problem, transport, state.server, ("train",)).splits["train"].loss.weighted

    chosen = choose_lr(method, *ready(federation, population))
    assert chosen.model_copy(update={"lr": "auto"}) == method
    assert choose_lr(chosen, *ready(federation, population)) is chosen  # a step that was given is left alone
    assert_refused(lambda: method.step_size(0, 10), SettingError, "set a number")
    neighbours = loss_after(chosen.lr * 10**0.5), loss_after(chosen.lr * 0.1**0.5)
    assert loss_after(chosen.lr) <= min(neighbours) * (1 + 1e-2)  # lr is rounded to three digits


def test_trials_leave_nothing_behind_at_the_sites():
    federation, population = make_federation((20, 30, 25)), Population(make_net(), k=1)
    problem, transport = ready(federation, population, rounds=3)
    chosen = choose_lr(Local(batch_size=4), problem, transport)
    trials = {request.session for request, _ in transport.log if isinstance(request, Train)}
    assert trials and not trials & transport.sites[0].sessions.keys()
    ended = []
    for one in (transport, ready(federation, population)[1]):
        *_, (state, _) = train(chosen, problem, one, begin(chosen, problem, one))
        ended.append((state.server, client_states(one, state).rows.values))
    assert_same(*ended, atol=0, rtol=0)


def test_trials_among_very_many_clients_evaluate_some_of_them(monkeypatch):
    population, federation = Population(make_net(), k=1), make_federation((6,) * 40)
    for most, share in ((10, 0.25), (50, 1.0)):
        monkeypatch.setattr(step_size, "TRIAL_CLIENTS", most)
        problem, transport = ready(federation, population, rounds=3)
        choose_lr(FedAvg(), problem, transport)
        assert {request.share for request, _ in transport.log if isinstance(request, Evaluate)} == {share}
