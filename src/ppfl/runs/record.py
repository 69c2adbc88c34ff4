"""A run as it is read back from its folder: what reports and tables say of it, and its agreement with the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.simplex import harden, match, total_variation
from ..errors import CheckpointError
from ..io.files import PARTIAL
from .folder import RunFolder

Record = dict[str, Any]
_WORST = "_worst_tenth"


class Agreement(NamedTuple):
    """Memberships against the truth, canonical models matched to true ones."""

    share: float  # of the clients whose largest membership is their largest true one
    distance: float  # mean total variation: the share of a membership that is in the wrong place


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run left behind; rows of memberships and truth follow `ids`. Numbers that are not finite are left out."""

    folder: Path
    experiment: Record  # all settings, with the method as it ran
    versions: Record  # what it ran on, and what it was resumed on
    ids: tuple[str, ...]
    truth: Tensor | None  # (M, Kt)
    metrics: list[Record] = field(repr=False)
    memberships: Tensor | None = field(repr=False)  # (M, K), of the returned state or else the latest; None for K = 1
    memberships_by_round: dict[int, Tensor] = field(repr=False)
    scores: Record  # of the returned state, or while the run goes on, of the round evaluated last
    finished: bool
    preparation: Record | None = None  # how the columns of a table were prepared

    @property
    def name(self) -> str:
        """The experiment's."""
        return str(self.experiment["name"])

    @property
    def seed(self) -> int:
        return int(self.experiment["seeds"][0])

    @property
    def method(self) -> str:
        return str(self.experiment["method"]["name"])

    @property
    def rounds_done(self) -> int:
        return len(self.metrics)

    @property
    def metric(self) -> str | None:
        """What the scores are called."""
        return metric_name(self.scores)

    @property
    def evaluated(self) -> list[Record]:
        """The rounds that were evaluated; all rounds where there was nothing to evaluate on."""
        return [record for record in self.metrics if self.metric in record] if self.metric else self.metrics

    @property
    def agreement(self) -> Agreement | None:
        """Of the memberships with the truth, where both are there."""
        if self.truth is None or self.memberships is None:
            return None
        return group_agreement(self.memberships, self.truth)

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """Clients whose updates were refused, each time with the reason."""
        found = (row["refusals"] for row in self.metrics if isinstance(row.get("refusals"), list | tuple))
        return [(client, reason) for refusals in found for client, reason in refusals]

    def curve(self, key: str) -> dict[int, float]:
        """The recorded values by round."""
        return {round: row[key] for round, row in enumerate(self.metrics, 1) if _is_number(row.get(key))}

    def final(self, key: str) -> float | None:
        """The value of the state that the run returned, which is not always that of the last round; of a run that goes
        on, the last recorded value."""
        if _is_number(score := self.scores.get(key)):
            return float(score)
        return next(reversed(self.curve(key).values()), None)

    def total(self, key: str) -> float:
        """A cost summed over the rounds."""
        return float(sum(self.curve(key).values()))

    def traffic(self) -> dict[int, float]:
        """Mean bytes a client has sent and received by the end of each round, until a round without a record."""
        up, down = self.curve("bytes_up"), self.curve("bytes_down")
        rounds = [*takewhile(lambda t: t in up and t in down, range(1, len(self.metrics) + 1))]
        return dict(zip(rounds, accumulate((up[t] + down[t]) / max(1, len(self.ids)) for t in rounds), strict=True))

    def per_client(self) -> dict[str, float]:
        """The metric by client id, without the clients that have none."""
        lists = [row["per_client"] for row in (*self.metrics, self.scores) if row.get("per_client")]
        found = zip(self.ids, lists[-1], strict=True) if lists else ()
        return {client: float(score) for client, score in found if _is_number(score)}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def metric_name(record: Record) -> str | None:
    """What a record measures on test samples: accuracy, rmse, deviance; None where it does not.

    >>> metric_name({"round": 3, "accuracy": 0.9, "accuracy_worst_tenth": 0.7})
    'accuracy'
    """
    names = (key.removesuffix(_WORST) for key in record if key.endswith(_WORST))
    return next((name for name in names if not name.startswith("validation_")), None)


# ---------------------------------------------------------------------- agreement with the truth


def group_agreement(memberships: Tensor, truth: Tensor) -> Agreement:
    """Agreement of memberships (M, K) with the truth (M, Kt), under the matching that is best for each measure.

    >>> import torch
    >>> truth = torch.eye(3)[[0, 0, 1, 2]]
    >>> group_agreement(truth[:, [2, 0, 1]], truth)
    Agreement(share=1.0, distance=0.0)
    >>> group_agreement(torch.eye(2)[[0, 0, 1, 1]], truth).share
    0.75
    """
    same = (torch.mul(*align(harden(memberships), harden(truth)))).sum(1)
    return Agreement(float(same.mean()), float(total_variation(*align(memberships, truth)).mean()))


def align(memberships: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Both with max(K, Kt) columns, those of the truth in the order of the canonical models they match.

    The side with fewer columns gets empty ones: then every column counts, and the matching is the best there is.
    """
    k = max(memberships.shape[1], truth.shape[1])
    found, true = (pad(c.double().cpu(), (0, k - c.shape[1])) for c in (memberships, truth))
    return found, true[:, match(found, true)]


# ---------------------------------------------------------------------- from folders


def load_run(path: str | Path) -> RunRecord:
    """The run in a folder, finished or not."""
    folder = RunFolder(Path(path))
    if not folder.started:
        raise CheckpointError(f"there is no run in {folder.path}; give a folder that has {folder.run_file.name}")
    saved = folder.read()
    truth, result = saved.clients["truth"], saved.result
    if result is None:
        memberships = next(reversed(saved.memberships.values()), None)
        scores = next((record for record in reversed(saved.metrics) if metric_name(record)), {})
    else:
        memberships, scores = result.memberships, {"round": result.state.round, **result.scores}
    return RunRecord(
        folder=folder.path,
        experiment=saved.experiment,
        versions=saved.about["environment"] | ({"resumed": saved.resumed} if saved.resumed else {}),
        ids=tuple(saved.clients["ids"]),
        truth=None if truth is None else torch.tensor(truth),
        metrics=saved.metrics,
        memberships=memberships,
        memberships_by_round=saved.memberships,
        scores=scores,
        finished=result is not None,
        preparation=saved.clients["spec"]["preparation"],
    )


def find_runs(path: str | Path) -> list[Path]:
    """The run folder itself, or those in it or in the folders in it, as `ppfl compare` writes them; by name."""
    path = Path(path)
    if RunFolder(path).started:
        return [path]
    inside = _runs_in(path) or [run for folder in _folders_in(path) for run in _runs_in(folder)]
    if not inside:
        raise CheckpointError(f"there is no run in {path}; give the folder that ppfl run wrote to")
    return inside


def _runs_in(path: Path) -> list[Path]:
    return [item for item in _folders_in(path) if RunFolder(item).started]


def _folders_in(path: Path) -> list[Path]:
    found = [item for item in path.iterdir() if item.is_dir() and item.suffix != PARTIAL] if path.is_dir() else []
    return sorted(found, key=lambda item: (len(item.name), item.name))  # seed-2 before seed-10
