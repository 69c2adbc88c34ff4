"""Made-up runs and fitted tables for reports."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ppfl.report import PopulationResults
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


def effect(outcome, name, values, pooled, is_shared=False, reach=None, pooled_reach=0.0):
    """A line of the table of coefficients."""
    return SimpleNamespace(**locals())


def tried(k, bic, held_out=None, held_out_error=None, log_likelihood=-100.0):
    """A number of canonical models that was tried."""
    return SimpleNamespace(aic=bic, **locals())


def fake_table(k=3, clients=20, **changes):
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
            effect("sold", "price", values, -1.0, reach=values, pooled_reach=0.3),
            effect("sold", "day", [0.5] * k, 0.5, is_shared=True, reach=[0.2] * k, pooled_reach=0.2),
        ],
        candidates=[tried(1, 300.0), tried(k, 200.0)],
        scores=[SimpleNamespace(label=label, figures={"rmse": rmse}, seconds=0.5) for label, rmse in ways.items()],
    )  # fmt: skip
    return found._replace(**changes)
