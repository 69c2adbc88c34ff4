"""The product agrees with naive twins written from the pseudocode (tests/naive.py)."""

import pytest
import torch
from ppfl.algorithms.schedules import factor
from ppfl.engines import fit

import naive
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core import affinity
from ppfl.core.population import Population
from support import make_federation, make_net

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED, K = 6, 3, 3
W = affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
TIGHT = {"atol": 1e-9, "rtol": 1e-9}


def lr_factor(t: int) -> float:
    return factor("step", t, ROUNDS)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize(
    "settings",
    [
        {"order": "alternating"},
        {"order": "random", "block_probability": 0.4},
        {"order": "random", "membership_scale": "weighted", "membership_lr": 3.0},
        {"order": "alternating", "local_steps": 5, "momentum": 0.0, "penalty": 0.0},
        {"order": "alternating", "averaging": "members", "weight_decay": 0.0},
    ],
    ids=["algorithm-O1", "algorithm-1", "algorithm-1-as-written", "five-plain-steps", "mean-over-members"],
)
def test_ppfl_is_its_pseudocode(engine: str, mix: str, settings: dict) -> None:
    literal = {
        "averaging": "everyone",
        "start": "uniform",
        "membership_steps": 1,
        "lr": 0.2,
        "weight_decay": 0.01,
        "batch_size": 4,
    }
    method = PPFL(**{**literal, "penalty": 0.05, **settings})
    population = Population(NET, k=K, mix=mix)
    fitted = fit(population, FEDERATION, method, rounds=ROUNDS, affinity=W, engine=engine, seed=SEED)
    twin, C = naive.ppfl(
        FEDERATION, NET, K, mix, method, W.neighbours(torch.eye(4, dtype=torch.float64)),
        population.initial(SEED, distinct=True), ROUNDS, SEED, lr_factor,
    )  # fmt: skip
    torch.testing.assert_close(fitted.memberships, C, **TIGHT)
    for k, net in enumerate(twin.nets):
        for name, expected in net.named_parameters():
            torch.testing.assert_close(fitted.state.server.shared.canonical[name][k], expected.detach(), **TIGHT)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_fedavg_is_its_pseudocode(engine: str) -> None:
    method = FedAvg(lr=0.2, weight_decay=0.01, batch_size=4)
    fitted = fit(Population(NET, k=1), FEDERATION, method, rounds=ROUNDS, engine=engine, seed=SEED)
    twin = naive.fedavg(FEDERATION, NET, method, ROUNDS, SEED, lr_factor)
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(fitted.state.server.shared.canonical[name][0], expected.detach(), **TIGHT)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_local_is_its_pseudocode(engine: str) -> None:
    method = Local(lr=0.2, weight_decay=0.01, batch_size=4, local_epochs=2)
    fitted = fit(Population(NET, k=1), FEDERATION, method, rounds=ROUNDS, engine=engine, seed=SEED)
    for i, twin in enumerate(naive.local(FEDERATION, NET, method, ROUNDS, SEED, lr_factor)):
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(fitted.state.clients.canonical[name][i, 0], expected.detach(), **TIGHT)
