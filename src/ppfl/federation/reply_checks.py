"""What a server takes from a site: every reply is looked at before it is counted.

A reply of a round that is not finite, has other names or shapes than those of the other sites, rows of clients that are
not the site's, memberships off the simplex, or a change far above the others' is refused as a whole. The site keeps no
work of it, as the next request names the last exchange that was merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..core.ids import ClientIds
from ..core.trees import named_leaves
from ..sites import Reply, Request, Train
from ..sites.filters import FEWEST, BoundedUploads, FilterMemory, Norms, remember
from .column_agreement import check_sums
from .federation_errors import FederationError
from .site_requests import SumColumns

SIMPLEX_TOLERANCE = 1e-3
FEW_SITES_TIMES = 1000.0  # how far a change may be above the smallest other, where there are few to compare with
Signature = tuple[tuple[str, str, tuple[int, ...]], ...]


class ReplyChecks:
    """Remembers what replies looked like, to compare later ones with."""

    def __init__(self) -> None:
        self._signatures: dict[str, Signature] = {}  # of the replies that were taken, by kind of request
        self._memory: FilterMemory = {}

    def check_alone(self, requests: Sequence[Request], replies: Any, ids: ClientIds, shown: Mapping[str, Any]) -> None:
        """What can be said of one site's replies; FederationError with the reason. `ids` are the site's clients,
        `shown` has the rows that the method of each session makes visible."""
        if not isinstance(replies, list) or len(replies) != len(requests):
            raise FederationError(f"it does not have one reply for each of {len(requests)} requests")
        for request, reply in zip(requests, replies, strict=True):
            if not isinstance(reply, Reply):
                raise FederationError(f"a {type(reply).__name__} is no reply")
            _check_rows(reply, ids)
            if isinstance(request, SumColumns):
                _check_finite(reply)
                check_sums(request, reply)
            if isinstance(request, Train):
                _check_finite(reply)
                _check_visible(reply, shown.get(request.session, ()))

    def compare(
        self, requests: Sequence[Request], replies: Mapping[str, Sequence[Reply]], shares: Mapping[str, float]
    ) -> dict[str, str]:
        """Reasons to refuse sites, by name. shares: the importance of each site's clients."""
        refused: dict[str, str] = {}
        for at, request in enumerate(requests):
            if isinstance(request, Train):
                ones = {site: all_of[at] for site, all_of in replies.items() if all_of[at].totals}
                refused |= self._compare_signatures(_kind(request), ones)
                rest = {site: reply for site, reply in ones.items() if site not in refused}
                refused |= self._compare_norms(_kind(request), rest, shares)
        return refused

    def _compare_signatures(self, kind: str, replies: Mapping[str, Reply]) -> dict[str, str]:
        """What most sites send is expected; where there is no majority, what was taken in earlier rounds."""
        found = {site: _signature(reply) for site, reply in replies.items()}
        if not found:
            return {}
        known = self._signatures.get(kind)
        (most, times), *others = Counter(found.values()).most_common()
        if known is not None and (times == 1 or (others and others[0][1] == times)):
            most = known
        elif others and others[0][1] == times:
            raise FederationError(
                f"sites do not agree on what they send: {_difference(most, others[0][0])}; "
                f"install the same ppfl at {' and '.join(map(repr, found))}"
            )
        self._signatures[kind] = most
        return {site: _difference(most, other) for site, other in found.items() if other != most}

    def _compare_norms(self, kind: str, replies: Mapping[str, Reply], shares: Mapping[str, float]) -> dict[str, str]:
        sites = list(replies)
        sizes = [_norm(replies[site]) / max(shares[site], 1e-12) for site in sites]
        norms = self._norms_of(kind, sizes)
        large = BoundedUploads().refuse(norms)
        if len(norms.recent) + len(sizes) < FEWEST and len(sizes) > 1:
            least = min(size for size in sizes)
            large = {at: "" for at, size in enumerate(sizes) if size > FEW_SITES_TIMES * least > 0}
        refused = {
            sites[at]: f"its change has norm {sizes[at]:.3g} for its share, most have {median(sizes):.3g}"
            for at in large
        }
        counted = [size for site, size in zip(sites, sizes, strict=True) if site not in refused]
        self._memory[kind] = remember(self._norms_of(kind, counted))
        return refused

    def _norms_of(self, kind: str, sizes: Sequence[float]) -> Norms:
        upload = torch.tensor(sizes, dtype=torch.float64)
        return Norms(upload, torch.ones_like(upload), torch.zeros_like(upload), *self._memory.get(kind, ()))


def _kind(request: Train) -> str:
    """Requests of one kind have replies of one form: a task's names and switches matter, its step sizes do not."""
    fields = request.task if isinstance(request.task, tuple) else (request.task,)
    return repr((request.session, type(request.task).__name__, [f for f in fields if isinstance(f, str | bool)]))


def _check_finite(reply: Reply) -> None:
    for name, leaf in named_leaves(
        {"totals": reply.totals, "metrics": reply.metrics, "rows": reply.rows.values}
    ).items():
        if not isinstance(leaf, Tensor):
            raise FederationError(f"{name} is no tensor")
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise FederationError(f"{name} is not finite")


def _check_rows(reply: Reply, ids: ClientIds) -> None:
    rows = reply.rows
    n_clients = len(ids) if rows.ids is None else len(rows.ids)
    if rows.ids is not None and rows.ids != ids:
        here = set(ids)
        if not isinstance(rows.ids, tuple):  # numbered ids would be many names in a short message
            raise FederationError("its rows do not name their clients one by one")
        if len(set(rows.ids)) < len(rows.ids):
            raise FederationError("its rows have a client twice")
        if strange := [client for client in rows.ids if client not in here]:
            raise FederationError(f"its rows have client {strange[0]!r:.60}, which is not one of its own")
    for name, leaf in rows.values.items():
        if leaf.dim() == 0 or len(leaf) != n_clients:
            raise FederationError(f"its rows {name!r} are of shape {tuple(leaf.shape)} for {n_clients} clients")
    if (c := rows.values.get("membership")) is not None and len(c):
        on = (
            c.dim() == 2
            and bool((c >= -SIMPLEX_TOLERANCE).all())
            and bool((c.sum(1) - 1).abs().max() <= SIMPLEX_TOLERANCE)
        )
        if not on:
            raise FederationError("its memberships are not on the simplex: rows of numbers >= 0 that sum to 1")


def _check_visible(reply: Reply, shown: Sequence[str]) -> None:
    for name in reply.rows.values:
        if not name.startswith(tuple(shown)):
            raise FederationError(f"it sends rows {name!r} that the method does not show")


def _signature(reply: Reply) -> Signature:
    leaves = named_leaves({"totals": reply.totals, "rows": reply.rows.values})
    rows = {f"rows.{name}" for name in reply.rows.values}
    return tuple(
        (name, str(leaf.dtype), tuple(leaf.shape[1:] if name in rows else leaf.shape))
        for name, leaf in sorted(leaves.items())
    )


def _difference(expected: Signature, found: Signature) -> str:
    one, other = ({name: (dtype, shape) for name, dtype, shape in part} for part in (expected, found))
    name = next(name for name in {**one, **other} if one.get(name) != other.get(name))

    def said(part: dict[str, Any]) -> str:
        return "missing" if name not in part else f"{part[name][0].removeprefix('torch.')} {part[name][1]}"

    return f"{name} is {said(other)}, expected {said(one)}"


def _norm(reply: Reply) -> float:
    leaves = [leaf for leaf in named_leaves(reply.totals).values() if leaf.is_floating_point() and leaf.numel() > 1]
    return float(torch.stack([leaf.double().norm() for leaf in leaves]).norm()) if leaves else 0.0
