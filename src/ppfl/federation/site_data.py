"""The data of a site: as they are, or prepared in the way that all sites of a run have agreed on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data import Federation
from ..data.load import TableSettings, read_rows, table_federation
from ..data.preparation import Preparation
from ..data.preparation_settings import PreparationSettings
from ..data.sample_spec import SampleSpec
from ..data.table_readers import UnpreparedError
from ..data.table_rows import TableRows
from ..errors import DataError, SettingError
from .run_clients import without_clients
from .site_settings import SiteSettings


class SiteData:
    """Reads the data once, when the site starts."""

    def __init__(self, settings: SiteSettings, base: Path | None, forgotten: Sequence[str] = ()) -> None:
        """forgotten: clients that take no part."""
        self.settings = settings
        self._frame: Any = None
        self._plain: tuple[Federation, Tensor] | None = None
        if isinstance(settings.data, TableSettings):
            self._frame = settings.data.call(base)
        else:
            self._plain = settings.build_data(base)
        self.leave_out(forgotten)

    def leave_out(self, forgotten: Sequence[str]) -> None:
        """Go on without these clients."""
        self._forgotten = tuple(forgotten)
        self._rows: tuple[str, TableRows] | None = None
        self._prepared: tuple[str, Federation] | None = None
        self._error: UnpreparedError | None = None
        if not isinstance(self.settings.data, TableSettings):
            self._plain = without_clients(*self.plain(), forgotten)
            return
        if forgotten and self.settings.part is None:  # of a trial, the parts are those of all clients
            names = self.settings.name + "/" + self._frame[self.settings.data.client].astype(str)
            self._frame = self._frame[~names.isin(forgotten)].reset_index(drop=True)
            if not len(self._frame):
                raise DataError("all clients of the site are forgotten; it has nobody who could take part")
        self._plain = None
        try:
            self._plain = self._chosen(table_federation(self.settings.data, self._frame))
        except UnpreparedError as error:  # an experiment with [preparation] can use them
            self._error = error

    def _chosen(self, whole: Federation) -> tuple[Federation, Tensor]:
        """The site's clients, without those that are forgotten."""
        return without_clients(*self.settings.choose_clients(whole), self._forgotten)

    def plain(self) -> tuple[Federation, Tensor]:
        """The clients and their importance (M,), with numbers as they are in the data."""
        if self._plain is None:
            raise UnpreparedError(f"site {self.settings.name!r}: {self._error}")
        return self._plain

    def rows(self, asked: Mapping[str, Any]) -> TableRows:
        """The rows of a table, to be prepared by these settings."""
        key = json.dumps(asked, sort_keys=True)
        if self._rows is None or self._rows[0] != key:
            settings = PreparationSettings.model_validate(dict(asked))
            whole = read_rows(self.settings.data, self._frame, settings)
            chosen, _ = self._chosen(whole.federation)
            self._rows = key, whole.with_clients(chosen, None if self.settings.part is None else chosen.ids)
        return self._rows[1]

    def prepared(self, asked: Mapping[str, Any] | None, agreed: Mapping[str, Any]) -> tuple[Federation, Tensor]:
        """The clients and their importance (M,). asked: settings; agreed: the preparation of all sites."""
        if not asked:
            return self.plain()
        if not agreed:
            raise SettingError("the experiment has [preparation] and sites have not agreed on one; use the same ppfl")
        rows, key = self.rows(asked), json.dumps([asked, agreed], sort_keys=True)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = key, rows.prepare(Preparation.from_json(agreed))
        return self._prepared[1], rows.federation.importance

    def describe(self, asked: Mapping[str, Any]) -> tuple[Federation, Tensor, dict[str, Any]]:
        """The clients, their importance (M,), and what all sites must agree on, besides what is only said."""
        if not asked:
            federation, importance = self.plain()
            return federation, importance, {"agreed": _agreed(federation), "data": federation.fingerprint}
        rows = self.rows(asked)
        raw = {"shape": [len(rows.frame.columns)], "dtype": "float32"}
        facts = {"agreed": {**_agreed(rows.federation), **raw}, "data": rows.fingerprint, **rows.describe()}
        return rows.federation, rows.federation.importance, facts


def _agreed(federation: Federation) -> dict[str, Any]:
    return {**SampleSpec.of(federation).model_dump(mode="json"), "splits": sorted(federation.splits)}
