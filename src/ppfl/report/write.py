"""From run folders to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ppfl.core.errors import SettingError

from .curves import curves_picture, over_rounds
from .methods import common_metric, ranked
from .page import render
from .records import Run

PAGE, PICTURE = "report.html", "memberships.svg"


def write_report(
    folders: Sequence[Path],
    out: Path,
    title: str = "Population personalized federated learning",
    labels: Sequence[str] | None = None,
) -> Path:
    """Write the page and the picture into `out`, and return the page's path; labels as in `render`."""
    from ppfl.runs import load_run  # here, so that `render` needs no engines and data sets

    if not folders:
        raise SettingError("a report needs at least one run folder; none was given")
    page, picture = render([load_run(folder) for folder in folders], title, labels)
    out.mkdir(parents=True, exist_ok=True)
    (out / PICTURE).write_text(picture, encoding="utf-8")
    (out / PAGE).write_text(page, encoding="utf-8")
    return out / PAGE


def write_curves(records: Mapping[str, Sequence[Run]], path: Path, title: str) -> None:
    """Write a picture that stands alone: the metric over rounds, and over what a client has sent and received.

    `records` has the seeds of each method by the method's label.
    """
    runs = [run for seeds in records.values() for run in seeds]
    labels = [label for label, seeds in records.items() for _ in seeds]
    metric = common_metric(runs)
    methods = ranked(runs, metric, labels)
    if not over_rounds(methods, metric.name):
        raise SettingError(f"none of {len(runs)} runs was evaluated on test data; curves need one that was")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(curves_picture(methods, metric, title) + "\n", encoding="utf-8")
