"""What the server of a federation keeps beside a run folder: which run it is, and what its sites have said."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from ..algorithms.contract import Rows
from ..io.files import read_json, write_json
from ..server.loop import MAIN
from ..sites import Reply
from .federation_errors import FederationError
from .flower_transport import FlowerTransport


class ServerNotes:
    """What the server keeps beside a run folder: the id of the run, its starts, the ledger, and what sites said."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._merged_file = folder / "server.json", folder / "merged.json"
        self._sites_file, self.ledger_file = folder / "sites.json", folder / "ledger.jsonl"
        before = read_json(self._file) if self._file.is_file() else {}
        # a run that is begun again in the same place is another run, and its sites must not take it for the old one
        self.run = str(before.get("run") or f"{folder.name}-{uuid.uuid4().hex}")
        self.starts = int(before.get("starts", 0)) + 1
        self._about = {**before, "run": self.run, "starts": self.starts}
        write_json(self._file, self._about)

    def first_importance(self, importance: float) -> float:
        """Of all clients together when the run began: weights keep this scale, also after sites have joined."""
        if "importance" not in self._about:
            self._about["importance"] = importance
            write_json(self._file, self._about)
        return float(self._about["importance"])

    def save_sites(self, exchange: int, transport: FlowerTransport) -> None:
        """Before the checkpoint of that exchange is written; what was true at the last one is kept, as that may stay
        the newest checkpoint."""
        described = {name: site.described for name, site in transport.sites.items()}
        write_json(self._sites_file, {name: _to_json(reply) for name, reply in described.items()})
        before = read_json(self._merged_file) if self._merged_file.is_file() else {}
        last = dict(sorted(before.items(), key=lambda item: int(item[0]))[-1:])
        write_json(self._merged_file, last | {str(exchange): list(transport.merged(MAIN).items())})

    def read_merged(self, exchange: int) -> dict[str, int]:
        """Of each site, in the order of the roster, the last exchange that was counted by then."""
        found = read_json(self._merged_file).get(str(exchange)) if self._merged_file.is_file() else None
        if found is None:
            raise FederationError(f"{self._merged_file} does not know exchange {exchange}; start the run anew")
        return {str(site): int(merged) for site, merged in found}

    def read_sites(self, exchange: int) -> dict[str, Reply]:
        """What the sites of the run had said of their data, in the order of the roster."""
        said = read_json(self._sites_file)
        return {name: _from_json(said[name]) for name in self.read_merged(exchange)}


def _to_json(described: Reply) -> dict[str, Any]:
    sums = {name: float(value) for name, value in described.metrics.items()}
    return {"ids": list(described.rows.ids or ()), "sums": sums, "facts": described.facts}


def _from_json(found: dict[str, Any]) -> Reply:
    sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in found["sums"].items()}
    return Reply(metrics=sums, rows=Rows(tuple(found["ids"]), {}), facts=found["facts"])
