"""A run as it is read back from its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..io.files import PARTIAL, damaged, read_json
from .agreement import Agreement, group_agreement
from .folder import RunFolder

Record = dict[str, Any]
_WORST = "_worst_tenth"


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run left behind; rows of memberships and truth follow `ids`."""

    folder: Path
    experiment: Record
    versions: Record
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

    def total(self, key: str) -> float:
        """A cost summed over the rounds."""
        return float(sum(record.get(key) or 0 for record in self.metrics))


def metric_name(record: Record) -> str | None:
    """What a record measures on test samples: accuracy, rmse, deviance; None where it does not.

    >>> metric_name({"round": 3, "accuracy": 0.9, "accuracy_worst_tenth": 0.7})
    'accuracy'
    """
    names = (key.removesuffix(_WORST) for key in record if key.endswith(_WORST))
    return next((name for name in names if not name.startswith("validation_")), None)


def mean_and_sd(values: Sequence[float], show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Over seeds; the mean alone where there is one.

    >>> mean_and_sd([99.0, 99.2]), mean_and_sd([99.0]), mean_and_sd([0.5, 0.7], "{:.0%}".format)
    ('99.10 ± 0.14', '99.00', '60 ± 14%')
    """
    mean = show(fmean(values))
    return f"{mean.removesuffix('%')} ± {show(stdev(values))}" if len(values) > 1 else mean


def load_run(path: str | Path) -> RunRecord:
    """The run in a folder, finished or not."""
    folder = RunFolder(Path(path))
    if not folder.started:
        raise CheckpointError(f"there is no run in {folder.path}; give a folder that has experiment.json")
    try:
        return _read(folder)
    except (KeyError, TypeError) as error:
        raise damaged(folder.path, f"lacks {error} in one of its files") from None


def _read(folder: RunFolder) -> RunRecord:
    clients = read_json(folder.clients_file)
    ids = tuple(clients["ids"])
    experiment, finished = folder.read_experiment(), folder.finished
    # before the metrics, as the run may go on meanwhile
    tensors, chain = folder.read_result() if finished else ({}, folder.read_chain())
    metrics = folder.log.read_metrics(chain["logs"], finished=finished)
    by_round = folder.log.read_memberships(chain["logs"], len(metrics), len(ids), finished=finished)
    memberships = by_round[max(by_round)] if by_round else None
    scores = next((record for record in reversed(metrics) if metric_name(record)), {})
    if finished:
        memberships, scores = tensors.get("memberships"), {"round": chain["round"], **chain["scores"]}
    return RunRecord(
        folder=folder.path,
        experiment=experiment,
        versions=folder.read_versions(chain),
        ids=ids,
        truth=None if clients["truth"] is None else torch.tensor(clients["truth"]),
        metrics=metrics,
        memberships=memberships,
        memberships_by_round=by_round,
        scores=scores,
        finished=finished,
        preparation=clients["spec"]["preparation"],
    )


def find_runs(path: str | Path) -> list[Path]:
    """The run folder itself, or those in it, by name."""
    path = Path(path)
    if RunFolder(path).started:
        return [path]
    inside = sorted(path.iterdir(), key=_natural) if path.is_dir() else []
    runs = [item for item in inside if item.suffix != PARTIAL and RunFolder(item).started]
    if not runs:
        raise CheckpointError(f"there is no run in {path}; give the folder that ppfl run wrote to")
    return runs


def _natural(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # seed-2 before seed-10
