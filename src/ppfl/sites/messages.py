"""What a server asks of its sites, and what they answer.

Every request and every reply is a tree of numbers, text and tensors, so that any transport can carry it. What a reply
holds is either a sum over clients (`totals`, `metrics`) or seen client by client (`rows`); `facts` are the same for
all sites, or are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Method, Rows, Total, Who
from ..core.trees import Params, Tree, tree_map
from ..errors import DataError
from ..io.codec import dump, load, message
from .filters import FilterMemory

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


@message
class Keep(NamedTuple):
    """Remember the client states as they are now, as the kept ones."""

    session: str


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
    filters: dict[str, FilterMemory] = {}  # what filters remember, by the name of the site


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


@message
class OfferKey(NamedTuple):
    """Make a key for the secure sums of a run, and offer its public half to the other sites."""

    run: str


@message
class AcceptKeys(NamedTuple):
    """What the sites that take part have offered."""

    run: str
    offers: dict[str, KeyOffer]  # by site


@message
class Masked(NamedTuple):
    """A request whose sums are masked: only their total over all sites can be read."""

    run: str
    keys: str  # which keys: the name of what the sites have accepted
    number: int  # of the request, counted from 1 for these keys
    request: Any  # Describe, Train or Evaluate


@message
class Unmask(NamedTuple):
    """What is needed to read the total of a masked request, from the sites that answered it."""

    run: str
    keys: str
    number: int
    packets: dict[str, dict[str, str]]  # by the site that answered, and the site it is for


Request = Describe | Setup | Train | Evaluate | Keep | Save | Restore | Close | OfferKey | AcceptKeys | Masked | Unmask


@message
class Refusal(NamedTuple):
    """An upload that was not counted."""

    client: str
    reason: str


@message
class KeyOffer(NamedTuple):
    """A site's public key for one run, signed with the key by which the other sites know it. All in hexadecimal."""

    key: str
    settings: str  # of secure sums, as JSON
    signature: str


@message
class MaskedNote(NamedTuple):
    """What goes with the masked sums of a site."""

    packets: dict[str, str]  # for each site, shares of this site's masks that only it can read
    layouts: dict[str, str]  # names, types and shapes of what each part of the sums holds
    absent: dict[
        str, dict[str, str]
    ]  # by part that this site has not: the masks that others have put on it for this site


@message
class Shares(NamedTuple):
    """Shares that open the masks of one request, in hexadecimal; or why a site does not give them."""

    own: dict[str, str]  # by site that answered
    pairs: dict[str, dict[str, str]]  # by site that answered, and site that did not
    refused: str = ""


@message
class NoKeys(NamedTuple):
    """A site that has not the keys that a request speaks of, as it has been started again."""


@message
class Reply(NamedTuple):
    """What a site answers, or all sites together."""

    totals: dict[str, Total] = {}  # sums over clients, weighted by p_i
    metrics: dict[str, Tensor] = {}  # plain sums over clients, float64
    rows: Rows = Rows((), {})
    facts: dict[str, Any] = {}
    refused: tuple[Refusal, ...] = ()
    by_site: dict[str, Any] = {}  # what secure sums need from each site, or what its filters remember; no tensors


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
