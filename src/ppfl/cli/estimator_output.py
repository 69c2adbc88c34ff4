"""What is printed and written after a run with `[estimator]`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from ..runs.record import RunRecord
from .terminal import say


def show_estimators(records: Sequence[RunRecord], place: Path, *, quiet: bool) -> None:
    """Save the fitted estimator of each run that has one beside the run, and print the summary of the first."""
    fitted = [record for record in records if record.experiment.get("estimator") is not None]
    if not fitted:
        return
    from sklearn.exceptions import ConvergenceWarning

    from ..glm import estimator_from_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the summary says it
        models = [estimator_from_run(record.folder) for record in fitted]
    files = [
        model.save(place / f"estimator-seed-{record.seed}.safetensors")
        for model, record in zip(models, fitted, strict=True)
    ]
    if not quiet:
        for line in str(models[0].summary()).splitlines():
            say(line)
        say(f"read it with ppfl.glm.load({str(files[0])!r})")
