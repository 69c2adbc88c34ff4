"""What a site said of its data: it must fit what the other sites said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.ids import ClientIds
from ..errors import DataError
from ..sites import Reply
from .federation_errors import FederationError


class SiteRecord:
    """What the server knows of a site."""

    def __init__(self, name: str, described: Reply) -> None:
        self.name, self.described = name, described
        self.ids: ClientIds = described.rows.ids or ()
        self.importance = float(described.metrics["importance"])
        self.merged: dict[str, int] = {}  # the last exchange of each session whose reply was counted

    @property
    def facts(self) -> dict[str, Any]:
        """What all sites must agree on."""
        return dict(self.described.facts["agreed"])


def check_description(name: str, requests: Sequence[Any], replies: Any) -> None:
    """Refuse a reply that is no description of data."""
    try:
        (reply,) = replies
        facts, ids = reply.facts["agreed"], reply.rows.ids
        # names one by one: numbered ids would be many names in a short message
        sound = isinstance(facts, dict) and isinstance(ids, tuple) and len(set(ids)) == len(ids) > 0
        sound = sound and float(reply.metrics["importance"]) > 0
    except (TypeError, ValueError, KeyError, AttributeError):
        sound = False
    if not sound:
        raise FederationError("it does not describe its data; install the same ppfl there")


def refuse_different_data(one: SiteRecord, other: SiteRecord) -> None:
    """Refuse two sites whose data do not fit together; the difference is named."""
    for key, here in one.facts.items():
        there = other.facts.get(key)
        if here != there:
            raise DataError(
                f"site {other.name!r} does not fit: {_difference(key, here, there, one.name)}; change the data or the "
                f"config of one of them"
            )


def _difference(key: str, here: Any, there: Any, first: str) -> str:
    if isinstance(here, list) and isinstance(there, list):
        parts = [f"it lacks {one!r}" for one in here if one not in there][:1]
        parts += [f"it has {one!r}" for one in there if one not in here][:1]
        if parts:
            return f"{key} differ from those of site {first!r}: {' and '.join(parts)}"
    if isinstance(here, dict) and isinstance(there, dict):
        odd = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        return f"{key} of {odd!r} is {there.get(odd)!r}, at site {first!r} it is {here.get(odd)!r}"
    return f"{key} is {there!r}, at site {first!r} it is {here!r}"
