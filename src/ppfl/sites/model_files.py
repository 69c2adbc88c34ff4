"""Files made of clients' own models: predictions for new rows of a table, and the models themselves. The models are
those of a fit, of a finished run or of a site's store."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.columns import as_pandas
from ..data.ids import text_ids
from ..data.sample_spec import SampleSpec
from ..data.table_files import read_table
from ..errors import DataError, SettingError
from ..io.files import folder_name, write_text
from ..networks.peft_files import save_weights
from .personal_models import PersonalModels

FindName = Callable[[str], str]  # the full name of a client, which may be given in another form


def predict_table(models: PersonalModels, file: Path, client: str, out: Path, name_of: FindName | None = None) -> int:
    """Write predictions for the rows of a csv or parquet file, in their order; how many there are.

    client: the column that says whose model is used.
    """
    if out.exists():
        raise SettingError(f"{out} exists; choose another --out, or move it away")
    frame = as_pandas(read_table(file, client=client))
    if client not in frame.columns:
        raise DataError(
            f"{file} has no column {client!r}, which says whose model is used; name one with --client-column"
        )
    names = text_ids(frame[client].to_numpy())
    by_client = {name: (names == name).nonzero()[0] for name in dict.fromkeys(names.tolist())}
    full = {
        name: _full_name(models, name, name_of) for name in by_client
    }  # first: nothing is left where one is unknown
    inputs = _inputs(models.spec, frame, client)
    found: list[list[Any]] = [[]] * len(names)
    for name, rows in by_client.items():
        try:
            predictions = models.predict(full[name], inputs.iloc[rows].set_axis(rows + 1))
        except DataError as error:
            raise DataError(f"{file}: {error}") from None
        for row, cells in zip(rows.tolist(), _cells(models.spec, predictions), strict=True):
            found[row] = [name, *cells]
    write_text(out, _csv_text([[client, *_headings(models.spec, found)], *found]))
    return len(found)


def export_models(
    models: PersonalModels, out: Path, clients: Sequence[str] = (), *, onnx: bool = False,
    name_of: FindName | None = None,
) -> list[str]:  # fmt: skip
    """Write clients' own models to a folder, one file each, and their memberships where they have some."""
    chosen = [_full_name(models, client, name_of) for client in clients] or list(models.ids)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingError(f"{out} exists; choose another --out, or move it away")
    ending = ".onnx" if onnx else ".safetensors"
    files = {client: out / f"{folder_name(client, 'client')}{ending}" for client in chosen}
    if len({*files.values()}) < len(files):
        raise SettingError("two of the clients would be written to the same file; export them one by one")
    out.mkdir(parents=True, exist_ok=True)
    for client, file in files.items():
        if onnx:
            models.export_onnx(client, file)
        else:
            save_weights(file, models.module(client))
    if models.are_mixtures:
        memberships = models.memberships(chosen).tolist()
        headings = ["client", *(f"model {at}" for at in range(1, len(memberships[0]) + 1))]
        rows = [headings, *([client, *c] for client, c in zip(chosen, memberships, strict=True))]
        write_text(out / "memberships.csv", _csv_text(rows))
    return chosen


def _full_name(models: PersonalModels, client: str, name_of: FindName | None) -> str:
    name = client if name_of is None else name_of(client)
    models.refuse_unknown([name])
    return name


def _inputs(spec: SampleSpec, frame: Any, client: str) -> Any:
    """One row per sample, in the units of the data."""
    if len(spec.shape) != 1:
        raise DataError(
            f"a sample of this run has shape {spec.shape}, and a table has one row per sample; export the models "
            f"instead, with ppfl export"
        )
    return frame if spec.features is not None else frame.drop(columns=client)


def _cells(spec: SampleSpec, predictions: Tensor) -> list[list[Any]]:
    """Of each row: the class and the probabilities of all, or the numbers that are predicted."""
    flat, classes = predictions.reshape(len(predictions), -1), spec.classes
    if classes is None or flat.shape[1] not in (1, len(classes)):
        return list(flat.tolist())
    if flat.shape[1] == 1:  # the probability of the second of two classes
        flat = torch.cat([1 - flat, flat], dim=1)
    return [[classes[int(row.argmax())], *row.tolist()] for row in flat]


def _headings(spec: SampleSpec, found: Sequence[Sequence[Any]]) -> list[str]:
    more = len(found[0]) - 2 if found else 0
    classes = spec.classes
    if classes is not None and more == len(classes):
        return ["prediction", *(f"probability of {name}" for name in classes)]
    return ["prediction"] if more == 0 else [f"prediction {at}" for at in range(1, more + 2)]


def _csv_text(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
