"""The plain loops that ppfl is timed against compute what ppfl computes, so that the comparison is fair."""

import pytest
import torch
from methods import SEED, rounds_in_process
from plain import PPFL_LOOPS, Descent, FedAvgLoop, clients_of
from plain_processes import FedAvgProcesses
from workloads import Workload

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Population
from ppfl.sites import Stacked

FEDERATION, NET = make_federation(), make_net()
FULL = Descent(lr=0.3, batch_size=None)
SETTINGS = {"lr": FULL.lr, "batch_size": None, "schedule": "constant"}
ROUNDS = 3
NEAR = {"atol": 1e-5, "rtol": 1e-5}


def server_after(method, k: int, mix: str = "outputs", rounds: int = ROUNDS):
    running = rounds_in_process(method, Workload(NET, FEDERATION, None), Stacked(), k, mix)
    return [next(running)[0] for _ in range(rounds)][-1].server


def test_the_plain_fedavg_loop_is_fedavg() -> None:
    plain = FedAvgLoop(NET, clients_of(FEDERATION), FULL)
    for _ in range(ROUNDS):
        plain()
    ours = server_after(FedAvg(**SETTINGS), k=1).shared
    assert ours.keys() == plain.values.keys()
    for name, value in plain.values.items():
        torch.testing.assert_close(ours[name], value, **NEAR)


def test_the_plain_loop_on_two_processes_is_the_plain_loop() -> None:
    one, two = FedAvgLoop(NET, clients_of(FEDERATION), FULL), FedAvgProcesses(NET, FEDERATION, FULL)
    for _ in range(ROUNDS):
        one()
        two()
    for name, value in one.values.items():
        torch.testing.assert_close(two.values[name], value, **NEAR)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_the_plain_ppfl_loops_are_ppfl(mix: str, steps: int) -> None:
    start = Population(NET, k=3).initial_models(SEED, distinct=True)
    plain = PPFL_LOOPS[mix](NET, FEDERATION, FULL, start, membership_steps=steps)
    for _ in range(ROUNDS):
        plain()
    ours = server_after(PPFL(**SETTINGS, membership_steps=steps, start="uniform", warmup=0), k=3, mix=mix)
    torch.testing.assert_close(ours.memberships, plain.memberships, **NEAR)
    for name, value in plain.values.items():
        torch.testing.assert_close(ours.shared[name], value, **NEAR)


def test_batches_of_a_plain_epoch_are_all_samples_once() -> None:
    x = torch.arange(10.0)[:, None]
    batches = list(Descent(lr=1.0, batch_size=4).batches(x, torch.arange(10)))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert all(bool((a[:, 0] == b).all()) for a, b in batches)
    assert torch.cat([y for _, y in batches]).sort().values.tolist() == list(range(10))
