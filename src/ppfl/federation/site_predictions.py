"""Files made of a site's own clients' models: predictions for new rows of a table, and the models themselves."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.client_rows import as_ids
from ..data.inputs import scaled
from ..data.raw_arrays import quoted
from ..data.tables import as_pandas, read_table
from ..errors import DataError, SettingError
from ..insight import export_onnx
from ..io.files import folder_name, write_text
from ..runs.saved_fit import save_weights
from .site_models import SiteModels


def predict_table(models: SiteModels, file: Path, client: str, out: Path) -> int:
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
    names = as_ids(frame[client].to_numpy())
    by_client = {name: (names == name).nonzero()[0] for name in dict.fromkeys(names.tolist())}
    for name in by_client:  # first: a client that is not known should leave nothing behind
        models.name_of(name)
    inputs = _inputs(models, frame, client, file)
    found: list[list[Any]] = [[]] * len(names)
    for name, rows in by_client.items():
        for row, cells in zip(rows.tolist(), _cells(models, models.predict(name, inputs[rows])), strict=True):
            found[row] = [name, *cells]
    write_text(out, _csv_text([[client, *_headings(models, found)], *found]))
    return len(found)


def export_models(models: SiteModels, out: Path, clients: Sequence[str] = (), *, onnx: bool = False) -> list[str]:
    """Write clients' own models to a folder, one file each, and their memberships where they have some."""
    chosen = [models.name_of(client) for client in clients] or list(models.ids)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingError(f"{out} has other files in it; choose another --out, or move it away")
    ending = ".onnx" if onnx else ".safetensors"
    files = {client: out / f"{folder_name(client, 'client')}{ending}" for client in chosen}
    if len({*files.values()}) < len(files):
        raise SettingError("two of the clients would be written to the same file; export them one by one")
    out.mkdir(parents=True, exist_ok=True)
    for client, file in files.items():
        if onnx:
            export_onnx(models.module(client, predictions=True), file, scaled(models.kind.stand_in().train.x))
        else:
            save_weights(file, models.module(client))
    memberships = {client: models.membership(client) for client in chosen}
    shown = {client: c.tolist() for client, c in memberships.items() if c is not None}
    if shown:
        k = max(map(len, shown.values()))
        rows = [["client", *(f"model {at}" for at in range(1, k + 1))], *([client, *c] for client, c in shown.items())]
        write_text(out / "memberships.csv", _csv_text(rows))
    return chosen


def _inputs(models: SiteModels, frame: Any, client: str, file: Path) -> Any:
    """One row per sample, as the network takes them."""
    shape = models.kind.shape
    if len(shape) != 1:
        raise DataError(
            f"a sample of this run has shape {shape}, and a table has one row per sample; export the models instead, "
            f"with ppfl federation export"
        )
    if models.kind.preparation is not None:
        return models.kind.preparation.apply(frame)
    columns = [name for name in frame.columns if name != client] if models.features is None else list(models.features)
    if absent := [name for name in columns if name not in frame.columns]:
        raise DataError(f"{file} has no column {quoted(absent)}; it has {quoted(list(frame.columns), most=12)}")
    try:
        values = torch.from_numpy(frame[columns].to_numpy(dtype="float32", copy=True))
    except (TypeError, ValueError) as error:
        raise DataError(f"{file} has cells that are no numbers ({error}); correct them") from None
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).any(1).nonzero()[0, 0]) + 1
        raise DataError(f"{file} has missing or infinite values in its row {bad}; fill them, or leave the row out")
    return values


def _cells(models: SiteModels, predictions: Tensor) -> list[list[Any]]:
    """Of each row: the class and the probabilities of all, or the numbers that are predicted."""
    flat, classes = predictions.reshape(len(predictions), -1), models.kind.classes
    if classes is None or flat.shape[1] not in (1, len(classes)):
        preparation = models.kind.preparation
        mean, scale = (0.0, 1.0) if preparation is None else preparation.target
        return list((mean + scale * flat.double()).tolist())
    if flat.shape[1] == 1:  # the probability of the second of two classes
        flat = torch.cat([1 - flat, flat], dim=1)
    return [[classes[int(row.argmax())], *row.tolist()] for row in flat]


def _headings(models: SiteModels, found: Sequence[Sequence[Any]]) -> list[str]:
    more = len(found[0]) - 2 if found else 0
    classes = models.kind.classes
    if classes is not None and more == len(classes):
        return ["prediction", *(f"probability of {name}" for name in classes)]
    return ["prediction"] if more == 0 else [f"prediction {at}" for at in range(1, more + 2)]


def _csv_text(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
