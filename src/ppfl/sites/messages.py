"""What a server asks of its sites, and what they answer.

Every request and every reply is a tree of numbers, text and tensors, so that any transport can carry it. What a reply
holds is either a sum over clients (`totals`, `metrics`) or seen client by client (`rows`); `facts` are the same for
all sites, or are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..algorithms.contract import Method, Rows, Total, Who
from ..core.ids import ClientIds, Positions, Roster
from ..core.trees import Params, Tree, tree_map
from ..errors import DataError
from ..io.codec import dump, load, message

Snapshot = Literal["now", "kept"]


@message
class Describe(NamedTuple):
    """How many clients and samples there are, and of which shape."""


@message
class Setup(NamedTuple):
    """Begin a session: clients with fresh states, by this method. A session of the same name is replaced."""

    session: str
    method: Method
    start: Params  # the network's values before the first round
    seed: int
    importance: float  # of all clients of all sites together
    dropout: float = 0.0  # of the clients asked in a round, how many are lost: a simulation


@message
class Train(NamedTuple):
    """One exchange of a round.

    `merged` is the last exchange of which the server has merged this site's reply: work of a later one is undone.
    """

    session: str
    round: int  # from 0
    exchange: int  # counted over the whole session, from 1
    merged: int
    who: Who
    task: Any
    shared: Tree  # for all of them
    own: dict[str, Tensor]  # one row for each of `who`, or for all clients of the site
    keep_states: bool = True  # False: client states stay as they are, a measurement
    saved: int = 0  # the exchange of the server's last checkpoint: states before it are not needed any more

    def part_for(self, ids: ClientIds, roster: Roster, site: str) -> Train:
        """The same for those of the site's clients that take part."""
        if ids == roster.ids:
            return self
        if self.who is None:
            return self._replace(own=_rows_at(self.own, roster.positions(ids)))
        mine = set(ids)
        here = [at for at, client in enumerate(self.who) if client in mine]
        who = tuple(self.who[at] for at in here)
        return self._replace(who=who, own=_rows_at(self.own, torch.tensor(here, dtype=torch.long)))


@message
class Evaluate(NamedTuple):
    """Every client's personal model on its own data."""

    session: str
    splits: tuple[str, ...]
    shared: Tree
    own: dict[str, Tensor]  # one row for each client of the site
    per_client: bool = True  # whether each client's scores are reported, as rows; not where some are left out
    hard: bool = False  # by the max rule
    metrics: tuple[str, ...] = ()  # names of metrics that the site knows, besides the loss and its score
    without: tuple[str, ...] = ()  # clients that are not evaluated
    share: float = 1.0  # of the clients: each with this probability, the same ones every time

    def part_for(self, ids: ClientIds, roster: Roster, site: str) -> Evaluate:
        """The same for the site's clients."""
        return self if ids == roster.ids else self._replace(own=_rows_at(self.own, roster.positions(ids)))


@message
class Keep(NamedTuple):
    """Remember the client states as they are now, as the kept ones."""

    session: str


@message
class UseKept(NamedTuple):
    """Go back to the kept client states: the run returns the state of that round."""

    session: str
    exchange: int  # after which they were kept


@message
class Save(NamedTuple):
    """The client states after the exchange `merged`, as rows by client id, of clients that were ever written to; work
    of a later exchange is undone."""

    session: str
    merged: int
    snapshot: Snapshot = "now"


@message
class SavedStates(NamedTuple):
    """What sites have saved of their clients."""

    rows: Rows  # the states of clients that were ever written to; the others are as every client begins
    # by the name of the site: what its filters remember; or of a site that keeps the states of its clients itself, the
    # last exchange whose reply the server has merged
    by_site: dict[str, Any] = {}


@message
class Restore(NamedTuple):
    """Client states as they were saved; a site takes those of its own clients, and the memory of filters by its name.

    Clients without a row begin anew.
    """

    session: str
    exchange: int  # after which they were saved
    saved: SavedStates
    snapshot: Snapshot = "now"


@message
class Close(NamedTuple):
    """Forget a session."""

    session: str


Request = Describe | Setup | Train | Evaluate | Keep | UseKept | Save | Restore | Close


@runtime_checkable
class Divided(Protocol):
    """A request of which every site gets a part of its own; any other goes to all sites as it is."""

    def part_for(self, ids: ClientIds, roster: Roster, site: str) -> Any:
        """The part for the site with these clients and this name."""


def part_for(request: Any, ids: ClientIds, roster: Roster, site: str) -> Any:
    """The part of any request for the site with these of all clients and this name."""
    return request.part_for(ids, roster, site) if isinstance(request, Divided) else request


def _rows_at(own: dict[str, Tensor], at: Positions) -> dict[str, Tensor]:
    return {name: leaf[at.to(leaf.device) if isinstance(at, Tensor) else at] for name, leaf in own.items()}


@message
class Refusal(NamedTuple):
    """An upload that was not counted."""

    client: str
    reason: str


@message
class Reply(NamedTuple):
    """What a site answers, or all sites together."""

    totals: dict[str, Total] = {}  # sums over clients, weighted by p_i
    metrics: dict[str, Tensor] = {}  # plain sums over clients, float64
    rows: Rows = Rows((), {})
    facts: dict[str, Any] = {}
    refused: tuple[Refusal, ...] = ()
    by_site: dict[str, Any] = {}  # of SavedStates, by site; no tensors


def encode(messages: Any) -> bytes:
    """Requests or replies as bytes, without a digest: who carries them checks that they arrive unchanged."""
    file = BytesIO()
    dump(messages, file, "messages", digest=False)
    return file.getvalue()


def decode(data: bytes) -> Any:
    """What `encode` was given; DataError where these are no such bytes."""
    return load(data, "messages")


def number(reply: Reply, metric: str) -> float:
    """A metric that is one number; 0 where no client reported it."""
    found = reply.metrics.get(metric)
    return 0.0 if found is None else float(found)


def combine(replies: Sequence[Reply], names: Sequence[str]) -> Reply:
    """The replies of several sites, with these names, as one."""
    first, *others = replies
    if not others:
        return first
    for name, other in zip(names[1:], others, strict=True):
        refuse_disagreement(first.facts, names[0], other.facts, name)
    metrics: dict[str, Tensor] = {}
    totals: dict[str, Total] = {}
    for reply in replies:
        for key, value in reply.metrics.items():
            metrics[key] = metrics[key] + value if key in metrics else value
        for key, total in reply.totals.items():
            totals[key] = tree_map(torch.add, totals[key], total) if key in totals else total
    return Reply(
        totals, metrics, join_rows([reply.rows for reply in replies]), first.facts,
        tuple(refusal for reply in replies for refusal in reply.refused),
        {name: note for reply in replies for name, note in reply.by_site.items()},
    )  # fmt: skip


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of different clients, one after the other; all of them name their clients. What one lacks is left out."""
    filled = [part for part in parts if part.values]
    if not filled:
        return Rows(tuple(name for part in parts for name in part.ids or ()), {})
    common = [key for key in filled[0].values if all(key in part.values for part in filled)]
    values = {key: torch.cat([part.values[key] for part in filled]) for key in common}
    return Rows(tuple(name for part in filled for name in part.ids or ()), values)


def refuse_disagreement(one: dict[str, Any], first: str, other: dict[str, Any], second: str) -> None:
    """Refuse two sites whose data do not fit together."""
    for key in one:
        if one[key] != other.get(key):
            raise DataError(
                f"site {second!r} has {key} {other.get(key)!r} but site {first!r} has {one[key]!r}; "
                f"sites of one federation must agree: change the data of one of them"
            )
