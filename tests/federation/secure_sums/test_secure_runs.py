"""Whole runs with secure sums: every sum that the server reads is the open one to within the rounding."""

import json
import math

import pytest
import torch

from kit.masked_sites import PUBLIC_KEYS, masked
from kit.messages import named_leaves, payload_of
from kit.problems import make_federation, make_net
from kit.refusals import SettingError, assert_refused
from kit.sites import SITES, SUMS_ALONE, Sites, assert_same_run, make_experiment
from kit.training import BytesTransport, assert_same
from ppfl.algorithms import IFCA, PPFL, Ditto, FedAvg, FedEM, Scaffold
from ppfl.core import Population
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.secure_sums import SecureSettings, SecureSums
from ppfl.federation.secure_sums.secure_settings import METRIC_STEP
from ppfl.federation.site_service import SiteService
from ppfl.runs import run
from ppfl.server import begin, choose_lr, evaluate, make_problem, train
from ppfl.sites import Site, Stacked, as_metrics

SMALL = {"lr": 0.3, "batch_size": 4}
FLOAT32 = 2.0**-23
CASES = {
    "fedavg-some": (FedAvg(**SMALL, participation=0.5), 1, "outputs"),
    "scaffold": (Scaffold(**SMALL), 1, "outputs"),
    "ditto": (Ditto(**SMALL), 1, "outputs"),
    "fedem": (FedEM(**SMALL), 2, "predictions"),
    "ifca": (IFCA(**SMALL), 2, "outputs"),
    "ppfl-outputs": (PPFL(**SMALL, share_memberships=False), 3, "outputs"),
    "ppfl-weights": (PPFL(**SMALL, share_memberships=False), 2, "weights"),
    "ppfl-predictions-random": (PPFL(**SMALL, share_memberships=False, order="random"), 2, "predictions"),
}
FEDERATION = make_federation((7, 12, 20, 5, 9, 6, 8, 11, 10), test_fraction=0.3)


class Listening(BytesTransport):
    """Three sites; it keeps what each of them answered to the last message."""

    def __init__(self, population, secure=None, metrics=None):
        self.heard, parts = [], [FEDERATION.select(FEDERATION.ids[at::3]) for at in range(3)]
        settings = {"metrics": metrics, "engine": Stacked()}
        sites = [Site(part, population, name=name, **settings) for name, part in zip(SITES, parts, strict=True)]
        behind_masks = sites if secure is None else [masked(site, secure, SITES) for site in sites]
        super().__init__(*behind_masks, order=FEDERATION.ids)

    def ask(self, requests):
        self.heard = []
        return super().ask(requests)

    def deliver(self, site, requests):
        self.heard.append(super().deliver(site, requests))
        return self.heard[-1]


def secure_sums(population, metrics=None, **settings):
    asked, keys = SecureSettings(**settings), {name: PUBLIC_KEYS[name] for name in SITES}
    return SecureSums(Listening(population, asked, metrics), asked, keys, "run")


class Compared:
    """Asks masked sites and open ones the same, and compares every sum with the exact one."""

    def __init__(self, population, **settings):
        self.secure, self.open = secure_sums(population, **settings), Listening(population)
        self.roster, self.device, self.compared = self.open.roster, self.open.device, 0
        self.step, self.bytes_carried = SecureSettings().step, 0

    def ask(self, requests):
        found = self.secure.ask(requests)
        for at, (reply, plain) in enumerate(zip(found, self.open.ask(requests), strict=True)):
            assert reply.facts == plain.facts and not reply.rows.values
            for field, step in [("totals", self.step), ("metrics", METRIC_STEP)]:
                sums = named_leaves(getattr(reply, field))
                assert sums.keys() == named_leaves(getattr(plain, field)).keys()
                by_site = [named_leaves(getattr(replies[at], field)) for replies in self.open.heard]
                for name, value in sums.items():
                    self.compare(name, value, step, [leaves[name] for leaves in by_site if name in leaves])
        return found

    def compare(self, name, value, step, of_sites):
        """A site's rounding adds less than a step, and the total is written in the type that it has."""
        exact = sum(leaf.double() for leaf in of_sites)
        bound = len(SITES) * step + (FLOAT32 if value.dtype == torch.float32 else 0.0) * exact.abs()
        assert bool(((value.double() - exact).abs() <= bound).all()), name
        self.compared += value.numel()


def trained(method, population, transport, rounds=3):
    problem = make_problem(population, transport, rounds=rounds, seed=1)
    return problem, [*train(method, problem, transport, begin(method, problem, transport))]


@pytest.mark.parametrize("name", CASES)
def test_every_sum_of_a_run_is_the_open_one_to_within_the_rounding(name):
    method, k, mix = CASES[name]
    population = Population(make_net(), k=k, mix=mix)
    transport = Compared(population)
    problem, rounds = trained(method, population, transport)
    state = rounds[-1][0]
    assert len(rounds) == 3 and all(report.participants >= 2 for _, report in rounds)
    scores = evaluate(method, problem, transport, state.server, ("train", "test"), per_client=False)
    assert scores.splits["test"].score.sums["clients"] == 9
    assert transport.compared > 200
    for replies in transport.secure.transport.heard:
        assert all(not value.is_floating_point() for reply in replies for value in reply.metrics.values())
    _, plain = trained(method, population, Listening(population))
    assert_same(state.server, plain[-1][0].server, atol=1e-5, rtol=1e-5)  # parity that all transports are held to


def test_a_metric_that_is_defined_for_few_clients_is_not_opened():
    """Its sum over clients would be the value of one of them."""
    population, method = Population(make_net(), k=1), FedAvg(**SMALL)
    largest = max(len(FEDERATION.client(client)["test"]) for client in FEDERATION.ids)
    metrics = as_metrics({"of_one": lambda p, y: 1.0 if len(y) == largest else math.nan, "of_all": lambda p, y: 1.0})
    transport = secure_sums(population, metrics, min_clients=4)
    problem = make_problem(population, transport, rounds=1, seed=1)
    server = begin(method, problem, transport).server

    def scores(name):
        asked = {name: metrics[name]}
        return evaluate(method, problem, transport, server, per_client=False, metrics=asked).splits["test"]

    assert scores("of_all").metrics["of_all"].mean == pytest.approx(1.0)
    assert_refused(lambda: scores("of_one"), FederationError, "a total over 1 clients", "min_clients is 4")


def test_a_coarse_step_shows():
    """The comparison can fail: sites that round to 2^-4 are outside the bound of the default step."""
    population = Population(make_net(), k=1)
    with pytest.raises(AssertionError, match=r"models|value"):
        trained(FedAvg(**SMALL), population, Compared(population, step=2.0**-4), rounds=1)


def test_step_size_trials_that_diverge_are_only_trials():
    """Where sums are larger than masks carry, as a sum of weights is here, the search goes on with smaller steps."""
    population, method = Population(make_net(), k=1), FedAvg(batch_size=4)
    transports = secure_sums(population, largest=0.02), Listening(population)
    problems = [make_problem(population, transport, rounds=3, seed=1) for transport in transports]
    found, expected = (choose_lr(method, *given).lr for given in zip(problems, transports, strict=True))
    assert found < expected


@pytest.mark.parametrize("method", ["fedavg", "ppfl-weights", "scaffold"])
def test_a_run_over_sites_with_secure_sums_is_the_run_in_one_process(method, tmp_path):
    experiment = make_experiment(method, rounds=3, **SUMS_ALONE)
    there = Sites(experiment, tmp_path, secure=True).run()
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    lines = map(json.loads, (tmp_path / "sites" / "a" / "ledger.jsonl").read_text().splitlines())
    replies = [line["messages"] for line in lines if line.get("direction") == "to server"]
    types = [{field["type"] for one in line for field in one["fields"] if "type" in field} for line in replies]
    assert types[0] == {"float64"}  # numbers of samples, before the first round; no other sum of one site
    assert {"int64"} in types and all(found <= {"int64"} for found in types[1:])


def test_sums_that_are_lost_cost_one_exchange_and_a_site_that_joins_late_takes_part(tmp_path):
    """In the exchange in which it has no keys yet its clients are lost; then all sites agree on new ones."""
    sites, with_sums = Sites(make_experiment("fedavg", rounds=5, **SUMS_ALONE), tmp_path, secure=True), set()
    sites.since["c"] = None

    def lose_the_fifth(sealed):
        replies = payload_of(sealed)
        if not isinstance(replies, str) and any("totals" in one.metrics for one in replies):
            with_sums.add(sealed)
            return None if len(with_sums) == 5 else sealed
        return sealed

    def arrive(seed, end):
        if end.state.round == 2:
            sites.since["c"] = "now"

    sites.faults["b"] = lose_the_fifth
    there = sites.run(sites=("a", "b"), on_round_end=arrive)
    a, b, c = (len(sites.services[name].federation.ids) for name in SITES)
    assert there.finished and len(there.ids) == a + b + c
    assert [one["participants"] for one in there.metrics] == [a + b] * 3 + [a + c, a + b + c]
    assert [one.get("lost", 0) for one in there.metrics] == [0, 0, c, b, 0]


def test_a_server_without_secure_sums_gets_none_and_a_site_needs_its_key(tmp_path):
    sites = Sites(make_experiment("fedavg", rounds=1, **SUMS_ALONE), tmp_path, secure=True)
    with pytest.raises(FederationError):
        sites.run(secure=None)
    service = sites.services["a"]
    assert "asked for sums without masks" in service.ledger.file.read_text()
    keyless = service.settings.model_copy(update={"private_key": None})
    assert_refused(lambda: SiteService(keyless, service.base), SettingError, "no private_key")
    sites.experiment = make_experiment("ppfl-random", rounds=1, **SUMS_ALONE)
    assert_refused(sites.run, SettingError, "share_memberships = false")
