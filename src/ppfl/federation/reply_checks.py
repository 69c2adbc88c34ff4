"""What a server takes from a site: every reply is looked at before it is counted.

A reply that is not finite, has another form than its request implies, rows of clients that are not the site's,
memberships off the simplex, scores that cannot be, or a change far above the others' is refused as a whole. The site
keeps no work of it, as the next request names the last exchange that was merged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Rows, Total
from ..core.ids import ClientIds
from ..core.trees import named_leaves
from ..data.column_sums import ColumnPlan
from ..sites import Evaluate, Refusal, Reply, Request, Train
from ..sites.evaluation import BINS
from ..sites.filters import FEWEST, BoundedUploads, FilterMemory, Norms, remember
from .messages import ClientTable, FederationError, Join, Masked, Ready, Reveal, SumColumns

SIMPLEX_TOLERANCE = 1e-3
FEW_SITES_TIMES = 1000.0  # how far a change may be above the smallest other, where there are few to compare with
MOST_CLIENTS = 10**6  # of one site
Signature = tuple[tuple[str, str, tuple[int, ...]], ...]
_SCORE_SUMS = ("total", "samples", "sum", "clients", "shown", "shown_squared", "weighted", "importance", "not_finite",
               "histogram")  # fmt: skip
_COUNTS = ("samples", "clients", "importance", "not_finite")


class SiteFacts(NamedTuple):
    """What a server knows of a site, and what its scores are bounded by."""

    ids: ClientIds
    importance: float
    samples: Mapping[str, float]  # by split
    higher: float = math.inf  # no score of a sample is above it: 1 for accuracies


def check_reply(request: Any, reply: Any, site: SiteFacts, shown: Sequence[str]) -> None:
    """What can be said of one reply; FederationError with the reason. shown: rows that the method makes visible."""
    if isinstance(request, Reveal):
        if not isinstance(reply, Masked) or not isinstance(reply.parts, dict):
            raise FederationError("it does not reveal its sums")
        return
    if not isinstance(reply, Reply):
        raise FederationError(f"a {type(reply).__name__:.40} is no reply")
    _check_types(reply)
    if isinstance(reply.facts.get("ready"), Ready):
        return
    _check_finite(reply, evaluated=isinstance(request, Evaluate))
    _check_rows(reply, site.ids)
    if isinstance(request, SumColumns):
        _check_columns(request, reply)
    elif isinstance(request, Train):
        _check_train(request, reply, site, shown)
    elif isinstance(request, Evaluate):
        _check_scores(request, reply, site)
    elif isinstance(request, ClientTable):
        if set(reply.rows.values) != {request.name} or reply.rows.n_clients != len(site.ids):
            raise FederationError(f"it does not give {request.name} of all its clients")
    elif not isinstance(request, Join) and (reply.totals or reply.metrics or reply.rows.values):
        raise FederationError(f"it sends numbers that nobody asked for with a {type(request).__name__}")


def check_description(reply: Any) -> None:
    """Refuse a reply that is no description of data."""
    if not isinstance(reply, Reply):
        raise FederationError("it does not describe its data")
    _check_types(reply)
    _check_finite(reply, evaluated=False)
    facts, ids = reply.facts.get("agreed"), reply.rows.ids
    numbers = {name: value for name, value in reply.metrics.items() if value.dim() == 0 and float(value) >= 0}
    # names one by one: numbered ids would be many names in a short message
    sound = isinstance(facts, dict) and isinstance(ids, tuple) and 0 < len(ids) == len(set(ids)) <= MOST_CLIENTS
    if not sound or float(numbers.get("importance", torch.zeros(()))) <= 0 or numbers.keys() != reply.metrics.keys():
        raise FederationError("it does not describe its data")
    if not (facts or {}).get("weighted") and float(numbers["importance"]) != float(numbers.get("samples.train", -1)):
        raise FederationError("the importance of its clients is not their number of training samples")
    if odd := [name for name in ids or () if not isinstance(name, str) or len(name) > 500 or not name.isprintable()]:
        raise FederationError(f"a client is called {odd[0]!r:.80}")


def _check_types(reply: Reply) -> None:
    parts = (reply.totals, reply.metrics, reply.facts, reply.by_site)
    if not all(isinstance(part, dict) for part in parts) or not isinstance(reply.rows, Rows):
        raise FederationError("its reply has other fields")
    if not isinstance(reply.rows.values, dict) or not isinstance(reply.refused, tuple):
        raise FederationError("its reply has other fields")
    tensors = [*reply.metrics.values(), *reply.rows.values.values()]
    for total in reply.totals.values():
        if not isinstance(total, Total):
            raise FederationError("a sum of its reply is none")
        tensors += [total.weight, *named_leaves(total.value).values()]
    if not all(isinstance(leaf, Tensor) for leaf in tensors):
        raise FederationError("its reply has something else in the place of numbers")
    if any(value.dtype != torch.float64 for value in reply.metrics.values()):
        raise FederationError("its metrics are of another type")
    if not all(isinstance(one, Refusal) and isinstance(one.client, str) for one in reply.refused):
        raise FederationError("the clients that it refused have no names")


def _check_finite(reply: Reply, *, evaluated: bool) -> None:
    trees: dict[str, Any] = {"totals": reply.totals, "metrics": reply.metrics}
    if not evaluated:  # a client without samples has no score
        trees["rows"] = reply.rows.values
    for name, leaf in named_leaves(trees).items():
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise FederationError(f"{name:.80} is not finite")


def _check_rows(reply: Reply, ids: ClientIds) -> None:
    rows, here = reply.rows, set(ids)
    n_clients = len(ids) if rows.ids is None else len(rows.ids)
    if rows.ids is not None and rows.ids != ids:
        if not isinstance(rows.ids, tuple) or not all(isinstance(client, str) for client in rows.ids):
            raise FederationError("its rows do not name their clients one by one")
        if len(set(rows.ids)) < len(rows.ids):
            raise FederationError("its rows have a client twice")
        if strange := [client for client in rows.ids if client not in here]:
            raise FederationError(f"its rows have client {strange[0]!r:.60}, which is not one of its own")
    if strange := [client for client, _ in reply.refused if client not in here]:
        raise FederationError(f"it refused client {strange[0]!r:.60}, which is not one of its own")
    for name, leaf in rows.values.items():
        if leaf.dim() == 0 or len(leaf) != n_clients:
            raise FederationError(f"its rows {name!r:.40} are of shape {tuple(leaf.shape)} for {n_clients} clients")
    if (c := rows.values.get("membership")) is not None and len(c):
        on = c.dim() == 2 and bool((c >= -SIMPLEX_TOLERANCE).all())
        if not on or not bool((c.sum(1) - 1).abs().max() <= SIMPLEX_TOLERANCE):
            raise FederationError("its memberships are not on the simplex: rows of numbers >= 0 that sum to 1")


def _check_train(request: Train, reply: Reply, site: SiteFacts, shown: Sequence[str]) -> None:
    for name in reply.rows.values:
        if not name.startswith(tuple(shown)):
            raise FederationError(f"it sends rows {name!r:.40} that the method does not show")
    asked = len(site.ids) if request.who is None else len(request.who)
    counts = {name: float(reply.metrics.get(name, torch.zeros(()))) for name in ("asked", "participants", "lost")}
    if counts["asked"] != asked or not 0 <= counts["participants"] <= asked or not 0 <= counts["lost"] <= asked:
        raise FederationError(f"it counts {counts} where {asked} clients were asked")
    if any(value.dim() for value in reply.metrics.values()):
        raise FederationError("a metric is no number")
    if float(reply.metrics.get("samples", torch.zeros(()))) < 0 or float(reply.metrics["bytes_up"]) < 0:
        raise FederationError("it has fewer than no samples")


def _check_scores(request: Evaluate, reply: Reply, site: SiteFacts) -> None:
    names = ("loss", "score", *request.metrics)
    expected = {f"{split}.{name}.{field}" for split in request.splits for name in names for field in _SCORE_SUMS}
    if reply.metrics.keys() != expected:
        raise FederationError("its scores have other names than were asked for")
    for key, value in reply.metrics.items():
        split, name, sum_ = key.split(".")
        if tuple(value.shape) != ((2, BINS) if sum_ == "histogram" else ()):
            raise FederationError(f"{key} is of shape {tuple(value.shape)}")
        if (sum_ in _COUNTS and float(value) < 0) or (sum_ == "histogram" and bool((value[0] < 0).any())):
            raise FederationError(f"{key} is negative")
        most = {"clients": len(site.ids), "samples": site.samples.get(split, math.inf),
                "importance": site.importance * (1 + 1e-6)}.get(sum_, math.inf)  # fmt: skip
        if name == "score" and sum_ in ("total", "sum"):
            count = reply.metrics[f"{split}.score.{'samples' if sum_ == 'total' else 'clients'}"]
            most = site.higher * float(count) * (1 + 1e-6) if site.higher < math.inf else most
        if sum_ != "histogram" and float(value) > most:
            raise FederationError(f"{key} is {float(value):.6g}, and cannot be above {most:.6g}")
    for key, rows in reply.rows.values.items():
        if key.endswith(".score") and bool((rows[rows.isfinite()] > site.higher).any()):
            raise FederationError(f"{key} of a client is above {site.higher:g}")


def _check_columns(request: SumColumns, reply: Reply) -> None:
    expected = ColumnPlan.model_validate(request.plan).sizes(second=bool(request.center))
    found = {name: tuple(part.shape) for name, part in reply.metrics.items()}
    if found != {name: (size,) for name, size in expected.items()}:
        raise FederationError("its sums of columns have other names or sizes than were asked for")
    counted = {name: part for name, part in reply.metrics.items() if name not in ("sum", "deviation")}
    if odd := [name for name, part in counted.items() if bool((part < 0).any())]:
        raise FederationError(f"its {odd[0]} of columns are negative")
    if float(reply.metrics["sites"]) != 1 or (not request.center and float(reply.metrics["rows"]) < 1):
        raise FederationError("its sums are of no rows")


class SiteNorms:
    """Compares what sites send for one kind of task: names, types and shapes, and how large it is."""

    def __init__(self) -> None:
        self._signatures: dict[str, Signature] = {}  # of the replies that were taken, by kind of request
        self._memory: FilterMemory = {}

    def compare(self, request: Train, replies: Mapping[str, Reply], sites: Mapping[str, SiteFacts]) -> dict[str, str]:
        """Reasons to refuse sites, by name."""
        kind, ones = _kind(request), {site: reply for site, reply in replies.items() if reply.totals}
        refused = self._compare_signatures(kind, ones)
        rest = {site: reply for site, reply in ones.items() if site not in refused}
        return refused | self._compare_norms(kind, rest, sites)

    def _compare_signatures(self, kind: str, replies: Mapping[str, Reply]) -> dict[str, str]:
        """What most sites send is expected; where there is no majority, what was taken in earlier rounds."""
        found = {site: _signature(reply) for site, reply in replies.items()}
        if not found:
            return {}
        known = self._signatures.get(kind)
        (most, times), *others = Counter(found.values()).most_common()
        tied = bool(others) and others[0][1] == times
        if known is not None and (times == 1 or tied):
            most = known
        elif tied:
            raise FederationError(
                f"sites do not agree on what they send: {_difference(most, others[0][0])}; "
                f"install the same ppfl at {' and '.join(map(repr, found))}"
            )
        self._signatures[kind] = most
        return {site: _difference(most, other) for site, other in found.items() if other != most}

    def _compare_norms(self, kind: str, replies: Mapping[str, Reply], sites: Mapping[str, SiteFacts]) -> dict[str, str]:
        names, whole = list(replies), sum(site.importance for site in sites.values())
        sizes = [_norm(replies[name]) * whole / sites[name].importance for name in names]
        norms = self._norms_of(kind, sizes)
        large = BoundedUploads().refuse(norms)
        if len(norms.recent) + len(sizes) < FEWEST and len(sizes) > 1:
            least = min(sizes)
            large = {at: "" for at, size in enumerate(sizes) if size > FEW_SITES_TIMES * least > 0}
        refused = {
            names[at]: f"its change has norm {sizes[at]:.3g} for its share, most have {median(sizes):.3g}"
            for at in large
        }
        counted = [size for name, size in zip(names, sizes, strict=True) if name not in refused]
        self._memory[kind] = remember(self._norms_of(kind, counted))
        return refused

    def _norms_of(self, kind: str, sizes: Sequence[float]) -> Norms:
        upload = torch.tensor(sizes, dtype=torch.float64)
        return Norms(upload, torch.ones_like(upload), torch.zeros_like(upload), *self._memory.get(kind, ()))


def _kind(request: Request) -> str:
    """Requests of one kind have replies of one form: a task's names and switches matter, its step sizes do not."""
    task = getattr(request, "task", None)
    fields = task if isinstance(task, tuple) else (task,)
    session = getattr(request, "session", "")
    return repr((session, type(task).__name__, [part for part in fields if isinstance(part, str | bool)]))


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

    return f"{name:.80} is {said(other)}, expected {said(one)}"


def _norm(reply: Reply) -> float:
    leaves = [leaf for leaf in named_leaves(reply.totals).values() if leaf.is_floating_point() and leaf.numel() > 1]
    return float(torch.stack([leaf.double().norm() for leaf in leaves]).norm()) if leaves else 0.0
