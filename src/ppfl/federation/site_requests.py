"""Requests that only a site on a machine of its own gets, besides those of `sites.messages`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..io.codec import message


@message
class DescribeData(NamedTuple):
    """What the data look like: names of clients, sums of counts, and facts that all sites must agree on.

    preparation: its settings, where the rows of tables are to be prepared; a site then also says which columns have
    numbers, which have text, and the levels of text that the settings do not name.
    """

    preparation: dict[str, Any] = {}


@message
class SumColumns(NamedTuple):
    """Sums over all training rows of a table, from which all sites together prepare theirs (data/column_sums.py)."""

    preparation: dict[str, Any]  # settings
    plan: dict[str, Any]  # a ColumnPlan
    center: dict[str, Any] = {}  # a Center, for the second pass


@message
class OpenRun(NamedTuple):
    """Get ready for a run: its network, its population, its engine."""

    settings: dict[str, Any]  # of the experiment, all but [data]
    seed: int
    preparation: dict[str, Any] = {}  # a Preparation, on which all sites have agreed


@message
class ClientTable(NamedTuple):
    """One row per client of `label_counts` or `feature_means`: an affinity between clients needs them."""

    name: str
