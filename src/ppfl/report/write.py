"""From run folders to files."""

from collections.abc import Sequence
from pathlib import Path

from ppfl.core.errors import SettingError

from .page import render

PAGE, PICTURE = "report.html", "memberships.svg"


def write_report(folders: Sequence[Path], out: Path, title: str = "Population personalized federated learning") -> Path:
    """Write the page and the picture into `out`, and return the page's path."""
    from ppfl.runs import load_run  # here, so that `render` needs no engines and data sets

    if not folders:
        raise SettingError("a report needs at least one run folder; none was given")
    page, picture = render([load_run(folder) for folder in folders], title)
    out.mkdir(parents=True, exist_ok=True)
    (out / PICTURE).write_text(picture, encoding="utf-8")
    (out / PAGE).write_text(page, encoding="utf-8")
    return out / PAGE
