"""The page of `glm_comparison.py`: tables of all measurements, and sentences generated from them."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
METHODS = ("pooled", "own", "statsmodels", "lme4", "glmmTMB", "flexmix", "ours")
RIVALS = ("pooled", "own", "lme4", "glmmTMB", "flexmix")  # statsmodels fits the same models as lme4, less exactly


class Summary:
    """The results for one table, averaged over splits."""

    def __init__(self, name: str, found: dict[str, Any]) -> None:
        self.name, self.found, self.splits = name, found, found["splits"]

    @property
    def complete(self) -> bool:
        return all(method in split for split in self.splits for method in METHODS)

    def mean(self, method: str, what: str = "score") -> float | None:
        values = [split[method].get(what) for split in self.splits]
        return None if None in values else float(np.mean(values))

    @property
    def best(self) -> float:
        """The smallest score of all other methods."""
        return min(value for method in RIVALS if (value := self.mean(method)) is not None)

    @property
    def ratio(self) -> float:
        return self.mean("ours") / self.best

    def kinds(self, method: str) -> str:
        """The kinds of random effects, in the order of the splits."""
        return "/".join(dict.fromkeys(split[method]["effects"] for split in self.splits if split[method]["effects"]))

    @property
    def shape(self) -> str:
        """The chosen K, and what clients differ in."""
        return ", ".join(dict.fromkeys(f"{split['ours']['k']} {split['ours']['differing']}" for split in self.splits))

    def score_row(self) -> list[str]:
        scores = [self.mean(method) for method in METHODS]
        least = min(score for score in scores if score is not None)
        shown = ["–" if score is None else f"**{score:.4g}**" if score == least else f"{score:.4g}" for score in scores]
        about = [self.found["family"], self.found["clients"], self.found["rows"], self.found["columns"]]
        return [self.name, *map(str, about), *shown, self.shape, f"{self.ratio:.3f}"]

    def seconds_row(self) -> list[str]:
        cells = [show_seconds(self.mean(method, "seconds")) for method in METHODS[2:6]]
        effects = [self.kinds(method) for method in METHODS[2:5]] + [""]
        shown = [f"{cell} ({effect})" if effect else cell for cell, effect in zip(cells, effects, strict=True)]
        return [self.name, *shown, show_seconds(self.mean("ours", "alone")), show_seconds(self.mean("ours", "choice"))]

    def clients_row(self) -> list[str]:
        return [self.name, *(self.splits[0][method]["clients"] or "–" for method in ("lme4", "flexmix", "ours"))]


def show_seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def markdown(head: list[str], rows: list[list[str]], text_columns: int = 1) -> list[str]:
    line = "|" + " --- |" * text_columns + " ---: |" * (len(head) - text_columns)
    return [f"| {' | '.join(head)} |", line, *(f"| {' | '.join(row)} |" for row in rows)]


def sentences(summaries: list[Summary]) -> list[str]:
    """The main findings, generated from the results."""
    count = len(summaries)
    behind = [f"{s.name} ({s.ratio - 1:+.1%})" for s in summaries if s.ratio > 1.01]
    best = [s.name for s in summaries if s.ratio < 1]
    found = [
        f"Ours is within 1 % of the best of pooled, own, lme4, glmmTMB and flexmix, or better, on "
        f"{count - len(behind)} of {count} tables." + (f" It is behind on {', '.join(behind)}." if behind else ""),
        f"It is the best of all on {len(best)}{': ' * bool(best)}{', '.join(best)}.",
    ]
    for method in RIVALS:
        pairs = [(s.mean(method), s) for s in summaries]
        known = [(value, s) for value, s in pairs if value is not None]
        within = sum(value <= 1.01 * min(s.best, s.mean("ours")) for value, s in known)
        failed = f", and has no result on {count - len(known)}" if len(known) < count else ""
        found.append(f"{method} is within 1 % of the best of all, ours included, on {within} tables{failed}.")
    not_converged = [s.name for s in summaries if not all(split["ours"]["converged"] for split in s.splits)]
    if not_converged:
        found.append(f"Our chosen fit did not converge on every split of {', '.join(not_converged)}.")
    return found


TITLE = "Population GLMs compared with mixed models and latent classes"

NOTES = """\
Scores are root mean squared errors for the gaussian family and mean deviances for all others, of a quarter of each
client's rows, held out at random; smaller is better, and the smallest is bold. All numbers are means over {splits}
splits ({twice} for tables of fewer than 1,000 rows), which are the same for all methods. Seconds are processor time of
one fit, in R and Python alike.

- pooled: one GLM for all clients.
- own: one GLM per client, with a ridge that validation on training rows chooses from 0.1, 1, 10 and 100.
- statsmodels: `MixedLM`, or `BinomialBayesMixedGLM` and `PoissonBayesMixedGLM` by variational Bayes, with random slopes
  of all columns that vary within clients if that converges in {limit:g} s, else with random intercepts.
- lme4: `lmer` and `glmer`, with random slopes or random intercepts: the smaller AIC of those that converge in
  {limit:g} s. glmmTMB: the same; for counts the smaller AIC of Poisson and negative binomial as well.
- flexmix: latent classes, K from 1 to 4 with the smallest BIC, three starts each; its seconds are those of all K.
- ours: `k="auto", choose="prediction"`, which takes the K with the highest held-out likelihood within clients, for
  clients that differ in all columns, in the random slopes of the mixed model, or in the intercept only, and for counts
  with the Poisson and the negative binomial family (nb): the smallest AIC of these calls."""


def page(summaries: list[Summary], splits: int, limit: float, command: str) -> str:
    scores = ["data", "family", "clients", "rows", "columns", *METHODS, "K, what differs", "ours / best other"]
    seconds = ["data", *METHODS[2:6], "ours, K = 3", "ours, with all choices"]
    clients = ["data", "lme4", "flexmix", "ours"]
    return "\n".join(
        [
            heading(TITLE, command, "scikit-learn", "statsmodels"), "",
            NOTES.format(splits=splits, twice=2 * splits, limit=limit), "",
            "## Held-out scores", "", *markdown(scores, [s.score_row() for s in summaries], 2), "",
            *(f"- {sentence}" for sentence in sentences(summaries)), "",
            "## Seconds", "", *markdown(seconds, [s.seconds_row() for s in summaries]), "",
            "## Who the clients are", "",
            "Standard deviations of random effects and residuals, sizes of latent classes, and shares of canonical "
            "models (first split).", "", *markdown(clients, [s.clients_row() for s in summaries], 4), "",
        ]
    )  # fmt: skip


def heading(title: str, command: str, *packages: str) -> str:
    """The title of a page, with the command, the versions and the date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    made = f"{datetime.now(UTC):%Y-%m-%d}, ppfl at {commit or 'no commit'}, {versions}, {threads}."
    return f"# {title}\n\n```\nOMP_NUM_THREADS=1 {command}\n```\n\n{made}"
