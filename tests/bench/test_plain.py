"""The loops that ppfl is timed against compute what ppfl computes: a comparison of different work would be a lie."""

import pytest
import torch
from plain import PPFL_LOOPS, Descent, FedAvgLoop
from ppfl.engines import Stacked, State, begin, pose, train

from ppfl import PPFL, FedAvg, Population
from support import make_federation, make_net

FEDERATION, NET = make_federation(), make_net()
FULL = Descent(lr=0.3, batch_size=None)
SETTINGS = {"lr": FULL.lr, "batch_size": None, "schedule": "constant"}
ROUNDS, SEED = 3, 5
NEAR = {"atol": 1e-5, "rtol": 1e-5}


def after(method, k: int, mix: str = "outputs", rounds: int = ROUNDS) -> State:
    problem = pose(Population(NET, k=k, mix=mix), FEDERATION, None, rounds=10**6, seed=SEED)
    running = train(method, problem, FEDERATION, Stacked(), begin(method, problem))
    return [next(running)[0] for _ in range(rounds)][-1]


def test_the_plain_fedavg_loop_is_fedavg() -> None:
    plain = FedAvgLoop(NET, FEDERATION, FULL)
    for _ in range(ROUNDS):
        plain()
    ours = after(FedAvg(**SETTINGS), k=1).server.shared.canonical
    assert {name: value[None].shape for name, value in plain.values.items()} == {n: v.shape for n, v in ours.items()}
    for name, value in plain.values.items():
        torch.testing.assert_close(ours[name][0], value, **NEAR)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_the_plain_ppfl_loops_are_ppfl(mix: str, steps: int) -> None:
    start = Population(NET, k=3).initial(SEED, distinct=True).canonical
    plain = PPFL_LOOPS[mix](NET, FEDERATION, FULL, start, membership_steps=steps)
    for _ in range(ROUNDS):
        plain()
    ours = after(PPFL(**SETTINGS, membership_steps=steps, start="uniform", warmup=0), k=3, mix=mix).server
    torch.testing.assert_close(ours.memberships, plain.memberships, **NEAR)
    for name, value in plain.values.items():
        torch.testing.assert_close(ours.shared.canonical[name], value, **NEAR)


def test_batches_of_a_plain_epoch_are_all_samples_once() -> None:
    x = torch.arange(10.0)[:, None]
    batches = list(Descent(lr=1.0, batch_size=4).batches(x, torch.arange(10)))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert all(bool((a[:, 0] == b).all()) for a, b in batches)
    assert torch.cat([y for _, y in batches]).sort().values.tolist() == list(range(10))
