"""Write the report of run folders to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ppfl.errors import SettingError
from ppfl.io.files import make_folder, write_text
from ppfl.runs.record import RunRecord, load_run

from .curves import curves_picture, over_rounds, rates_picture
from .methods import common_metric, rank_methods
from .page import render

PAGE, PICTURE = "report.html", "memberships.svg"


def write_report(
    folders: Sequence[Path],
    out: Path,
    title: str = "Population personalized federated learning",
    labels: Sequence[str] | None = None,
) -> Path:
    """Write the page and the membership picture into `out` and return the path of the page; labels as in `render`."""
    if not folders:
        raise SettingError("a report needs at least one run folder; none was given")
    page, picture = render([load_run(folder) for folder in folders], title, labels)
    make_folder(out)
    write_text(out / PICTURE, picture)
    write_text(out / PAGE, page)
    return out / PAGE


def write_curves(records: Mapping[str, Sequence[RunRecord]], path: Path, title: str) -> None:
    """Write a standalone picture of the metric over rounds and over the bytes a client has sent and received.

    `records` maps the label of each method to its runs, one per seed.
    """
    runs = [run for seeds in records.values() for run in seeds]
    labels = [label for label, seeds in records.items() for _ in seeds]
    metric = common_metric(runs)
    methods = rank_methods(runs, metric, labels)
    if not over_rounds(methods, metric.name):
        raise SettingError(f"none of {len(runs)} runs was evaluated on test data; curves need at least one that was")
    make_folder(path.parent)
    write_text(path, curves_picture(methods, metric, title) + "\n")


def write_rates(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str, x_name: str) -> None:
    """Write a standalone picture of positive values, each line (x, value) by its label, both axes logarithmic."""
    make_folder(path.parent)
    write_text(path, rates_picture(lines, title, x_name) + "\n")
