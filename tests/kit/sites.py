"""Sites in this process behind a carrier that can lose, delay and change messages; time is a number."""

import json

import pytest
import tomli_w
import torch

from kit.masked_sites import PAIRS, PUBLIC_KEYS
from kit.messages import encode, payload_of
from kit.training import assert_same
from ppfl.data import SampleSpec
from ppfl.federation.carrier import Delivery, OnlineSite
from ppfl.federation.envelope import REQUESTS, Envelope, seal
from ppfl.federation.federated_run import run_federated
from ppfl.federation.provisioning import SecureSumsFile
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.site_models import load_site_models
from ppfl.federation.site_requests import OpenRun
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import SiteSettings
from ppfl.io.files import write_toml
from ppfl.runs import Experiment, RunFolder, RunRecord
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
TABLE = {"name": "csv", "file": "visits.csv", "client": "patient", "target": "outcome", "classes": ["ill", "well"]}
PPFL = {"model": {"name": "linear"}, "population": {"k": 2}, "method": {"name": "ppfl", "lr": 0.1}}
VISITS = {"name": "visits", "rounds": 3, "data": TABLE} | PPFL  # an experiment with tables of sites
SECURE = SecureSumsFile(SecureSettings(), {name: PUBLIC_KEYS[name] for name in SITES})
SUMS_ALONE = {"watch": {"report_clients": False}}  # what an experiment needs to have secure sums


def make_experiment(case, rounds=5, **settings):
    asked_method, k, mix = METHODS[case]
    digits = {"name": "digits", "partition": {"name": "label_groups", "clients": 2}}
    asked = {"name": case, "rounds": rounds, "data": digits, "model": {"name": "linear"}}
    asked |= {"population": {"k": k, "mix": mix}, "method": {"lr": 0.3, "batch_size": 20, **asked_method}}
    return Experiment.model_validate(asked | settings)


def write_experiment(file, experiment):
    file.unlink(missing_ok=True)
    write_toml(file, experiment.model_dump(mode="json"))
    return file


def write_visits(folder, cell="1.5", columns="age,dose"):
    """The table of a site in VISITS, with one cell to choose; p3 is the smallest client."""
    rows = [f"p{at % 3},{at % 5},{at % 7 / 2},{'ill' if at % 2 else 'well'}" for at in range(30)] + ["p3,1,2,ill"]
    rows[4] = f"p1,4,{cell},well"
    (folder / "visits.csv").write_text("\n".join([f"patient,{columns},outcome", *rows]) + "\n")


class Killed(BaseException):
    """Ends the server without any of its clean-up."""


class FakeCarrier:
    """By default every message is answered at once. `faults[site]` is called with each reply, and may change it:
    None loses it, a number of seconds delays it, bytes replace it. A site without a time in `since` is offline.
    Time goes on only when somebody sleeps."""

    def __init__(self, services):
        self.services, self.time, self.since = services, 0.0, dict.fromkeys(services, "start")
        self.faults, self.pushed, self._arrivals = {}, [], []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def online(self):
        return {name: OnlineSite(at, self.since[name]) for at, name in enumerate(self.services) if self.since[name]}

    def push(self, messages):
        ids, names = {}, list(self.services)
        for address, data in messages.items():
            name = names[address]
            message = ids[address] = f"message-{len(self.pushed)}"
            self.pushed.append((name, data))
            reply = self.services[name].answer(data)
            changed = self.faults[name](reply) if name in self.faults else reply
            delay, reply = (changed, reply) if isinstance(changed, float) else (0.0, changed)
            if reply is not None:
                self._arrivals.append((self.time + delay, Delivery(message, reply)))
        return ids

    def pull(self, messages):
        here = [one for at, one in self._arrivals if at <= self.time and one.message in messages]
        self._arrivals = [(at, one) for at, one in self._arrivals if one not in here]
        return here

    def restart(self, name):
        self.services[name] = restarted(self.services[name])


def restarted(service):
    """The site's process ends, and another one goes on from its store."""
    service.close()
    return SiteService(service.settings, service.base)


def at_replies(numbers, change):
    """A fault of the replies with these numbers, from 1."""
    seen = []

    def fault(reply):
        seen.append(reply)
        return change(reply) if len(seen) in numbers else reply

    return fault


def make_services(folder, names, data, secure=False, **settings):
    """Sites that have a part each of the federation that `data` describes, and keys if their sums are secure."""
    services, keys = {}, {name: key.decode().strip() for name, key in SECURE.public_keys.items()}
    for number, name in enumerate(names, start=1):
        place, own = folder / name, {"name": name, "data": data, "part": {"number": number, "of": len(names)}}
        place.mkdir(parents=True, exist_ok=True)
        if secure:
            (place / "site.key").write_bytes(PAIRS[name].private_key)
            (place / "secure_sums.toml").write_text(tomli_w.dumps({"settings": {}, "public_keys": keys}))
            own |= {"private_key": "site.key", "secure_sums": "secure_sums.toml"}
        services[name] = SiteService(SiteSettings.model_validate(own | settings), place)
    return services


class Sites(FakeCarrier):
    """Sites below `folder`/sites, each with its part of the experiment's data, unless others are given."""

    def __init__(self, experiment, folder, services=None, *, secure=False):
        self.experiment, self.folder, self.secure = experiment, folder, SECURE if secure else None
        data = experiment.data.model_dump(mode="json")
        super().__init__(services or make_services(folder / "sites", SITES, data, secure))

    def run(self, **options) -> RunRecord:
        """The experiment, into `folder`/out; the record of the last seed."""
        own = {"sites": SITES, "secure": self.secure, "now": self.now, "sleep": self.sleep}
        return run_federated(self.experiment, self.folder / "out", self, **own | options)[-1]


def sent_fields(folder):
    """What sites sent, from the ledger there: the site, the number of the message, the field, its bytes."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    replies = [line for line in lines if line.get("direction") == "to server"]
    fields = [(line, field) for line in replies for message in line["messages"] for field in message["fields"]]
    return [(line["site"], line["number"], field["field"], field.get("bytes")) for line, field in fields]


def server_of(record):
    """What the server has at the end of a run, by name."""
    tensors, _ = RunFolder(record.folder).read_result()
    return {name: leaf for name, leaf in tensors.items() if name.startswith(("server", "memberships"))}


def assert_same_bits(one: RunRecord, other: RunRecord) -> None:
    assert_same(server_of(one), server_of(other), rtol=0, atol=0)


def assert_same_run(here: RunRecord, there: RunRecord, experiment: Experiment) -> None:
    """A run over sites is, to rounding, the run in one process."""
    for one, other in zip(here.metrics, there.metrics, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other.get("accuracy") == pytest.approx(one.get("accuracy"), abs=1e-5)
        assert other["bytes_up"] == one["bytes_up"]
    alone, federated = server_of(here), server_of(there)
    if not experiment.method.shows:  # in one process they are seen, over sites they stay at home
        assert alone.pop("memberships", None) is None or "memberships" not in federated
    order = [there.ids.index(client) for client in here.ids]
    for name, leaf in alone.items():
        of_clients = leaf.dim() > 0 and len(leaf) == len(here.ids)
        other = federated[name][order] if of_clients else federated[name]
        torch.testing.assert_close(other, leaf, rtol=0, atol=1e-5)


def models_of(service, run=None):
    return load_site_models(service.settings, service.base, run)


class Talk:
    """A server's side of a conversation with one site."""

    def __init__(self, service: SiteService, run="run"):
        self.service, self.run, self.number = service, run, 0

    def send(self, requests, number=None, **changes):
        """The reply as it is; `changes` are those of the envelope."""
        self.number += 1
        sent = Envelope(REQUESTS, self.run, self.service.settings.name, 1, number or self.number, encode(requests))
        return self.service.answer(seal(sent._replace(**changes)))

    def ask(self, *requests, **options):
        return payload_of(self.send(list(requests), **options))

    def open_run(self):
        experiment, federation = make_experiment("ditto"), self.service.federation
        start = experiment.build_population(SampleSpec.of(federation), 0).initial_network()
        setup = Setup("main", experiment.method, start, 0, float(federation.importance.sum()))
        self.ask(OpenRun(experiment.model_dump(mode="json", exclude={"data"}), 0), setup)
        return start  # the network that the run begins with

    def states(self):
        return self.service._site(self.run).saved_states("main").rows.values


def training(start, exchange, merged, round=None):
    """Of all clients, after the server has merged so many exchanges."""
    return Train("main", exchange - 1 if round is None else round, exchange, merged, None, 0.1, start, {})
