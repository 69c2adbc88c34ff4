"""Fake run records with made-up truth, memberships and scores."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@dataclass
class FakeRun:
    name: str = "run"
    experiment: dict[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    metrics: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    memberships: Tensor | None = None
    memberships_by_round: dict[int, Tensor] = field(default_factory=dict)
    truth: Tensor | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    finished: bool = True


def fake_run(
    algorithm: str,
    *,
    clients: int = 40,
    groups: int = 4,
    k: int = 4,
    level: float = 0.9,
    lr: float = 0.1,
    soft: float = 0.05,
    rounds: int = 60,
    metric: str = "accuracy",
    ids: tuple[str, ...] | None = None,
    truth: bool = True,
    seed: int = 0,
) -> FakeRun:
    """soft: the alpha of the Dirichlet distribution of true mixtures; near 0 the mixtures become groups."""
    rng = np.random.default_rng(seed)
    true = torch.tensor(rng.dirichlet(np.full(groups, soft), clients))
    if soft <= 0.05:
        true = torch.eye(groups, dtype=torch.float64)[true.argmax(1)]
    found = torch.nn.functional.pad(true, (0, max(0, k - groups)))[:, :k] + 0.15 * torch.tensor(
        rng.random((clients, k))
    )
    found = (found / found.sum(1, keepdim=True))[:, rng.permutation(k)]
    noise = torch.tensor(rng.random((clients, k)))
    path = {
        t: torch.softmax(6 * (t / rounds) * (found + 0.4 * noise * (1 - t / rounds)), 1) if t < rounds else found
        for t in range(0, rounds + 1, 5)
    }
    metrics = []
    for t in range(1, rounds + 1):
        reached = 0.1 + (level - 0.1) * (1 - np.exp(-t / 8)) + 0.004 * rng.standard_normal()
        row: dict[str, Any] = {
            "round": t, "loss": 2.3 * (1.02 - reached), "participants": clients,
            "bytes_up": 26_000 * clients, "bytes_down": 26_000 * clients * k, "seconds": 0.05 + 0.01 * rng.random(),
        }  # fmt: skip
        if t % 5 == 0:
            each = np.clip(reached + 0.06 * rng.standard_normal(clients), 0, 1)
            each = np.round(each * 50) / 50 if metric == "accuracy" else (1.2 - each) ** 2
            worst = np.sort(each if metric == "accuracy" else -each)[: max(1, clients // 10)].mean()
            row |= {
                metric: float(each.mean()), f"{metric}_mean": float(each.mean()),
                f"{metric}_worst_tenth": abs(float(worst)), "test_loss": 1 - reached, "per_client": each.tolist(),
            }  # fmt: skip
        metrics.append(row)
    return FakeRun(
        name=algorithm,
        experiment={
            "name": algorithm,
            "algorithm": {"name": algorithm, "lr": lr},
            "data": {"name": "digits"},
            "population": {"k": k},
            "seeds": [seed],
        },
        ids=ids or tuple(f"site-{i:03d}" for i in range(clients)),
        metrics=metrics,
        memberships=found if k > 1 else None,
        memberships_by_round=path if k > 1 else {},
        truth=true if truth else None,
        versions={"ppfl": "0.1.0", "torch": "2.13"},
    )


@pytest.fixture
def make_run() -> Callable[..., FakeRun]:
    return fake_run


@pytest.fixture
def blank_run() -> Callable[..., FakeRun]:
    return FakeRun
