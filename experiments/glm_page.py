"""What `glm_comparison.py` measured, as a table and in sentences that the figures write."""

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
    """Means over splits of what was measured of a table."""

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
        """To the better of one model for all and one for each."""
        return self.scores["ours"] / min(self.scores["pooled"], self.scores["own"])

    @property
    def to_mixed(self) -> float | None:
        mixed = self.scores["mixed"]
        return None if mixed is None else self.scores["ours"] / mixed

    @property
    def with_slopes(self) -> tuple[float, float] | None:
        """Seconds of random slopes, and of a fit of ours (K from 2 on) in which the same columns differ."""
        theirs = [split["mixed"]["slopes"] for split in self.splits if split["mixed"] and split["mixed"]["slopes"]]
        tried = [candidate for split in self.splits for candidate in split["ours"]["candidates"]]
        differing = "slopes" if any(c["differing"] == "slopes" for c in tried) else "all"
        ours = [c["seconds"] for c in tried if c["k"] > 1 and c["differing"] == differing]
        return (float(np.mean(theirs)), float(np.mean(ours))) if theirs and ours else None

    @property
    def shape(self) -> str:
        """K, and what clients differ in."""
        kinds = [f"{split['ours']['k']} {split['ours']['differing']}" for split in self.splits]
        return ", ".join(dict.fromkeys(kinds))

    @property
    def mixed(self) -> str:
        """The score, with what kept statsmodels from a better one."""
        answers = [split["mixed"] for split in self.splits if split["mixed"]]
        if not answers:
            return "none"
        notes = "; ".join(dict.fromkeys(answer["note"] for answer in answers if answer["note"]))
        effects = "/".join(dict.fromkeys(answer["effects"] for answer in answers))
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


def sentences(all_: list[Summary]) -> list[str]:
    """What the figures say, whatever it is."""
    beside = [s for s in all_ if s.to_mixed is not None]
    large = [s for s in beside if s.found["clients"] > 100]
    behind = [f"{s.name} ({s.ratio - 1:+.1%})" for s in all_ if s.ratio > 1.02]
    said = [
        f"Ours is within 2 % of the better of pooled and own, or better, on {sum(s.ratio <= 1.02 for s in all_)} of "
        f"{len(all_)} tables, and strictly better on {sum(s.ratio < 1 for s in all_)}."
        + (f" It is behind on {', '.join(behind)}." if behind else ""),
    ]
    if beside:
        behind = [f"{s.name} ({s.to_mixed - 1:+.2%})" for s in beside if s.to_mixed > 1]
        said.append(
            f"Beside statsmodels it is equal or better on {sum(s.to_mixed <= 1 for s in beside)} of {len(beside)} "
            f"tables, and within 1 % on {sum(s.to_mixed <= 1.01 for s in beside)}."
            + (f" It is behind on {', '.join(behind)}." if behind else "")
        )
    for s in (s for s in large if s.with_slopes):
        theirs, ours = s.with_slopes
        over = "over " * any("not done" in split["mixed"]["note"] for split in s.splits)
        said.append(
            f"{s.name}, where slopes differ: statsmodels takes {over}{theirs:.3g} s for random slopes, a fit of ours "
            f"{ours:.3g} s ({over}{theirs / ours:.2g} times)."
        )
    for s in large:
        whole, alone = (s.seconds["mixed"] / seconds for seconds in (s.seconds["ours"], s.alone))
        said.append(
            f"{s.name}, {s.found['clients']} clients: the mixed model takes {whole:.2g} times as long as the choice of "
            f"K among 1 to 4, and {alone:.2g} times as long as the chosen fit alone."
        )
    for s in (s for s in all_ if s.found["clients"] > 1000):
        tried = [candidate for split in s.splits for candidate in split["ours"]["candidates"]]
        times = [c["seconds"] for c in tried if (c["k"], c["differing"]) == (4, "all")]
        said.append(f"{s.name}: a fit with K = 4 takes {np.mean(times):.3g} s.")
    short = [s.name for s in all_ if not all(split["ours"]["converged"] for split in s.splits)]
    if short:
        said.append(f"The chosen fit stopped short of its tolerance on {', '.join(short)}.")
    return said


NOTES = """\
Scores are root mean squared errors for the gaussian family and mean deviances for all others, of a quarter of each
client's rows (or choices), held out at random; smaller is better. All figures are means over {splits} splits, the same
for all methods; seconds are of one processor.

- Pooled: one GLM for all (K = 1).
- Own: a GLM for each client. The ridge is one for all clients of a table, chosen from 0.1, 1, 10 and 100 (columns
  standardised, losses summed) by rows set aside from training; a client whose targets are all alike predicts that.
- Mixed model: statsmodels `MixedLM`, or `BinomialBayesMixedGLM` and `PoissonBayesMixedGLM` by variational Bayes, with
  random slopes for all columns that vary within clients where that converges within {limit:g} s, else with random
  intercepts. It has none for choices.
- Ours: K from 1 to {most}, and whether clients differ in all columns, in the intercept and the slopes that the mixed
  model has too, or in the intercept alone; both chosen by training rows set aside (a tenth of each client's after the
  other; of more than 3,000 rows a quarter, once), then the ridge from 1, 10 and 100. "Ours s" is all these fits,
  "chosen fit s" the last one, of all training rows."""


def page(all_: list[Summary], splits: int, limit: float, command: str) -> str:
    return "\n".join(
        [
            heading("Population GLMs beside pooled, own and mixed models", command, "scikit-learn", "statsmodels"), "",
            NOTES.format(splits=splits, limit=limit, most=LARGEST_K), "",
            f"| {' | '.join(HEAD)} |", f"|{' --- |' * 2}{' ---: |' * (len(HEAD) - 2)}",
            *(summary.row() for summary in all_), "", *(f"- {sentence}" for sentence in sentences(all_)), "",
        ]
    )  # fmt: skip


def heading(title: str, command: str, *packages: str) -> str:
    """Of a page, with the command that made it and with what."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    made = f"{datetime.now(UTC):%Y-%m-%d}, ppfl at {commit or 'no commit'}, {versions}, {threads}."
    return f"# {title}\n\n```\nOMP_NUM_THREADS=1 {command}\n```\n\n{made}"
