"""lr = "auto" finds the step that trains fastest."""

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import assert_same, connect
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import Federation
from ppfl.server import InProcess, begin, choose_lr, make_problem, step_size, train
from ppfl.server.step_size import TRIAL, TRIAL_ROUNDS, _loss_after_trial
from ppfl.sites import Evaluate, Site, Stacked


def regression(scale: float) -> Federation:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(60, 3, generator=g), torch.randn(3, generator=g)
    federation = Federation.from_arrays(scale * x, x @ w, ["a", "b", "c"] * 20, test_fraction=0, task="regression")
    return federation.to(dtype=torch.float64)


def from_zero() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Flatten(0)).double()
    nn.init.zeros_(net[0].weight)
    return net


def ready(federation, population, rounds=10):
    transport = connect(federation, population, "stacked")
    return make_problem(population, transport, rounds=rounds, seed=0), transport


def test_features_ten_times_larger_take_steps_a_hundred_times_smaller() -> None:
    """w . x is unchanged by (10 x, w / 10), and SGD from 0 follows it exactly with lr / 100."""
    chosen = {}
    for scale in (1.0, 10.0):
        problem, transport = ready(regression(scale), Population(from_zero(), k=1, loss="squared"))
        chosen[scale] = choose_lr(FedAvg(batch_size=5), problem, transport).lr
    assert chosen[10.0] == pytest.approx(chosen[1.0] / 100)


def test_a_client_whose_updates_are_refused_does_not_decide_on_the_step_size() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(160, 3, generator=g), torch.randn(3, generator=g)
    ids, labels = [f"c{at % 8}" for at in range(160)], (x @ w > 0).long()
    bad = torch.tensor([client == "c3" for client in ids])
    spoiled = Federation.from_arrays(torch.where(bad[:, None], 1000 * x, x), labels ^ bad, ids, test_fraction=0)
    chosen = []
    for federation in (spoiled, spoiled.select([client for client in spoiled.ids if client != "c3"])):
        net = nn.Linear(3, 2)
        nn.init.zeros_(net.weight)
        problem, transport = ready(federation, Population(net, k=1))
        chosen.append(choose_lr(FedAvg(batch_size=5), problem, transport).lr)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("method", [FedAvg(batch_size=4), Local(batch_size=4), PPFL(batch_size=4)])
def test_no_neighbouring_step_trains_faster(method) -> None:
    population = Population(make_net(), k=2 if method.name == "ppfl" else 1)
    problem, transport = ready(make_federation((20, 30, 25)), population)
    chosen = choose_lr(method, problem, transport)
    short = problem._replace(rounds=TRIAL_ROUNDS)
    here, up, down = (
        _loss_after_trial(method.trial(chosen.lr * factor), short, transport, 0.0) for factor in (1, 10**0.5, 0.1**0.5)
    )
    assert here <= up * (1 + 1e-2)  # lr is rounded to three digits
    assert here <= down * (1 + 1e-2)
    assert chosen.model_copy(update={"lr": "auto"}) == method


def test_trials_leave_nothing_behind_at_the_sites() -> None:
    federation, population = make_federation((20, 30, 25)), Population(make_net(), k=1)
    problem, transport = ready(federation, population, rounds=3)
    chosen = choose_lr(Local(batch_size=4), problem, transport)
    assert TRIAL not in transport.sites[0].sessions
    fresh_problem, fresh = ready(federation, population, rounds=3)
    ended = []
    for problem, transport in ((problem, transport), (fresh_problem, fresh)):
        *_, (state, _) = train(chosen, problem, transport, begin(chosen, problem, transport))
        ended.append((state.server, transport.sites[0].sessions["main"].states.named("now")))
    assert_same(*ended, atol=0, rtol=0)


def test_a_step_that_was_given_is_left_alone() -> None:
    problem, transport = ready(make_federation(), Population(make_net(), k=1))
    method = FedAvg(lr=0.37)
    assert choose_lr(method, problem, transport) is method


def test_a_step_that_is_still_to_be_chosen_is_never_used_as_a_number() -> None:
    with pytest.raises(SettingError, match="set a number"):
        FedAvg().step_size(0, 10)


def test_trials_among_very_many_clients_evaluate_some_of_them(monkeypatch) -> None:
    shares = []

    class Spy(InProcess):
        def ask(self, requests):
            shares.extend(request.share for request in requests if isinstance(request, Evaluate))
            return super().ask(requests)

    population, federation = Population(make_net(), k=1), make_federation((6,) * 40)
    for most, share in ((10, 0.25), (40, 1.0), (50, 1.0)):
        monkeypatch.setattr(step_size, "TRIAL_CLIENTS", most)
        transport = Spy(Site(federation, population, Stacked()))
        chosen = choose_lr(FedAvg(), make_problem(population, transport, rounds=3), transport)
        assert 1e-5 <= chosen.lr <= 1e3 and set(shares) == {share}
        shares.clear()
