"""`site.toml`: what a site is, where its data are, and what may leave it. And the data, read once when it starts."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from ..core.ids import ClientIds, as_ids, positions_of
from ..core.settings import Count, Settings
from ..data import DataByName, DataTable, Federation, Samples
from ..data.column_sums import Center, ColumnPlan
from ..data.ids import RowGroups
from ..data.load import TableSettings, load_data, require_table
from ..data.preparation import GAP, OTHER, Preparation, PreparationSettings
from ..data.sample_spec import SampleSpec
from ..data.summaries import number_classes
from ..data.table_sums import describe_columns, sum_rows
from ..data.tables import UnpreparedError
from ..errors import DataError, SettingError
from ..io.files import write_text
from ..runs.load import explain, load_settings
from ..sites.engines import balanced
from .policy import Policy
from .secure_sums import SecureSettings

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
TEMPLATE = """\
name = "{name}"                     # as the server registers it

[data]                            # never leaves; columns have the names of the experiment
name = "csv"
file = "data.csv"
client = "patient"                # whose row it is
target = "outcome"
# classes = ["ill", "well"]       # of text, all of them: names of values never leave

[units]                           # sites must agree on them
# glucose = "mg/dl"

[policy]
min_clients = 5                   # clients behind every number that leaves
rows = []                         # what may leave client by client: "scores", "memberships" and so on

# [secure_sums]                   # the server reads totals over sites alone
# key = "secure.key"
# peers = {{ south = "..." }}       # public keys of the other sites, which `ppfl site init` printed there
"""


class PartSettings(Settings):
    """`[part]`: for a trial on one machine, a part of a federation instead of data of the site's own."""

    number: Count  # from 1
    of: Count

    @model_validator(mode="after")
    def _is_one_of_them(self) -> PartSettings:
        if self.number > self.of:
            raise ValueError(f"part {self.number} of {self.of}; number the parts from 1 to {self.of}")
        return self


class SiteSettings(Settings):
    """All settings of a site.

    >>> from ppfl.data import DATASETS
    >>> SiteSettings(
    ...     name="clinic", data=DATASETS.make("csv", file="visits.csv", client="patient", target="outcome")
    ... ).policy
    Policy()
    """

    name: SiteName
    data: DataByName
    units: dict[str, str] = {}  # of columns, such as {"glucose": "mg/dl"}: sites must agree on them
    # files of the site; relative to site.toml
    socket: Path = Path("ppfl.sock")
    state: Path = Path("state.sqlite")
    ledger: Path = Path("ledger.jsonl")
    approved: Path = Path("approved")
    names_key: Path = Path("names.key")
    socket_group: str | None = None  # the account of the SuperNode is in it, and may use the socket then
    device: str = "cpu"
    part: PartSettings | None = None
    policy: Policy = Policy()
    secure_sums: SecureSettings | None = None

    @property
    def fewest(self) -> int:
        """Clients that each sum must be over here; with secure sums the set of sites may stand in for them."""
        secure = self.secure_sums
        return 1 if secure is not None and secure.min_sites >= self.policy.min_clients else self.policy.min_clients

    def clients_of_part(self, ids: Sequence[str], sizes: Tensor) -> list[str]:
        """The clients of `[part]`, so that parts have about as many training samples each."""
        assert self.part is not None
        if self.part.of > len(ids):
            raise SettingError(f"the data have {len(ids)} clients, too few for {self.part.of} sites; use fewer sites")
        return [ids[at] for at in sorted(balanced(sizes.tolist(), self.part.of)[self.part.number - 1])]


def load_site(file: Path) -> SiteSettings:
    """The settings of a site from its TOML file; paths in it are relative to the file."""
    settings = load_settings(file)
    try:
        return SiteSettings.model_validate(settings)
    except ValidationError as error:
        raise SettingError(f"{file}: {explain(error, settings, SiteSettings)}") from None


def init_site(folder: Path, name: str) -> Path:
    """Make the folder of a site: site.toml to fill in, a key for client names, one for secure sums, and a place for
    approvals. What is there stays."""
    from .secure_sums import new_key

    SiteSettings.model_validate({"name": name, "data": {"name": "digits"}})
    (folder / "approved").mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for file, text in (("names.key", secrets.token_hex(32)), ("secure.key", new_key()),
                       ("site.toml", TEMPLATE.format(name=name))):  # fmt: skip
        if not (folder / file).exists():
            write_text(folder / file, text)
    return folder / "site.toml"


class DataDescription(NamedTuple):
    """What a site says of its data."""

    ids: ClientIds  # as its data have them
    importance: Tensor  # (M,)
    samples: dict[str, int]  # of every split
    facts: dict[str, Any]  # what all sites must have alike, and kinds of columns
    digest: str  # of the data, which stays here


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
    """Reads the data once. All names of clients are those of the data; `ClientNames` has those that leave."""

    def __init__(self, settings: SiteSettings, base: Path | None, forgotten: Sequence[str] = ()) -> None:
        """forgotten: clients that take no part."""
        self.settings, self.asked = settings, settings.data
        self._error: UnpreparedError | None = None
        self._whole: Federation | None = None
        self._weights: dict[str, float] = {}  # where weights were given: those of a part are on the scale of all
        self.frame = self.asked.call(base) if isinstance(self.asked, TableSettings) else None
        try:
            if isinstance(self.asked, TableSettings):
                whole = self.asked.prepared(self.asked.table(self.frame))
            else:
                whole = load_data(self.asked, base=base)
            if not whole.by_size:
                self._weights = dict(zip(whole.ids, whole.importance.tolist(), strict=True))
            self._whole = self._chosen(whole.to(settings.device))
        except UnpreparedError as error:  # an experiment with [preparation] can use them
            self._error = error
        self.leave_out(forgotten)

    def leave_out(self, forgotten: Sequence[str]) -> None:
        """Go on without these clients."""
        self.forgotten = frozenset(forgotten)
        self._table: tuple[str, _SiteTable] | None = None
        self._prepared: tuple[str, Federation] | None = None

    @property
    def ids(self) -> ClientIds:
        """All clients of the data, those that are forgotten too."""
        if self._whole is not None:
            return self._whole.ids
        known = dict.fromkeys(require_table(self.asked).table(self.frame, choose=False).clients)
        return as_ids(client for client in known if client is not None)

    def plain(self) -> Federation:
        """The clients, with numbers as they are in the data."""
        if self._whole is None:
            raise UnpreparedError(f"site {self.settings.name!r}: {self._error}")
        return self._without_forgotten(self._whole)

    def prepared(self, asked: PreparationSettings | None, agreed: Mapping[str, Any]) -> Federation:
        """The clients. asked: settings; agreed: the preparation of all sites, or of this one where it is empty."""
        if asked is None:
            return self.plain()
        key = json.dumps([asked.model_dump(mode="json"), agreed], sort_keys=True)
        if self._prepared is None or self._prepared[0] != key:
            found = self._read(asked)
            how = Preparation.read(agreed) if agreed else Preparation.fit(found.table, found.train, asked)
            self._prepared = key, require_table(self.asked).prepared(found.table, how).to(self.settings.device)
        return self._prepared[1]

    def describe(self, asked: PreparationSettings | None) -> DataDescription:
        """The clients and what all sites must agree on. asked: settings of a preparation."""
        if asked is None:
            federation = self.plain()
            self._refuse_found_classes(federation.classes)
            samples = {split: len(part) for split, part in federation.splits.items()}
            facts = self._agreed(SampleSpec.of(federation), federation.splits)
            return DataDescription(federation.ids, self.importance(federation), samples, facts, federation.fingerprint)
        table, rows, settings = found = self._read(asked)
        data = require_table(self.asked)
        y, classes = table.read_targets(table.usable(settings.missing), data.task, data.classes)
        if classes is None and not y.is_floating_point():
            classes = number_classes({"train": Samples(y[:, None].float(), y, torch.tensor([0, len(y)]))})
        self._refuse_found_classes(classes)
        raw = SampleSpec(
            shape=(len(table.features.columns),), dtype=torch.float32, target_dtype=y.dtype,
            target_shape=tuple(y.shape[1:]), classes=classes, features=tuple(table.features),
        )  # fmt: skip
        columns = describe_columns(table, settings, found.train)
        if columns.levels:
            name = next(iter(columns.levels))
            raise DataError(
                f"column {name!r} is text, and over sites no value of text is sent: name its levels under "
                f"[preparation] levels in the experiment, or leave it out with drop under [data]"
            )
        facts = self._agreed(raw, rows) | columns.model_dump(mode="json", include={"kinds", "left_out", "named"})
        ids, sizes = rows["train"].ids, rows["train"].sizes
        samples = {split: int(part.sizes.sum()) for split, part in rows.items()}
        return DataDescription(ids, sizes.double(), samples, facts, table.fingerprint(rows))

    def importance(self, federation: Federation) -> Tensor:
        """(M,), of clients of the data, on the scale of all sites."""
        if not self._weights:
            return federation.importance.cpu()
        return torch.tensor([self._weights[client] for client in federation.ids], dtype=torch.float64)

    def sums(self, asked: PreparationSettings, plan: ColumnPlan, center: Center | None, fewest: int) -> dict[str, Any]:
        """Over the training rows, from which all sites together prepare theirs. What is known of fewer clients than
        `fewest` is left out."""
        found = self._read(asked)
        sums, table, train = sum_rows(found.table, plan, found.train, center), found.table, found.train
        clients = table.clients[train].astype(str)

        def few(rows: Any) -> bool:
            return len(np.unique(clients[rows])) < fewest

        numbers = [few(~np.isnan(table.numbers(name)[train])) for name in plan.numbers]
        for name in ("known", "sum", "size", "deviation", "square"):
            if name in sums:
                sums[name][numbers] = 0
        if "levels" in sums:
            cells = {name: (found.table.features[name].iloc[train], levels) for name, levels in plan.levels.items()}
            rare = [few(_has_level(texts, level, levels)) for texts, levels in cells.values() for level in levels]
            sums["levels"][rare] = 0
        return sums

    def _agreed(self, spec: SampleSpec, splits: Mapping[str, Any]) -> dict[str, Any]:
        units = dict(sorted(self.settings.units.items()))
        agreed = {"splits": sorted(splits), "units": units, "weighted": bool(self._weights)}
        return {"agreed": {**spec.model_dump(mode="json"), **agreed}}

    def _refuse_found_classes(self, classes: Sequence[str] | None) -> None:
        """Classes of a table are values of its rows, which never leave; those that its owner named are no values."""
        if classes is not None and isinstance(self.asked, TableSettings) and self.asked.classes is None:
            raise DataError(
                f"the targets have {len(classes)} classes, and over sites no value of the data is sent: name them, "
                f"classes = [...] under [data] in site.toml, in the same order at all sites"
            )

    def _chosen(self, whole: Federation) -> Federation:
        part = self.settings.part
        return whole if part is None else whole.select(self.settings.clients_of_part(whole.ids, whole.train.sizes))

    def _without_forgotten(self, federation: Federation) -> Federation:
        if not self.forgotten & {*federation.ids}:
            return federation
        rest = [client for client in federation.ids if client not in self.forgotten]
        if not rest:
            raise DataError("all clients of the site are forgotten; it has nobody who could take part")
        return federation.select(rest)

    def _read(self, asked: PreparationSettings) -> _SiteTable:
        """The table of the clients that take part, to be prepared by these settings."""
        key = asked.model_dump_json()
        if self._table is None or self._table[0] != key:
            data = require_table(self.asked)
            table = data.table(self.frame, asked.names, choose=False)
            clients = {client for client in table.clients if client is not None}
            if self.settings.part is not None:
                train = table.rows(data, asked.missing)["train"]
                clients = {*self.settings.clients_of_part(train.ids, train.sizes)}
            if self.forgotten & clients or self.settings.part is not None:
                table = table.only(clients - self.forgotten)
            if not len(table):
                raise DataError("all clients of the site are forgotten; it has nobody who could take part")
            self._table = key, _SiteTable(table, table.rows(data, asked.missing), asked)
        return self._table[1]


def _has_level(texts: Any, level: str, levels: Sequence[str]) -> Any:
    """The rows (n,) of a column of text that are counted as this one of its levels."""
    if level == GAP:
        return texts.isna().to_numpy()
    other = texts.notna() & ~texts.isin(levels) if level == OTHER else False
    return ((texts == level) | other).to_numpy()


class ClientNames:
    """The names that clients have outside, in the runs of one experiment."""

    def __init__(self, settings: SiteSettings, base: Path | None, experiment: str) -> None:
        self.site, self.plain, self.experiment = settings.name, settings.policy.client_names == "plain", experiment
        self.is_part, self._key = settings.part is not None, b""
        if not self.plain:
            file = (Path() if base is None else base) / settings.names_key
            if not file.is_file():
                raise SettingError(f"there is no {file}, the key for names of clients; make it with ppfl site init")
            self._key = file.read_bytes()

    def outside(self, ids: Sequence[str]) -> ClientIds:
        """Of these clients: a code that tells nothing without the key, or "site/client"; in a trial with plain names
        those of the whole."""
        if self.plain:
            return as_ids(ids if self.is_part else [f"{self.site}/{client}" for client in ids])
        return tuple(f"{self.site}/{self._code(client)}" for client in ids)

    def position(self, client: str, ids: ClientIds) -> int | None:
        """Where a client of the data, or of the run, stands among names of the run."""
        where = positions_of(ids)
        names = [client, *self.outside([client])]
        return next((where[name] for name in names if name in where), None)

    def token(self, digest: str) -> str:
        """A name for the state of the data, which tells nothing else."""
        return self._code(f"data {digest}")

    def _code(self, text: str) -> str:
        return hmac.new(self._key, f"{self.experiment} {text}".encode(), sha256).hexdigest()[:16]
