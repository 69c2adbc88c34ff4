"""The data of a site: as they are, or prepared in the way that all sites of a run have agreed on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.ids import ClientIds
from ..data import DataTable, Federation, Samples
from ..data.column_sums import Center, ColumnPlan
from ..data.ids import RowGroups
from ..data.load import TableSettings, load_data, require_table
from ..data.preparation import Preparation, PreparationSettings
from ..data.sample_spec import SampleSpec
from ..data.summaries import number_classes
from ..data.table_sums import describe_columns, sum_rows
from ..data.tables import UnpreparedError
from ..errors import DataError, SettingError
from .run_clients import without_clients
from .site_settings import SiteSettings


class DataDescription(NamedTuple):
    """What a site says of its data."""

    ids: ClientIds
    importance: Tensor  # (M,)
    samples: dict[str, int]  # of every split
    facts: dict[str, Any]  # "agreed" is what all sites must have alike


class _SiteTable(NamedTuple):
    """The rows of a site's clients, before they are prepared."""

    table: DataTable
    rows: dict[str, RowGroups]
    settings: PreparationSettings

    @property
    def train(self) -> Any:
        """The numbers of the training rows."""
        return self.rows["train"].numbers


class SiteData:
    """Reads the data once, when the site starts."""

    def __init__(self, settings: SiteSettings, base: Path | None, forgotten: Sequence[str] = ()) -> None:
        """forgotten: clients that take no part."""
        self.settings, self.file = settings, settings.data
        self._error: UnpreparedError | None = None
        self._whole: tuple[Federation, Tensor] | None = None
        self._frame = self.file.call(base) if isinstance(self.file, TableSettings) else None
        try:
            if isinstance(self.file, TableSettings):
                self._whole = settings.choose_clients(self.file.prepared(self.file.table(self._frame)))
            else:
                self._whole = settings.choose_clients(load_data(self.file, base=base))
        except UnpreparedError as error:  # an experiment with [preparation] can use them
            self._error = error
        self.leave_out(forgotten)

    def leave_out(self, forgotten: Sequence[str]) -> None:
        """Go on without these clients."""
        self._forgotten = tuple(forgotten)
        self._plain = None if self._whole is None else without_clients(*self._whole, forgotten)
        self._table: tuple[str, _SiteTable] | None = None
        self._prepared: tuple[str, Federation] | None = None

    @property
    def table(self) -> Any:
        """The table as it was read, with all its columns; None where the data are none."""
        return self._frame

    def plain(self) -> tuple[Federation, Tensor]:
        """The clients and their importance (M,), with numbers as they are in the data."""
        if self._plain is None:
            raise UnpreparedError(f"site {self.settings.name!r}: {self._error}")
        return self._plain

    @property
    def ids(self) -> ClientIds:
        """All clients of the data, those that are forgotten too."""
        if self._whole is not None:
            return self._whole[0].ids
        known = dict.fromkeys(require_table(self.file).table(self._frame, choose=False).clients)
        return self.settings.full_names([client for client in known if client is not None])

    def prepared(self, asked: Mapping[str, Any] | None, agreed: Mapping[str, Any]) -> tuple[Federation, Tensor]:
        """The clients and their importance (M,). asked: settings; agreed: the preparation of all sites."""
        if not asked:
            return self.plain()
        if not agreed:
            raise SettingError("the experiment has [preparation] and sites have not agreed on one; use the same ppfl")
        key = json.dumps([asked, agreed], sort_keys=True)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = key, self._federation(asked, Preparation.read(agreed))
        return self._prepared[1], self._prepared[1].importance.cpu()

    def prepared_alone(self, asked: Mapping[str, Any]) -> Federation:
        """Prepared with the sums of this site, as those of others are away."""
        found = self._read(asked)
        return self._federation(asked, Preparation.fit(found.table, found.train, found.settings))

    def describe(self, asked: Mapping[str, Any]) -> DataDescription:
        """The clients and what all sites must agree on, with what is only said. asked: settings of a preparation."""
        if not asked:
            federation, importance = self.plain()
            facts = _agreed(SampleSpec.of(federation), federation.splits)
            samples = {split: len(part) for split, part in federation.splits.items()}
            return DataDescription(federation.ids, importance, samples, facts | {"data": federation.fingerprint})
        table, rows, settings = found = self._read(asked)
        data = require_table(self.file)
        y, classes = table.read_targets(table.usable(settings.missing), data.task, data.classes)
        if classes is None and not y.is_floating_point():
            classes = number_classes({"train": Samples(y[:, None].float(), y, torch.tensor([0, len(y)]))})
        raw = SampleSpec(
            shape=(len(table.features.columns),), dtype=torch.float32, target_dtype=y.dtype,
            target_shape=tuple(y.shape[1:]), classes=classes, features=tuple(table.features),
        )  # fmt: skip
        facts = _agreed(raw, rows) | describe_columns(table, settings, found.train).model_dump(mode="json")
        ids, sizes = rows["train"].ids, rows["train"].sizes
        samples = {split: int(part.sizes.sum()) for split, part in rows.items()}
        facts["data"] = table.fingerprint(rows)
        return DataDescription(self.settings.full_names(ids), sizes.double(), samples, facts)

    def sums(self, asked: Mapping[str, Any], plan: Mapping[str, Any], center: Mapping[str, Any]) -> dict[str, Tensor]:
        """Over the training rows, from which all sites together prepare theirs."""
        found = self._read(asked)
        about = Center.model_validate(center) if center else None
        return sum_rows(found.table, ColumnPlan.model_validate(plan), found.train, about)

    def _read(self, asked: Mapping[str, Any]) -> _SiteTable:
        """The table of the clients that take part, to be prepared by these settings."""
        key = json.dumps(asked, sort_keys=True)
        if self._table is None or self._table[0] != key:
            settings, data = PreparationSettings.model_validate(dict(asked)), require_table(self.file)
            table = data.table(self._frame, settings.names, choose=False)
            clients = set(table.clients)
            if self.settings.part is not None:
                train = table.rows(data, settings.missing)["train"]
                clients = set(self.settings.clients_of_part(train.ids, train.sizes))
            left = [name for name in clients if name and self.settings.full_names([name])[0] in self._forgotten]
            if left or self.settings.part is not None:
                table = table.only(clients - set(left))
            if not len(table):
                raise DataError("all clients of the site are forgotten; it has nobody who could take part")
            self._table = key, _SiteTable(table, table.rows(data, settings.missing), settings)
        return self._table[1]

    def _federation(self, asked: Mapping[str, Any], preparation: Preparation) -> Federation:
        found = require_table(self.file).prepared(self._read(asked).table, preparation)
        return self.settings.with_full_names(found.to(self.settings.device))


def _agreed(spec: SampleSpec, splits: Mapping[str, Any]) -> dict[str, Any]:
    return {"agreed": {**spec.model_dump(mode="json"), "splits": sorted(splits)}}
