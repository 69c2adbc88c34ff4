"""The page of `glm_comparison.py`: a table of all measurements, and sentences generated from them."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from glm_methods import LARGEST_K

ROOT = Path(__file__).parents[1]
METHODS = ("pooled", "own", "mixed", "ours")


class Summary:
    """The results for one table, averaged over splits."""

    def __init__(self, name: str, found: dict[str, Any]) -> None:
        self.name, self.found, self.splits = name, found, found["splits"]
        self.scores = {method: self._mean(method, "score") for method in METHODS}
        self.seconds = {method: self._mean(method, "seconds") for method in METHODS}
        self.alone = self._mean("ours", "alone")

    def _mean(self, method: str, what: str) -> float | None:
        values = [split[method][what] for split in self.splits if split[method]]
        return None if not values or None in values else float(np.mean(values))

    @property
    def ratio(self) -> float:
        """Our score divided by the better of pooled and own."""
        return self.scores["ours"] / min(self.scores["pooled"], self.scores["own"])

    @property
    def to_mixed(self) -> float | None:
        mixed = self.scores["mixed"]
        return None if mixed is None else self.scores["ours"] / mixed

    @property
    def with_slopes(self) -> tuple[float, float] | None:
        """Seconds for random slopes, and for one of our fits with K > 1 in which the same columns vary."""
        mixed = [split["mixed"]["slopes"] for split in self.splits if split["mixed"] and split["mixed"]["slopes"]]
        tried = [candidate for split in self.splits for candidate in split["ours"]["candidates"]]
        differing = "slopes" if any(c["differing"] == "slopes" for c in tried) else "all"
        ours = [c["seconds"] for c in tried if c["k"] > 1 and c["differing"] == differing]
        return (float(np.mean(mixed)), float(np.mean(ours))) if mixed and ours else None

    @property
    def shape(self) -> str:
        """The chosen K, and what clients differ in."""
        kinds = [f"{split['ours']['k']} {split['ours']['differing']}" for split in self.splits]
        return ", ".join(dict.fromkeys(kinds))

    @property
    def mixed(self) -> str:
        """The score of statsmodels, with the kind of random effects and notes about failures."""
        results = [split["mixed"] for split in self.splits if split["mixed"]]
        if not results:
            return "none"
        notes = "; ".join(dict.fromkeys(result["note"] for result in results if result["note"]))
        effects = "/".join(dict.fromkeys(result["effects"] for result in results))
        shown = "–" if self.scores["mixed"] is None else f"{self.scores['mixed']:.4g}"
        return f"{shown} ({effects}{'; ' * bool(notes)}{notes})"

    def row(self) -> str:
        def seconds(value: float | None) -> str:
            return "–" if value is None else f"{value:.3g}"

        cells = [
            self.name, self.found["family"], self.found["clients"], self.found["rows"],
            *(f"{self.scores[method]:.4g}" for method in ("pooled", "own")), self.mixed,
            f"{self.scores['ours']:.4g}", self.shape, *(seconds(self.seconds[method]) for method in METHODS),
            seconds(self.alone), f"{self.ratio:.3f}", "–" if self.to_mixed is None else f"{self.to_mixed:.3f}",
        ]  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "data", "family", "clients", "rows", "pooled", "own", "mixed model", "ours", "K", "pooled s", "own s", "mixed s",
    "ours s", "chosen fit s", "ours / better", "ours / mixed",
)  # fmt: skip


def sentences(summaries: list[Summary]) -> list[str]:
    """The main findings, generated from the results."""
    with_mixed = [s for s in summaries if s.to_mixed is not None]
    large = [s for s in with_mixed if s.found["clients"] > 100]
    behind = [f"{s.name} ({s.ratio - 1:+.1%})" for s in summaries if s.ratio > 1.02]
    found = [
        f"Ours is within 2 % of the better of pooled and own, or better, on "
        f"{sum(s.ratio <= 1.02 for s in summaries)} of {len(summaries)} tables, and strictly better on "
        f"{sum(s.ratio < 1 for s in summaries)}." + (f" It is behind on {', '.join(behind)}." if behind else ""),
    ]
    if with_mixed:
        behind = [f"{s.name} ({s.to_mixed - 1:+.2%})" for s in with_mixed if s.to_mixed > 1]
        found.append(
            f"Compared with statsmodels it is equal or better on {sum(s.to_mixed <= 1 for s in with_mixed)} of "
            f"{len(with_mixed)} tables, and within 1 % on {sum(s.to_mixed <= 1.01 for s in with_mixed)}."
            + (f" It is behind on {', '.join(behind)}." if behind else "")
        )
    for s in (s for s in large if s.with_slopes):
        mixed, ours = s.with_slopes
        over = "over " * any("not done" in split["mixed"]["note"] for split in s.splits)
        found.append(
            f"{s.name} with varying slopes: statsmodels takes {over}{mixed:.3g} s for random slopes, one of our fits "
            f"{ours:.3g} s ({over}{mixed / ours:.2g} times)."
        )
    for s in large:
        whole, alone = (s.seconds["mixed"] / seconds for seconds in (s.seconds["ours"], s.alone))
        found.append(
            f"{s.name}, {s.found['clients']} clients: the mixed model takes {whole:.2g} times as long as all our fits "
            f"for K from 1 to 4, and {alone:.2g} times as long as the chosen fit alone."
        )
    for s in (s for s in summaries if s.found["clients"] > 1000):
        tried = [candidate for split in s.splits for candidate in split["ours"]["candidates"]]
        times = [c["seconds"] for c in tried if (c["k"], c["differing"]) == (4, "all")]
        found.append(f"{s.name}: a fit with K = 4 takes {np.mean(times):.3g} s.")
    not_converged = [s.name for s in summaries if not all(split["ours"]["converged"] for split in s.splits)]
    if not_converged:
        found.append(f"The chosen fit did not converge on {', '.join(not_converged)}.")
    return found


TITLE = "Population GLMs compared with pooled, own and mixed models"

NOTES = """\
Scores are root mean squared errors for the gaussian family and mean deviances for all others, of a quarter of each
client's rows (or choices), held out at random; smaller is better. All numbers are means over {splits} splits, which are
the same for all methods; seconds are processor time.

- Pooled: one GLM for all clients (K = 1).
- Own: one GLM per client. All clients of a table have the same ridge, chosen from 0.1, 1, 10 and 100 (columns
  standardised, losses summed) by validation on training rows. If all targets of a client are equal, its prediction is
  that value, moved slightly towards the overall mean.
- Mixed model: statsmodels `MixedLM`, or `BinomialBayesMixedGLM` and `PoissonBayesMixedGLM` by variational Bayes, with
  random slopes for all columns that vary within clients if that converges within {limit:g} s, else with random
  intercepts. It has no model for choices.
- Ours: K from 1 to {most}, and clients that differ in all columns, in the intercept and the random slopes of the mixed
  model, or in the intercept only. Both are chosen by validation on training rows (ten-fold within clients, or one
  quarter for more than 3,000 rows), then the ridge from 1, 10 and 100. "Ours s" is the time of all these fits, "chosen
  fit s" that of the last one, on all training rows."""


def page(summaries: list[Summary], splits: int, limit: float, command: str) -> str:
    return "\n".join(
        [
            heading(TITLE, command, "scikit-learn", "statsmodels"), "",
            NOTES.format(splits=splits, limit=limit, most=LARGEST_K), "",
            f"| {' | '.join(HEAD)} |", f"|{' --- |' * 2}{' ---: |' * (len(HEAD) - 2)}",
            *(summary.row() for summary in summaries), "", *(f"- {sentence}" for sentence in sentences(summaries)), "",
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
