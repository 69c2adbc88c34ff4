"""`site.toml`: what a site is, where its data are, and what a server may ask of it. It stays at the site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from ..core.ids import ClientIds, as_ids
from ..core.registry import PythonName
from ..core.settings import Count, Settings
from ..data import DataByName, Federation
from ..errors import SettingError
from ..runs.load import explain, load_settings
from ..sites.engines import balanced
from .envelope import MOST_BYTES

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


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
    ... ).allow
    ()
    """

    name: SiteName
    data: DataByName
    part: PartSettings | None = None
    units: dict[str, str] = {}  # of columns, such as {"glucose": "mg/dl"}: sites must agree on them
    allow: tuple[PythonName, ...] = ()  # functions that a server's experiment may name, for networks and metrics
    state: Path = Path("state.sqlite")  # the clients' states; relative to this file
    ledger: Path = Path("ledger.jsonl")
    device: str = "cpu"
    most_bytes: Annotated[int, Field(gt=0)] = MOST_BYTES  # of a message
    superlink: str | None = None  # host:port
    root_certificate: Path | None = None
    private_key: Path | None = None
    secure_sums: Path | None = None  # a file of `init`: then no sum leaves this site that is not masked

    def choose_clients(self, whole: Federation) -> tuple[Federation, Tensor]:
        """The site's clients of its data, and their importance (M,)."""
        whole = whole.to(self.device)
        if self.part is None:
            return self.with_full_names(whole), whole.importance
        mine = self.clients_of_part(whole.ids, whole.train.sizes)
        return whole.select(mine), whole.importance[whole.positions(mine)]

    def clients_of_part(self, ids: Sequence[str], sizes: Tensor) -> list[str]:
        """The clients of `[part]`, so that parts have about as many training samples each."""
        assert self.part is not None
        if self.part.of > len(ids):
            raise SettingError(
                f"the data have {len(ids)} clients and are to be split over {self.part.of} sites; use fewer"
            )
        return [ids[at] for at in sorted(balanced(sizes.tolist(), self.part.of)[self.part.number - 1])]

    def full_names(self, ids: Sequence[str]) -> ClientIds:
        """The names that clients have outside: "site/client", and in a trial those of the whole."""
        return as_ids(ids if self.part is not None else [f"{self.name}/{client}" for client in ids])

    def with_full_names(self, federation: Federation) -> Federation:
        """A federation of the site's own clients under the names that these have outside."""
        return federation.rename(self.full_names(federation.ids))


def load_site(file: Path) -> SiteSettings:
    """The settings of a site from its TOML file; paths in it are relative to the file."""
    settings = load_settings(file)
    try:
        return SiteSettings.model_validate(settings)
    except ValidationError as error:
        raise SettingError(f"{file}: {explain(error, settings, SiteSettings)}") from None
