"""Requests that only a site on a machine of its own gets, besides those of `sites.messages`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..algorithms.contract import message


@message
class DescribeData(NamedTuple):
    """What the data look like: names of clients, sums of counts, and facts that all sites must agree on."""


@message
class OpenRun(NamedTuple):
    """Get ready for a run: its network, its population, its engine."""

    settings: dict[str, Any]  # of the experiment, all but [data]
    seed: int


@message
class ClientTable(NamedTuple):
    """One row per client of `label_counts` or `feature_means`: an affinity between clients needs them."""

    name: str


@message
class UseKept(NamedTuple):
    """Go on from the kept client states: the run returns the state of that round."""

    session: str
