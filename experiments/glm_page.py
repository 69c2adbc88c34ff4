"""The page of `glm_comparison.py`, and what all pages on population GLMs begin with."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from glm_tables import Table

ROOT = Path(__file__).parents[1]
Records = list[dict[str, Any]]
NOTES = """\
Every tool gets the same formula (`experiments/glm_tables.py`) and the same five splits, in which a fifth of each
client's rows, or a fifth of the clients, is held out. Scores are root mean squared errors for gaussian targets and mean
deviances for all others, over the held-out rows of all splits; smaller is better, and the smallest is bold. A dash
means that a tool failed on a split.

- pooled: one GLM for all. own: one GLM per client, from its rows and the rows of all with the weight of one row.
- flexmix: latent classes, K from 1 to 4 by BIC; Poisson for overdispersed counts, and no gamma with a log link.
- lme4: `lmer`, `glmer`, `glmer.nb`. glmmTMB: the same formula and families. Both predict a new client by the mean over
  the distribution of random effects. gpboost: random slopes without correlations.
- ppfl: `from_formula(formula, k="auto", random_state=0)`."""


def page(
    tables: dict[str, Table],
    data: dict[str, pd.DataFrame],
    found: dict[tuple[str, str], Records],
    tools: tuple[str, ...],
) -> str:
    """`found` has the records of every tool and table."""
    parts = [
        heading("Population GLMs beside mixed models and latent classes", "python experiments/glm_comparison.py"),
        NOTES,
    ]
    for kind, title in (("rows", "Held-out rows of known clients"), ("clients", "New clients")):
        scores = pd.DataFrame(
            {tool: {name: score(found[tool, name], kind, tables[name].family) for name in tables} for tool in tools}
        ).dropna(axis=1, how="all")
        parts += [f"## {title}", summary(scores, tools), score_table(scores, tables, data, found, kind)]
    parts += ["## Log density of held-out rows", DENSITY, density_table(tables, found, tools)]
    parts += ["## Seconds", "Processor seconds of one fit, the median of all splits.", seconds_table(found, tools)]
    return "\n\n".join(parts) + "\n"


def score(records: Records, kind: str, family: str) -> float:
    """Over the five splits; no number if one of them failed or is not measured."""
    of_kind = [one for one in records if one["split"].startswith(kind)]
    if len(of_kind) < 5 or not all("loss" in one for one in of_kind):
        return np.nan
    mean = np.average([one["loss"] for one in of_kind], weights=[one["rows"] for one in of_kind])
    return float(mean**0.5 if family == "gaussian" else mean)


def summary(scores: pd.DataFrame, tools: tuple[str, ...]) -> str:
    """How often each tool is the best or within 1 % of it, and how far ppfl is behind lme4 or glmmTMB."""
    ratios = scores.div(scores.min(axis=1), axis=0)
    rows = [
        [tool, str((ratios[tool] <= 1.01).sum()), str((ratios[tool] == 1).sum()), str(ratios[tool].isna().sum())]
        + [f"{ratios[tool].max() - 1:.1%}", f"{np.exp(np.log(ratios[tool]).mean()) - 1:.1%}"]
        for tool in tools
        if tool in scores
    ]
    head = ["tool", f"within 1 % of the best, of {len(scores)}", "best", "failed", "most behind", "mean behind"]
    lines = markdown(head, rows)
    if {"ppfl", "lme4", "glmmTMB"} <= set(scores):
        behind = (scores["ppfl"] / scores[["lme4", "glmmTMB"]].min(axis=1)).sort_values(ascending=False)
        worst = ", ".join(f"{name} {value - 1:+.1%}" for name, value in behind.items() if value > 1.03)
        lines += ["", f"More than 3 % behind the better of lme4 and glmmTMB: {worst or 'none'}."]
    return "\n".join(lines)


def score_table(
    scores: pd.DataFrame,
    tables: dict[str, Table],
    data: dict[str, pd.DataFrame],
    found: dict[tuple[str, str], Records],
    kind: str,
) -> str:
    rows = []
    for name, each in scores.iterrows():
        sizes = [str(data[name].iloc[:, -3].nunique()), str(len(data[name]))]
        cells = ["–" if np.isnan(v) else f"**{v:.4g}**" if v == each.min() else f"{v:.4g}" for v in each]
        ours = each.get("ppfl", np.nan) / each.drop("ppfl", errors="ignore").min()
        notes = dict.fromkeys(one["note"] for one in found["ppfl", name] if one["split"].startswith(kind))
        ratio = "–" if np.isnan(ours) else f"{ours:.3f}"
        rows.append([name, tables[name].family, *sizes, *cells, ratio, "; ".join(notes)])
    head = ["table", "family", "clients", "rows", *scores, "ppfl / best other", "ppfl chose"]
    return "\n".join(markdown(head, rows, 2))


DENSITY = "Mean log density of a row, of the normal distribution with the predicted mean and the residual variance."


def density_table(tables: dict[str, Table], found: dict[tuple[str, str], Records], tools: tuple[str, ...]) -> str:
    rows = []
    for name in tables:
        each = {tool: [one["log_density"] for one in found[tool, name] if "log_density" in one] for tool in tools}
        if any(each.values()):
            rows.append([name, *(f"{np.mean(v):.3f}" if len(v) == 5 else "–" for v in each.values())])
    return "\n".join(markdown(["table", *tools], rows))


def seconds_table(found: dict[tuple[str, str], Records], tools: tuple[str, ...]) -> str:
    seconds = {key: [one["seconds"] for one in records if "seconds" in one] for key, records in found.items()}
    names = dict.fromkeys(name for _, name in found)
    cells = {key: f"{np.median(value):.2g}" if value else "–" for key, value in seconds.items()}
    return "\n".join(markdown(["table", *tools], [[name, *(cells[tool, name] for tool in tools)] for name in names]))


def markdown(head: list[str], rows: list[list[str]], text_columns: int = 1) -> list[str]:
    line = "|" + " --- |" * text_columns + " ---: |" * (len(head) - text_columns)
    return [f"| {' | '.join(head)} |", line, *(f"| {' | '.join(row)} |" for row in rows)]


def heading(title: str, command: str, *packages: str) -> str:
    """The title of a page, with the command, the versions and the date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    made = f"{datetime.now(UTC):%Y-%m-%d}, ppfl at {commit or 'no commit'}, {versions}, {threads}."
    return f"# {title}\n\n```\nOMP_NUM_THREADS=1 {command}\n```\n\n{made}"
