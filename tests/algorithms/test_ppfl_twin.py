"""PPFL agrees with the naive twin written from the pseudocode (tests/naive.py)."""

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import positions_of, run
from kit.twins import ppfl as naive
from ppfl.algorithms import PPFL
from ppfl.core import affinity
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED, K = 6, 3, 3
W = affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
AS_WRITTEN = {
    "averaging": "everyone", "start": "uniform", "membership_steps": 1, "penalty": 0.05,
    "lr": 0.2, "weight_decay": 0.01, "batch_size": 4,
}  # fmt: skip
MEMBERS = {"averaging": "members", "weight_decay": 0.05}
SOME = {"participation": 0.5}
MIXES = ["outputs", "predictions", "weights"]


CASES = {  # settings, canonical part, engine, ways of mixing
    "algorithm-O1": ({}, "all", "loop", MIXES),
    "algorithm-1": ({"order": "random", "block_probability": 0.4}, "all", "stacked", ["predictions"]),
    "algorithm-1-unscaled": (
        {"order": "random", "membership_scale": "weighted", "membership_lr": 3.0}, "all", "stacked", ["weights"],
    ),
    "five-plain-steps": ({"local_steps": 5, "momentum": 0.0, "penalty": 0.0}, "all", "stacked", ["outputs"]),
    "common-part-some-clients": (SOME, "2", "stacked", MIXES),
    "random-common-part-some-clients": ({**SOME, "order": "random"}, "2", "stacked", ["predictions"]),
    "members": (MEMBERS, "all", "stacked", ["outputs", "weights"]),
    "members-common-part": ({**MEMBERS, "local_epochs": 2}, "2", "stacked", ["predictions"]),
    "members-common-part-some-clients": ({**MEMBERS, **SOME}, "2", "loop", MIXES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "canonical", "engine", "mix"),
    [
        pytest.param(settings, canonical, engine, mix, id=f"{name}-{mix}")
        for name, (settings, canonical, engine, mixes) in CASES.items()
        for mix in mixes
    ],
)
def test_ppfl_is_its_pseudocode(settings: dict, canonical: str, engine: str, mix: str) -> None:
    method = PPFL(**{**AS_WRITTEN, **settings})
    population = Population(NET, k=K, mix=mix, canonical=canonical)
    found = run(method, population, FEDERATION, rounds=ROUNDS, affinity=W, engine=engine, seed=SEED)
    start = population.initial_models(SEED, distinct=True)
    twin, C = naive.ppfl(
        FEDERATION,
        naive.NaivePopulation(NET, K, mix, start, population.canonical_names),
        method,
        W.neighbours(torch.eye(4, dtype=torch.float64)),
        ROUNDS,
        SEED,
        lambda t: method.step_size(t, ROUNDS),
        lambda t: positions_of(found.problem, method, t),
    )
    torch.testing.assert_close(found.memberships, C, **TIGHT)
    assert float((C - 1 / K).abs().amax(1).min()) > 1e-4  # every client took part and moved
    for k, net in enumerate(twin.nets):
        for name, expected in net.named_parameters():
            theta = found.server.shared[name]
            ours = theta[k] if name in population.canonical_names else theta
            torch.testing.assert_close(ours, expected.detach(), **TIGHT)
