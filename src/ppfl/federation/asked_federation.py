"""What an affinity needs to know of clients, asked of the sites."""

from __future__ import annotations

from torch import Tensor

from ..data.sample_spec import SampleSpec
from ..server.loop import in_roster_order
from .federation_errors import FederationError
from .flower_transport import FlowerTransport
from .site_requests import ClientTable


class AskedFederation:
    """What an affinity asks of a federation, brought from the sites."""

    def __init__(self, transport: FlowerTransport, spec: SampleSpec) -> None:
        self._transport = transport
        self.ids, self.n_classes, self.n_clients = transport.roster.ids, spec.n_classes, len(transport.roster)
        self.name = "the federation"

    def label_counts(self) -> Tensor:
        """One row per client."""
        return self._table("label_counts")

    def feature_means(self) -> Tensor:
        """One row per client."""
        return self._table("feature_means")

    def _table(self, name: str) -> Tensor:
        (reply,) = self._transport.ask([ClientTable(name)])
        if len(reply.rows.ids or ()) < self.n_clients:
            raise FederationError(f"{name} of some clients are missing; all sites must be there when a run begins")
        return in_roster_order(reply.rows, self._transport).values[name]
