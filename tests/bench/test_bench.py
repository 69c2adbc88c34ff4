"""Plain loops compute what ppfl computes, timed rounds do what they say, memory follows the clients at work."""

import gc
import math
from contextlib import suppress

import pytest
import registered
import torch
from methods import SEED, ppfl, rounds_in_process
from plain import PPFL_LOOPS, Descent, FedAvgLoop, clients_of
from plain_processes import FedAvgProcesses
from steps_alone import steps_alone
from workloads import Workload, flops

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Federation, Population
from ppfl.data import Samples
from ppfl.server import InProcess, begin, make_problem, train
from ppfl.sites import Site, Stacked

FEDERATION, NET = make_federation(), make_net()
FULL = Descent(lr=0.3, batch_size=None)
SETTINGS = {"lr": FULL.lr, "batch_size": None, "schedule": "constant"}


def after_three_rounds(method, k: int, mix: str = "outputs"):
    running = rounds_in_process(method, Workload(NET, FEDERATION, None), Stacked(), k, mix)
    return [next(running)[0] for _ in range(3)][-1].server


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_the_plain_fedavg_loops_are_fedavg(processes: int) -> None:
    one = FedAvgLoop(NET, clients_of(FEDERATION), FULL) if processes == 1 else FedAvgProcesses(NET, FEDERATION, FULL)
    for _ in range(3):
        one()
    ours = after_three_rounds(FedAvg(**SETTINGS), k=1)
    torch.testing.assert_close(dict(ours.shared), dict(one.values), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mix", "steps"), [("outputs", 0), ("outputs", 3), ("weights", 1)])
def test_the_plain_ppfl_loops_are_ppfl(mix: str, steps: int) -> None:
    start = Population(NET, k=3).initial_models(SEED, distinct=True)
    plain = PPFL_LOOPS[mix](NET, FEDERATION, FULL, start, membership_steps=steps)
    for _ in range(3):
        plain()
    ours = after_three_rounds(PPFL(**SETTINGS, membership_steps=steps, start="uniform", warmup=0), k=3, mix=mix)
    torch.testing.assert_close(dict(ours.shared), dict(plain.values), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.memberships, plain.memberships, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("theta", "steps"), [(True, 0), (False, 1), (True, 1)])
def test_a_timed_round_moves_the_blocks_it_is_named_for(theta: bool, steps: int, monkeypatch) -> None:
    plan, asked = PPFL.plan, set()

    def watched(self, *arguments):
        planned = plan(self, *arguments)
        asked.add((planned.task.theta, planned.task.memberships))
        return planned

    monkeypatch.setattr(PPFL, "plan", watched)
    one_round = ppfl(Workload(NET, FEDERATION, batch_size=4), k=2, mix="outputs", theta=theta, steps=steps)
    assert all(math.isfinite(one_round().loss) for _ in range(5))
    assert asked == {(theta, steps > 0)}


def test_limits_count_all_products_of_a_step():
    d, h, c, n = 4, 5, 3, len(FEDERATION.train)
    assert flops(Workload(NET, FEDERATION, None)) == (n * 2 * (d * h + h * c), n * 2 * (2 * d * h + 3 * h * c))


def bytes_of_tensors() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask proxies for their class
            with suppress(RuntimeError):  # sparse and fake tensors of other tests have no storage
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_after_training(case: registered.Case, clients: int) -> int:
    before, population = bytes_of_tensors(), case.population()
    transport = InProcess(Site(case.federation(clients), population, Stacked(), states_on_disk=True))
    problem, method = make_problem(population, transport, rounds=2), case.method(20 / clients)
    for _state, report in train(method, problem, transport, begin(method, problem, transport)):
        assert report.participants in (20, 10 * population.k)  # the first round may be a survey
    return bytes_of_tensors() - before


@pytest.mark.parametrize("name", registered.CASES)
def test_a_registered_client_costs_a_few_numbers(name: str) -> None:
    """At most 60 bytes, and what is shown to the server, now and before (4 K each)."""
    case = registered.CASES[name]
    few, many = (bytes_after_training(case, clients) for clients in (500, 4_500))
    assert 0 < (many - few) / 4_000 <= 60 + 2 * 4 * case.population().k


def alike() -> Workload:
    """Three clients with the same samples: what the server has after a round is what each of them has."""
    x, y = FEDERATION.train.x[:6], FEDERATION.train.y[:6]
    return Workload(NET, Federation(("a", "b", "c"), Samples(x.repeat(3, 1), y.repeat(3), 6 * torch.arange(4))), None)


def test_local_steps_alone_are_those_of_fedavg() -> None:
    values, _ = steps_alone(alike(), FULL.lr, membership_lr=0.5)()
    server = next(rounds_in_process(FedAvg(**SETTINGS), alike(), Stacked()))[0].server
    for name, value in values.items():
        torch.testing.assert_close(value, server.shared[name].expand_as(value))


@pytest.mark.parametrize("mix", ["weights", "outputs"])
def test_membership_steps_alone_are_those_of_ppfl(mix: str) -> None:
    _, c = steps_alone(alike(), FULL.lr, membership_lr=0.5, k=3, mix=mix, steps=2)()
    method = PPFL(**SETTINGS, membership_steps=2, membership_lr=0.5, start="uniform", warmup=0)
    server = next(rounds_in_process(method, alike(), Stacked(), 3, mix))[0].server
    torch.testing.assert_close(c, server.memberships)
    assert (c - 1 / 3).abs().max() > 1e-3
