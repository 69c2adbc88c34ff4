"""What travels between the server and a site: one call, and one answer to it.

A call is two pieces of bytes: what all sites get, which a carrier needs to store only once, and what this site alone
gets. Both are written by `io.codec`: numbers, text, tensors and registered types, never code. The sizes are checked
before anything is read, and what is read takes no more memory than its bytes announce.

An answer that is an error is a code and nothing else: the text of an error can quote data, and it stays at the site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from io import BytesIO
from typing import Any, NamedTuple

from ..errors import PPFLError
from ..io.codec import dump, load, message
from ..sites import Evaluate, Setup, Train

PROTOCOL = 2
MOST_BYTES = 1 << 30  # of a message
_SHARED, _OWN, _ANSWER = "ppfl shared", "ppfl call", "ppfl answer"
_SHARED_FIELDS = {Train: "shared", Evaluate: "shared", Setup: "start"}  # the same for all sites

# What the server's operator reads of an error at a site; the site's own log says more.
CODES = {
    "not-approved": "its owner has not approved this experiment: ppfl site check FILE --approve, at the site",
    "not-in-experiment": "the request is not one that the approved experiment makes",
    "too-few-clients": "it has too few clients for its policy, or one of them outweighs the others",
    "rows-not-allowed": "the experiment shows values client by client that the policy of the site does not let out",
    "budget-spent": "the experiment has used up what its approval allows; its owner may approve it once more",
    "data-changed": "its data changed since the run began: bring them back, or begin another run",
    "clients-changed": "a client was forgotten there; it joins again after this round",
    "unknown-run": "it does not know this run: its store is new, or was lost",
    "unknown-states": "it has no client states of this time any more: bring back its store, or begin another run",
    "old-call": "it has answered a later call already",
    "other-site": "the call is for another site; look at the names that nodes were registered with",
    "other-version": "another version of ppfl, or no message of ppfl: install the same version on both sides",
    "too-large": "the message is larger than max_message_bytes of the site",
    "out-of-time": "the work took longer than max_seconds of the site",
    "out-of-range": "numbers are too large for secure sums: training diverged, or a column needs a larger unit",
    "secure-set": "it does not reveal its sum to this set of sites; look at peers and min_sites in its site.toml",
    "failed": "something failed there; its log says what",
    "no-answer": "the process of the site does not answer its relay: start ppfl site serve",
    "not-delivered": "the message did not reach it",
    "invalid": "its reply was refused",
}


class FederationError(PPFLError):
    """Something that the other side of a federation did, or did not do."""


class Refused(FederationError):  # noqa: N818 (what a site does, and no fault)
    """A call that a site does not answer. The code leaves the site, the text does not."""

    def __init__(self, code: str, text: str = "") -> None:
        self.code = code
        super().__init__(text or CODES[code])


@message
class Join(NamedTuple):
    """Take part in a run of an experiment, which the site's owner has approved; say what the data look like."""

    experiment: str  # its hash
    seed: int


@message
class SumColumns(NamedTuple):
    """Sums over all training rows of a table, from which all sites together prepare theirs (data/column_sums.py)."""

    plan: dict[str, Any]  # a ColumnPlan
    center: dict[str, Any] = {}  # a Center, for the second pass


@message
class PrepareRows(NamedTuple):
    """Prepare the rows of the tables in the way on which all sites have agreed."""

    preparation: dict[str, Any]


@message
class ClientTable(NamedTuple):
    """One row per client of `label_counts` or `feature_means`: an affinity between clients needs them."""

    name: str


@message
class Reveal(NamedTuple):
    """Send the sums that were kept for a request, masked for a set of sites."""

    number: int  # of the call whose sums are asked for
    digest: str  # of the request
    nonces: dict[str, str]  # of the sites of the set, as they gave them with their "ready"


@message
class Ready(NamedTuple):
    """What a site with secure sums answers first: the work is done, and its sums are kept."""

    nonce: str
    digest: str  # of the request, with what was sent to all sites
    layout: dict[str, str]  # names, types and shapes of each part of the sums; without parts nobody took part
    clients: int  # that took part; more than the policy asks for, or 0


@message
class Masked(NamedTuple):
    """Sums as integers under masks, which cancel in the total of the set."""

    parts: dict[str, Any]  # int64 (N,), by part


@message
class Call(NamedTuple):
    """What a site is asked at one time."""

    run: str
    site: str
    start: int  # how often the server of the run was started
    number: int  # of the call, counted from that start
    requests: list[Any]
    protocol: int = PROTOCOL

    @property
    def order(self) -> tuple[int, int]:
        """Calls of a run are in this order."""
        return self.start, self.number


@message
class Answer(NamedTuple):
    """What a site says to a call with the same run, site, start and number: replies, or the code of an error."""

    run: str
    site: str
    start: int
    number: int
    replies: list[Any] = []
    code: str = ""
    seconds: float = 0.0  # that the site worked for it
    protocol: int = PROTOCOL


@message
class _Shared(NamedTuple):
    """Stands in a call for what all sites get, by its number."""

    at: int


class Packed(NamedTuple):
    """A call as bytes."""

    shared: bytes
    own: bytes


def pack(call: Call, known: dict[tuple[int, ...], bytes] | None = None) -> Packed:
    """A call as bytes. known: what was packed for other sites already, as `pack` fills it.

    >>> call = Call("run-1", "north", 1, 7, [Join("0f", 0)])
    >>> unpack(*pack(call)) == call
    True
    """
    shared: list[Any] = []
    requests = []
    for request in call.requests:
        if (name := _SHARED_FIELDS.get(type(request))) is not None:
            shared.append(getattr(request, name))
            request = request._replace(**{name: _Shared(len(shared) - 1)})
        requests.append(request)
    key = tuple(map(id, shared))
    known = {} if known is None else known
    if key not in known:
        known[key] = _written(shared, _SHARED)
    own = _written({"call": call._replace(requests=requests), "shared": sha256(known[key]).hexdigest()}, _OWN)
    return Packed(known[key], own)


def unpack(shared: bytes, own: bytes, most_bytes: int = MOST_BYTES) -> Call:
    """The call in these bytes; Refused where they are none, or too many."""
    found = _read(own, _OWN, most_bytes - len(shared))
    call = found.get("call") if isinstance(found, dict) else None
    if not isinstance(call, Call) or call.protocol != PROTOCOL or not _has_types(call, _CALL_TYPES):
        raise Refused("other-version", "the call has other fields")
    if found.get("shared") != sha256(shared).hexdigest():
        raise Refused("other-version", "what all sites get was changed on its way")
    parts, requests = _read(shared, _SHARED, most_bytes), []
    for request in call.requests:
        name = _SHARED_FIELDS.get(type(request))
        if name is not None:
            place = getattr(request, name)
            if not isinstance(place, _Shared) or not isinstance(place.at, int) or not 0 <= place.at < len(parts):
                raise Refused("other-version", "the call lacks what all sites get")
            request = request._replace(**{name: parts[place.at]})
        requests.append(request)
    return call._replace(requests=requests)


def pack_answer(answer: Answer) -> bytes:
    """An answer as bytes."""
    return _written(answer, _ANSWER)


def unpack_answer(data: bytes, most_bytes: int = MOST_BYTES) -> Answer:
    """The answer in these bytes; Refused where they are none, or too many."""
    answer = _read(data, _ANSWER, most_bytes)
    if not isinstance(answer, Answer) or answer.protocol != PROTOCOL or not _has_types(answer, _ANSWER_TYPES):
        raise Refused("other-version", "the answer has other fields")
    return answer


def digest_of(packed: Packed) -> str:
    """Tells calls apart; the part of the site has the digest of what all sites get."""
    return sha256(packed.own).hexdigest()


_ORDER = {"run": str, "site": str, "start": int, "number": int}
_CALL_TYPES: Mapping[str, Any] = {**_ORDER, "requests": list}
_ANSWER_TYPES: Mapping[str, Any] = {**_ORDER, "replies": list, "code": str, "seconds": (int, float)}
_LONGEST = 200  # letters of a name


def _has_types(value: Any, types: Mapping[str, Any]) -> bool:
    fields = {name: getattr(value, name) for name in types}
    texts = [field for field in fields.values() if isinstance(field, str)]
    numbers = [field for field in fields.values() if isinstance(field, int)]
    return (
        all(isinstance(field, types[name]) and not isinstance(field, bool) for name, field in fields.items())
        and all(len(text) <= _LONGEST and text.isprintable() for text in texts)
        and all(0 <= number < 2**53 for number in numbers)
    )


def _written(value: Any, kind: str) -> bytes:
    file = BytesIO()
    dump(value, file, kind, digest=False)
    return file.getvalue()


def _read(data: bytes, kind: str, most_bytes: int) -> Any:
    if len(data) > most_bytes:
        raise Refused("too-large", f"a message of {len(data):,} bytes; at most {most_bytes:,} are taken")
    try:
        return load(data, kind)
    except (PPFLError, RecursionError) as error:
        raise Refused("other-version", str(error)) from None


def names_of(sites: Sequence[str]) -> str:
    """Sites in a sentence."""
    return ", ".join(map(repr, sites)) or "none"
