"""Sites with secure sums: keys, sites that send given sums, and a transport that loses replies."""

from hashlib import shake_128
from types import SimpleNamespace

import torch

from ppfl.algorithms import Roster, Rows, Total
from ppfl.federation.certificates import create_key_pair
from ppfl.federation.secure_sums import MaskedSite, SecureSettings, SecureSums
from ppfl.sites import Reply, Train
from ppfl.sites.messages import combine, decode, encode

PAIRS = {name: create_key_pair() for name in ("a", "b", "c", "d", "e")}
PUBLIC_KEYS = {name: pair.public_key for name, pair in PAIRS.items()}
STEP = 2.0**-20


class GivenSums:
    """Stands for a site: answers a training request with given sums, or with counts alone where it has none."""

    def __init__(self, name, sums, clients=5, rows=None):
        self.name, self.sums, self.clients, self.rows = name, sums, clients, rows or {}
        self.sessions = {"main": SimpleNamespace(seed=3)}

    def answer(self, request):
        here = 0 if self.sums is None else self.clients
        counts = {"asked": self.clients, "participants": here, "bytes_up": 8 * here, "loss": 0.25 * here}
        metrics = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in counts.items()}
        if self.sums is None:
            return Reply(metrics={name: value for name, value in metrics.items() if name != "loss"})
        totals = {"models": Total(self.sums[:2], {"weight": self.sums[2:].clone(), "bias": -self.sums[:1]})}
        return Reply(totals, metrics, Rows(("x",), self.rows) if self.rows else Rows((), {}))


def masked(site, settings, names, seed="seed"):
    """A site behind masks; its random bytes are the same in every run of a test."""
    keys, asked = {name: PUBLIC_KEYS[name] for name in names}, iter(range(10**6))

    def random_bytes(size):
        return shake_128(f"{seed} {site.name} {next(asked)}".encode()).digest(size)

    return MaskedSite(site, PAIRS[site.name].private_key, keys, settings, random_bytes)


class LossyTransport:
    """Every message as bytes; the sites that `down` names for a kind of request are not reached by it."""

    durable = False

    def __init__(self, *sites):
        self.sites, self.down, self.replies = [*sites], {}, []
        self.roster, self.device, self.bytes_carried = Roster(("x",)), torch.device("cpu"), 0

    def ask(self, requests):
        lost = set().union(*(self.down.get(type(request), set()) for request in requests))
        up = [site for site in self.sites if site.name not in lost]
        by_site = [decode(encode([site.answer(request) for request in decode(encode(list(requests)))])) for site in up]
        self.replies += zip([site.name for site in up], by_site, strict=True)
        return [combine(replies, [site.name for site in up]) for replies in zip(*by_site, strict=True)]


def secure(sums, settings=None, clients=5, **options):
    """The server's way to sites with these sums behind masks, and the transport below it."""
    settings = SecureSettings(step=STEP, largest=2.0**20, **options) if settings is None else settings
    transport = LossyTransport(*(masked(GivenSums(name, sums[name], clients), settings, sums) for name in sums))
    return SecureSums(transport, settings, {name: PUBLIC_KEYS[name] for name in sums}, run="run-1"), transport


def train_request(exchange=1):
    return Train("main", exchange - 1, exchange, exchange - 1, ("x",), 0.1, {}, {})


def integer_sums(names, size=50):
    """Multiples of the step, which fixed point keeps exactly."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(-(2**39), 2**39, (size,), generator=generator).double() * STEP for name in names}
