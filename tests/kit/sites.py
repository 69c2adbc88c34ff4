"""Sites in this process behind a channel that can lose, delay and change messages; time is a number."""

import json

import pytest
import torch

from kit.experiments import tensors_of
from kit.training import assert_same
from ppfl.algorithms.contract import Rows as Rows
from ppfl.algorithms.contract import Total as Total
from ppfl.core.draws import hashed as hashed
from ppfl.core.draws import name_keys as name_keys
from ppfl.core.ids import NumberedIds as NumberedIds
from ppfl.core.trees import tree_leaves as tree_leaves
from ppfl.core.trees import tree_map as tree_map
from ppfl.data import SampleSpec as SampleSpec
from ppfl.data.column_sums import ColumnPlan as ColumnPlan
from ppfl.federation.exchange import Delivery
from ppfl.federation.messages import Answer, Call, Join, Packed, pack, unpack, unpack_answer
from ppfl.federation.policy import experiment_hash, over_sites
from ppfl.federation.run import run_over_sites
from ppfl.federation.secure_sums import new_key, public_key
from ppfl.federation.service import SiteService
from ppfl.federation.site_settings import SiteSettings
from ppfl.federation.site_tools import approve, load_site_models
from ppfl.io.files import read_json as read_json
from ppfl.io.files import write_toml as write_toml
from ppfl.runs import Experiment, RunFolder, RunRecord
from ppfl.server.loop import begin as begin
from ppfl.server.loop import make_problem as make_problem
from ppfl.server.loop import train as train
from ppfl.server.transports import InProcess as InProcess
from ppfl.sites import Setup, Train
from ppfl.sites.totals import Spread as Spread

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
ROWS = ("scores", "memberships", "sketches", "changes", "label_counts", "feature_means")
OPEN = {"min_clients": 1, "rows": ROWS, "client_names": "plain"}  # a policy that hides nothing, for laws
SUMS_ALONE = {"watch": {"report_clients": False}}


def make_experiment(case, rounds=5, **settings):
    """A small one; scores of clients are shown unless `settings` say otherwise."""
    asked_method, k, mix = METHODS[case]
    digits = {"name": "digits", "partition": {"name": "label_groups", "clients": 2}}
    asked = {"name": case, "rounds": rounds, "data": digits, "model": {"name": "linear"}}
    asked |= {"population": {"k": k, "mix": mix}, "method": {"lr": 0.3, "batch_size": 20, **asked_method}}
    return Experiment.model_validate({**asked, "watch": {"report_clients": True}, **settings})


def write_experiment(file, experiment):
    file.unlink(missing_ok=True)
    write_toml(file, experiment.model_dump(mode="json"))
    return file


class Killed(BaseException):
    """Ends the server without any of its clean-up."""


class MemoryChannel:
    """By default every call is answered at once. `faults[site]` is called with each answer, and may change it: None
    loses it, a number of seconds delays it, bytes replace it, a text says why it was not delivered. A site without a
    time in `since` is offline. Time goes on only when somebody sleeps."""

    def __init__(self, services):
        self.services, self.time, self.since = services, 0.0, dict.fromkeys(services, "start")
        self.faults, self.pushed, self._arrivals = {}, [], []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def online(self):
        return {name: since for name, since in self.since.items() if since}

    def push(self, calls):
        ids = {}
        for name, packed in calls.items():
            message = ids[name] = f"message-{len(self.pushed)}"
            self.pushed.append((name, packed))
            answer = self.services[name].answer(*packed)
            changed = self.faults[name](answer) if name in self.faults else answer
            if isinstance(changed, str):
                self._arrivals.append((self.time, Delivery(message, None, changed)))
                continue
            delay, answer = (changed, answer) if isinstance(changed, float) else (0.0, changed)
            if answer is not None:
                self._arrivals.append((self.time + delay, Delivery(message, answer)))
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


def at_answers(numbers, change):
    """A fault of the answers with these numbers, from 1."""
    seen = []

    def fault(answer):
        seen.append(answer)
        return change(answer) if len(seen) in numbers else answer

    return fault


def make_services(folder, names, experiment, secure=None, policy=None, **settings):
    """Sites that have a part each of the experiment's data, and approved it. secure: settings of secure sums."""
    keys, services = {}, {}
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "names.key").write_text(name * 64)
        if secure is not None and not (folder / name / "secure.key").exists():
            (folder / name / "secure.key").write_text(new_key())
        keys[name] = None if secure is None else public_key(folder / name / "secure.key")
    for number, name in enumerate(names, start=1):
        data, part = experiment.data.model_dump(mode="json"), {"number": number, "of": len(names)}
        own = {"name": name, "data": data, "part": part, "policy": OPEN if policy is None else policy}
        if secure is not None:
            own["secure_sums"] = {"peers": {peer: key for peer, key in keys.items() if peer != name}, **secure}
        whole = SiteSettings.model_validate(own | settings)
        if not (folder / name / "approved").exists():
            approve(whole, folder / name, experiment)
        services[name] = SiteService(whole, folder / name)
    return services


class Sites(MemoryChannel):
    """Sites below `folder`/sites, each with its part of the experiment's data, unless others are given."""

    def __init__(self, experiment, folder, services=None, *, names=SITES, secure=None, policy=None):
        self.experiment, self.folder, self.secure = experiment, folder, secure is not None
        super().__init__(services or make_services(folder / "sites", names, experiment, secure, policy))

    def run(self, **options) -> RunRecord:
        """The experiment, into `folder`/out; the record of the last seed."""
        own = {"secure": self.secure, "now": self.now, "sleep": self.sleep}
        sites = options.pop("sites", len(self.services))
        return run_over_sites(self.experiment, self.folder / "out", self, sites, **own | options)[-1]


def server_of(record):
    """What the server has at the end of a run, by name."""
    found = tensors_of(RunFolder(record.folder).result_file)
    return {name: leaf for name, leaf in found.items() if not name.startswith("clients.")}


def assert_same_bits(one: RunRecord, other: RunRecord) -> None:
    assert_same(server_of(one), server_of(other), rtol=0, atol=0)


def assert_same_run(here: RunRecord, there: RunRecord, experiment: Experiment, tolerance=1e-5) -> None:
    """A run over sites is, to rounding, the run in one process."""
    for one, other in zip(here.metrics, there.metrics, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=tolerance)
        assert other.get("accuracy") == pytest.approx(one.get("accuracy"), abs=tolerance)
        assert other["bytes_up"] == one["bytes_up"]
    alone, federated = server_of(here), server_of(there)
    if not experiment.method.shows:  # in one process they are seen, over sites they stay at home
        assert alone.pop("memberships", None) is None or "memberships" not in federated
    order = [there.ids.index(client) for client in here.ids]
    for name, leaf in alone.items():
        of_clients = leaf.dim() > 0 and len(leaf) == len(here.ids)
        other = federated[name][order] if of_clients else federated[name]
        torch.testing.assert_close(other, leaf, rtol=0, atol=tolerance)


def ledger_of(folder):
    """The lines of the ledger there."""
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def models_of(service, run=None):
    return load_site_models(service.settings, service.base, run)


class Talk:
    """A server's side of a conversation with one site."""

    def __init__(self, service: SiteService, experiment, run="run"):
        self.service, self.experiment, self.run, self.number = service, over_sites(experiment), run, 0

    def send(self, requests, **changes) -> Answer:
        """The answer; `changes` are those of the call."""
        self.number += 1
        call = Call(self.run, self.service.settings.name, 1, self.number, list(requests))._replace(**changes)
        return unpack_answer(self.service.answer(*pack(call)))

    def ask(self, *requests, **changes):
        """The replies, or the code of an error."""
        answer = self.send(requests, **changes)
        return answer.code or answer.replies

    def begin(self, **changes):
        """Join and set up the main session; what its network begins with. changes: of the setup."""
        (joined,) = self.ask(Join(experiment_hash(self.experiment), self.experiment.seeds[0]))
        agreed = {name: joined.facts["agreed"][name] for name in SampleSpec.model_fields}
        spec = SampleSpec.model_validate(agreed)
        start = self.experiment.build_population(spec, self.experiment.seeds[0]).initial_network()
        seed, importance = self.experiment.seeds[0], float(joined.metrics["importance"])
        setup = Setup("main", self.experiment.method, start, seed, importance)
        self.ids, self.start, self.setup = joined.rows.ids, start, setup
        return self.ask(setup._replace(**changes))

    def training(self, exchange=1, round=None, **changes):
        """A request to train all clients, after the server has merged all exchanges before."""
        round = exchange - 1 if round is None else round
        task = self.experiment.method.possible_tasks(round, self.experiment.rounds, 0)[-1]
        return Train("main", round, exchange, exchange - 1, None, task, self.start, {})._replace(**changes)

    def states(self):
        return self.service._open(self.run).site.saved_states("main").rows.values


def opened(packed: Packed) -> Call:
    """A call, from its bytes."""
    return unpack(*packed)
