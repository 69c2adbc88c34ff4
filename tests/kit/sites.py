"""Sites in this process behind a carrier that can lose, delay and change messages; time is a number."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import tomli_w
import torch

from kit.masked_sites import PAIRS, PUBLIC_KEYS
from kit.messages import encode, payload_of
from ppfl.algorithms.contract import EVERYONE
from ppfl.federation.carrier import Delivery, OnlineSite
from ppfl.federation.envelope import REQUESTS, Envelope, seal
from ppfl.federation.federated_run import run_federated
from ppfl.federation.provisioning import SecureSumsFile
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.site_models import load_site_models
from ppfl.federation.site_requests import OpenRun
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import SiteSettings
from ppfl.runs import Experiment, RunFolder, RunRecord
from ppfl.runs.storage import write_toml
from ppfl.sites import Setup, Train

SITES = ("a", "b", "c")
METHODS = {  # with the number of canonical models and how they are mixed
    "ppfl-outputs": ({"name": "ppfl", "penalty": 0.02}, 3, "outputs"),
    "ppfl-predictions": ({"name": "ppfl", "penalty": 0.02, "membership_steps": 2}, 3, "predictions"),
    "ppfl-weights": ({"name": "ppfl", "share_memberships": False}, 3, "weights"),
    "ppfl-random": ({"name": "ppfl", "order": "random", "lr": 0.05}, 2, "outputs"),
    "fedavg": ({"name": "fedavg"}, 1, "outputs"),
    "ditto": ({"name": "ditto"}, 1, "outputs"),
    "fedem": ({"name": "fedem"}, 2, "predictions"),
    "scaffold": ({"name": "scaffold"}, 1, "outputs"),
}
VISITS = {  # an experiment with tables of sites
    "name": "visits",
    "rounds": 3,
    "data": {"name": "csv", "file": "visits.csv", "client": "patient", "target": "outcome", "classes": ["ill", "well"]},
    "model": {"name": "linear"},
    "population": {"k": 2},
    "algorithm": {"name": "ppfl", "lr": 0.1},
}
SECURE = SecureSumsFile(SecureSettings(), {name: PUBLIC_KEYS[name] for name in SITES})
SUMS_ALONE = {"watch": {"report_clients": False}}  # what an experiment needs to have secure sums


def make_experiment(method: str, rounds: int = 5, **settings) -> Experiment:
    algorithm, k, mix = METHODS[method]
    asked = {
        "name": method,
        "rounds": rounds,
        "data": {"name": "digits", "partition": {"name": "label_groups", "clients": 2}},
        "model": {"name": "linear"},
        "population": {"k": k, "mix": mix},
        "algorithm": {"lr": 0.3, "batch_size": 20, **algorithm},
    }
    return Experiment.model_validate(asked | settings)


def write_experiment(file: Path, experiment: Experiment) -> Path:
    file.unlink(missing_ok=True)
    write_toml(file, experiment.model_dump(mode="json", exclude_none=True))
    return file


def write_visits(folder: Path, cell: str = "1.5", columns: str = "age,dose") -> None:
    """The table of a site in VISITS, with one cell to choose."""
    rows = [f"p{at % 3},{at % 5},{at % 7 / 2},{'ill' if at % 2 else 'well'}" for at in range(30)]
    rows[4] = f"p1,4,{cell},well"
    rows.append("p3,1,2,ill")  # the smallest client
    (folder / "visits.csv").write_text("\n".join([f"patient,{columns},outcome", *rows]) + "\n")


class Killed(BaseException):
    """Ends the server without any of its clean-up."""


class FakeClock:
    """Goes on only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class FakeCarrier:
    """By default every message is answered at once. `faults[site]` are called with each reply, and may change it:
    None loses it, a number of seconds delays it, bytes replace it. A site without a time in `since` is offline."""

    def __init__(self, services: dict[str, SiteService], clock: FakeClock | None = None) -> None:
        self.services, self.clock = services, clock or FakeClock()
        self.since: dict[str, str | None] = dict.fromkeys(services, "start")
        self.faults: dict[str, list] = defaultdict(list)
        self.pushed: list[tuple[str, bytes]] = []
        self._arrivals: list[tuple[float, Delivery]] = []

    def online(self):
        return {name: OnlineSite(at, self.since[name]) for at, name in enumerate(self.services) if self.since[name]}

    def push(self, messages):
        ids, names = {}, list(self.services)
        for address, data in messages.items():
            name = names[address]
            message = ids[address] = f"message-{len(self.pushed)}"
            self.pushed.append((name, data))
            reply, delay = self.services[name].answer(data), 0.0
            for fault in self.faults[name]:
                changed = fault(reply)
                if isinstance(changed, float):
                    delay = changed
                else:
                    reply = changed
            if reply is not None:
                self._arrivals.append((self.clock.time + delay, Delivery(message, reply)))
        return ids

    def pull(self, messages):
        here = [one for at, one in self._arrivals if at <= self.clock.time and one.message in messages]
        self._arrivals = [(at, one) for at, one in self._arrivals if one not in here]
        return here

    def restart(self, name: str) -> None:
        """The site's process ends, and another one goes on from its store."""
        old = self.services[name]
        old.close()
        self.services[name] = SiteService(old.settings, old.base)


def at_replies(numbers, change):
    """A fault of the replies with these numbers, from 1."""
    seen = []

    def fault(reply):
        seen.append(reply)
        return change(reply) if len(seen) in numbers else reply

    return fault


def make_services(folder: Path, names, data, **settings) -> dict[str, SiteService]:
    """Sites that have a part each of the federation that `data` describes."""
    services = {}
    for number, name in enumerate(names, start=1):
        part = {"number": number, "of": len(names)}
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        one = SiteSettings.model_validate({"name": name, "data": data, "part": part, **settings})
        services[name] = SiteService(one, place)
    return services


class Sites(FakeCarrier):
    """Sites below `folder`/sites, each with its part of the experiment's data, unless others are given."""

    def __init__(self, experiment: Experiment, folder: Path, services=None, *, secure: bool = False) -> None:
        self.experiment, self.folder, self.secure = experiment, folder, SECURE if secure else None
        if services is None:
            keys = write_keys(folder / "sites") if secure else {}
            services = make_services(folder / "sites", SITES, experiment.model_dump(mode="json")["data"], **keys)
        super().__init__(services)

    def run(self, **options) -> RunRecord:
        """The experiment, into `folder`/out; the record of the last seed."""
        own = {"sites": SITES, "secure": self.secure, "now": self.clock.now, "sleep": self.clock.sleep}
        return run_federated(self.experiment, self.folder / "out", self, **own | options)[-1]


def write_keys(folder: Path) -> dict[str, str]:
    """Each site's own key and the public ones of all; the settings that name these files."""
    keys = {name: key.decode().strip() for name, key in SECURE.public_keys.items()}
    text = tomli_w.dumps({"settings": SECURE.settings.model_dump(exclude_none=True), "public_keys": keys})
    for name in SITES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "site.key").write_bytes(PAIRS[name].private_key)
        (folder / name / "secure_sums.toml").write_text(text)
    return {"private_key": "site.key", "secure_sums": "secure_sums.toml"}


def sent_fields(folder: Path) -> list[tuple[str, int, str, int | None]]:
    """What sites sent, from the ledger there: the site, the number of the message, the field, its bytes."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    replies = [line for line in lines if line.get("direction") == "to server"]
    fields = [(line, field) for line in replies for message in line["messages"] for field in message["fields"]]
    return [(line["site"], line["number"], field["field"], field.get("bytes")) for line, field in fields]


def server_of(record: RunRecord) -> dict[str, torch.Tensor]:
    """What the server has at the end of a run, by name."""
    tensors, _ = RunFolder(record.folder).read_result()
    return {name: leaf for name, leaf in tensors.items() if name.startswith(("server", "memberships"))}


def assert_same_bits(one: RunRecord, other: RunRecord) -> None:
    expected = server_of(other)
    for name, leaf in server_of(one).items():
        assert torch.equal(leaf, expected[name]), name


def assert_same_run(here: RunRecord, there: RunRecord, experiment: Experiment) -> None:
    """A run over sites is, to rounding, the run in one process."""
    for one, other in zip(here.metrics, there.metrics, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other.get("accuracy") == pytest.approx(one.get("accuracy"), abs=1e-5)
        assert other["bytes_up"] == one["bytes_up"]
    alone, federated = server_of(here), server_of(there)
    if not experiment.algorithm.visible_rows:  # in one process they are seen, over sites they stay at home
        assert alone.pop("memberships", None) is None or "memberships" not in federated
    order = [there.ids.index(client) for client in here.ids]
    for name, leaf in alone.items():
        other = federated[name]
        rows = leaf.dim() > 0 and len(leaf) == len(here.ids)
        torch.testing.assert_close(other[order] if rows else other, leaf, rtol=0, atol=1e-5)


def models_of(service: SiteService, run: str | None = None):
    """The models of a site's clients, from its own store."""
    return load_site_models(service.settings, service.base, run)


class Talk:
    """A server's side of a conversation with one site."""

    def __init__(self, service: SiteService, run: str = "run") -> None:
        self.service, self.run, self.number = service, run, 0

    def send(self, requests, number: int | None = None, **changes) -> bytes:
        """The reply as it is; `changes` are those of the envelope."""
        self.number += 1
        sent = Envelope(REQUESTS, self.run, self.service.settings.name, 1, number or self.number, encode(requests))
        return self.service.answer(seal(sent._replace(**changes)))

    def ask(self, *requests, **options):
        """The replies, or the text of an error."""
        return payload_of(self.send(list(requests), **options))

    def open_run(self, method: str = "ditto"):
        """Set up a run; the network that it starts with."""
        experiment, federation = make_experiment(method), self.service.federation
        start = experiment.build_population(federation, 0).initial_network()
        setup = Setup("main", experiment.algorithm, start, 0, float(federation.importance.sum()))
        self.ask(OpenRun(experiment.model_dump(mode="json", exclude={"data"}), 0), setup)
        return start

    def states(self) -> dict[str, torch.Tensor]:
        """Of the site's clients."""
        found = self.service._site(self.run).sessions["main"].states.named("now")
        return {name: leaf.clone() for name, leaf in found.items()}


def training(start, exchange: int, merged: int, round: int | None = None) -> Train:
    """Of all clients, after the server has merged so many exchanges."""
    return Train("main", exchange - 1 if round is None else round, exchange, merged, EVERYONE, 0.1, start, {})
