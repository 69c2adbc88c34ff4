"""Made-up runs and fitted tables for reports."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.report import PopulationResults


@dataclass
class FakeRun:
    """What a report reads of a run."""

    name: str = "run"
    experiment: dict[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    metrics: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    memberships: Tensor | None = None
    memberships_by_round: dict[int, Tensor] = field(default_factory=dict)
    truth: Tensor | None = None
    versions: dict[str, Any] = field(default_factory=lambda: {"ppfl": "0.1.0", "torch": "2.13"})
    finished: bool = True


def fake_run(
    algorithm: str, *, clients: int = 40, groups: int = 4, k: int = 4, level: float = 0.9, lr: float = 0.1,
    soft: float = 0.0, rounds: int = 60, metric: str = "accuracy", sent: float = 1e5, truth: bool = True, seed: int = 0,
) -> FakeRun:  # fmt: skip
    """Its score rises to about `level`, and is measured every fifth round. Each client sends and receives `sent` bytes
    per round in all. soft: alpha of the Dirichlet distribution of the true mixtures; 0 gives groups."""
    rng = np.random.default_rng(seed)
    true = torch.tensor(rng.dirichlet(np.full(groups, soft or 0.05), clients))
    true = true if soft else torch.eye(groups, dtype=torch.float64)[true.argmax(1)]
    found = torch.nn.functional.pad(true, (0, max(0, k - groups)))[:, :k] + 0.15 * torch.tensor(
        rng.random((clients, k))
    )
    found = (found / found.sum(1, keepdim=True))[:, rng.permutation(k)]
    metrics = []
    for t in range(1, rounds + 1):
        reached = 0.1 + (level - 0.1) * (1 - np.exp(-t / 8)) + 0.004 * rng.standard_normal()
        row = {"round": t, "loss": 2.3 * (1.02 - reached), "participants": clients, "seconds": 0.05}
        row |= {"bytes_up": sent * clients / 2, "bytes_down": sent * clients / 2}
        if t % 5 == 0:
            each = np.clip(reached + 0.06 * rng.standard_normal(clients), 0, 1)
            each = np.round(each * 50) / 50 if metric == "accuracy" else (1.2 - each) ** 2
            worst = np.sort(each if metric == "accuracy" else -each)[: max(1, clients // 10)].mean()
            row |= {metric: each.mean(), f"{metric}_mean": each.mean(), f"{metric}_worst_tenth": abs(worst)}
            row |= {"test_loss": 1 - reached, "per_client": each.tolist()}
        metrics.append(row)
    return FakeRun(
        name=algorithm,
        experiment={"name": algorithm, "algorithm": {"name": algorithm, "lr": lr}, "data": {"name": "digits"},
                    "population": {"k": k}, "seeds": [seed]},
        ids=tuple(f"site-{i:03d}" for i in range(clients)),
        metrics=metrics,
        memberships=found if k > 1 else None,
        memberships_by_round=dict.fromkeys(range(0, rounds + 1, 5), found) if k > 1 else {},
        truth=true if truth else None,
    )  # fmt: skip


def effect(outcome: str, name: str, values: list[float], pooled: float, **more: Any) -> SimpleNamespace:
    """A line of the table of coefficients."""
    return SimpleNamespace(**{"outcome": outcome, "name": name, "values": values, "pooled": pooled, "is_shared": False,
                              "reach": None, "pooled_reach": 0.0, **more})  # fmt: skip


def tried(k: int, bic: float, held_out: float | None = None, error: float | None = None) -> SimpleNamespace:
    """A number of canonical models that was tried."""
    return SimpleNamespace(k=k, bic=bic, aic=bic, log_likelihood=-100.0, held_out=held_out, held_out_error=error)


def fake_table(k: int = 3, clients: int = 20, **changes: Any) -> PopulationResults:
    random = np.random.default_rng(0)
    c, values = random.dirichlet(np.full(k, 0.5), clients), random.normal(size=k).tolist()
    ways = {"ours": 2.0, "one model for all": 4.0, "each": 3.0}
    found = PopulationResults(
        title="sold in shops", command="ppfl glm shops.csv", notes=["family gaussian"], client="shop", target="sold",
        features=["price", "day"], family="gaussian", classes=(), mix="weights", rows=100, held_out_rows=20,
        ids=[f"s{i}" for i in range(clients)], sizes=[5] * clients, memberships=c.tolist(),
        clear=(c >= 0.8).sum(0).tolist(), clear_from=0.8,
        average=[effect("sold", "an average row", values, 0.1, reach=values)],
        coefficients=[
            effect("sold", "intercept", values, 1.0),
            effect("sold", "price", values, -1.0, reach=values, pooled_reach=0.3),
            effect("sold", "day", [0.5] * k, 0.5, is_shared=True, reach=[0.2] * k, pooled_reach=0.2),
        ],
        candidates=[tried(1, 300.0), tried(k, 200.0)],
        scores=[SimpleNamespace(label=label, figures={"rmse": rmse}, seconds=0.5) for label, rmse in ways.items()],
    )  # fmt: skip
    return found._replace(**changes)
