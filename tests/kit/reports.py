"""Made-up runs, and fitted tables, for reports."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ppfl.glm.table import TableSettings, fit_table
from ppfl.runs import RunRecord


def empty_run(**changes):
    """A run without any round."""
    experiment = {"name": "run", "method": {"name": "ppfl"}, "watch": {"metrics": []}}
    fields = {"folder": Path(), "experiment": experiment, "ids": (), "metrics": [], "scores": {}, "versions": {},
              "finished": True}  # fmt: skip
    return RunRecord(**{**fields, "memberships": None, "memberships_by_round": {}, "truth": None, **changes})


def fake_run(
    method, *, clients=40, groups=4, k=4, level=0.9, lr=0.1, soft=0.0, rounds=60, metric="accuracy", sent=1e5, seed=0
):  # fmt: skip
    """Its score rises to about `level`, and is measured every fifth round. Each client sends and receives `sent` bytes
    per round in all. soft: alpha of the Dirichlet distribution of the true mixtures; 0 gives groups."""
    rng = np.random.default_rng(seed)
    true = torch.tensor(rng.dirichlet(np.full(groups, soft or 0.05), clients))
    true = true if soft else torch.eye(groups, dtype=torch.float64)[true.argmax(1)]
    found = torch.nn.functional.pad(true, (0, max(0, k - groups)))[:, :k]
    found = found + 0.15 * torch.tensor(rng.random((clients, k)))
    found = (found / found.sum(1, keepdim=True))[:, rng.permutation(k)]
    metrics = []
    for t in range(1, rounds + 1):
        reached = 0.1 + (level - 0.1) * (1 - np.exp(-t / 8)) + 0.004 * rng.standard_normal()
        row = {"round": t, "loss": 2.3 * (1.02 - reached), "participants": clients, "seconds": 0.05}
        row |= {"bytes_up": sent * clients / 2, "bytes_down": sent * clients / 2}
        if t % 5 == 0:
            each = np.clip(reached + 0.06 * rng.standard_normal(clients), 0, 1)
            each = np.round(each * 50) / 50 if metric == "accuracy" else (1.2 - each) ** 2
            row |= {metric: each.mean(), f"{metric}_mean": each.mean(), f"{metric}_worst_tenth": each.min()}
            row |= {"test_loss": 1 - reached, "per_client": each.tolist()}
        metrics.append(row)
    settings = {"method": {"name": method, "lr": lr}, "population": {"k": k}, "seeds": [seed], "watch": {"metrics": []}}
    memberships = {"memberships": found, "memberships_by_round": dict.fromkeys(range(0, rounds + 1, 5), found)}
    ids, experiment = tuple(f"site-{i:03d}" for i in range(clients)), {"name": method, "data": {}, **settings}
    return empty_run(experiment=experiment, ids=ids, metrics=metrics, truth=true, **memberships if k > 1 else {})


def fitted_table(ids=None, k=2, target="sold", column="price"):
    """A table of shops of two kinds, fitted as `ppfl glm` does."""
    random = np.random.default_rng(0)
    ids = [f"s{i}" for i in range(12)] if ids is None else ids
    shop = np.repeat(np.arange(len(ids)), 8)
    table = pd.DataFrame({"shop": np.array(ids, dtype=object)[shop], column: random.normal(size=len(shop))})
    table[target] = np.where(shop % 2, 3.0, -3.0) * table[column] + random.normal(size=len(shop))
    return fit_table(table, TableSettings("shop", target, ks=(1, k) if k > 1 else (1,)))
