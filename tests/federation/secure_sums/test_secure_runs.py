"""Whole runs with secure sums: every sum that the server reads is the open one to within the rounding."""

import pytest
import torch

from kit.masked_sites import PUBLIC_KEYS, masked
from kit.problems import make_federation, make_net
from kit.training import BytesTransport, assert_same
from ppfl.algorithms import CFL, IFCA, PPFL, Ditto, FedAvg, FedEM, Scaffold
from ppfl.algorithms.contract import Roster
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.trees import named_leaves
from ppfl.federation.secure_sums import SecureSettings, SecureSums
from ppfl.federation.secure_sums.secure_settings import METRIC_STEP
from ppfl.server import DivergedError, begin, choose_lr, evaluate, make_problem, train
from ppfl.server.transports import route
from ppfl.sites import Site, Stacked, Train
from ppfl.sites.messages import Unmask

SMALL = {"lr": 0.3, "batch_size": 4}
NAMES = ("a", "b", "c")
FLOAT32 = 2.0**-23
CASES = {
    "fedavg": (FedAvg(**SMALL), 1, "outputs"),
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


def sites(population):
    parts = [FEDERATION.select(FEDERATION.ids[at::3]) for at in range(3)]
    return [Site(part, population, Stacked(), name=name) for name, part in zip(NAMES, parts, strict=True)]


class Listening(BytesTransport):
    """Keeps what each site answered to the last message."""

    def __init__(self, *sites, **settings) -> None:
        self.heard = []
        super().__init__(*sites, **settings)

    def ask(self, requests):
        self.heard = []
        return super().ask(requests)

    def deliver(self, site, requests):
        replies = super().deliver(site, requests)
        self.heard.append(replies)
        return replies


class Compared:
    """Asks masked sites and open ones the same, and compares every sum with the exact one."""

    def __init__(self, population, settings: SecureSettings) -> None:
        keys = {name: PUBLIC_KEYS[name] for name in NAMES}
        behind_masks = [masked(site, settings, NAMES) for site in sites(population)]
        self.secure = SecureSums(Listening(*behind_masks, order=FEDERATION.ids), settings, keys, "run")
        self.open = Listening(*sites(population), order=FEDERATION.ids)
        self.roster, self.device, self.step, self.compared = self.open.roster, self.open.device, settings.step, 0

    @property
    def bytes_carried(self) -> int:
        return self.secure.bytes_carried

    def ask(self, requests):
        found = self.secure.ask(requests)
        expected = self.open.ask(requests)
        for at, (reply, plain) in enumerate(zip(found, expected, strict=True)):
            heard = [replies[at] for replies in self.open.heard]
            for field, step in [("totals", self.step), ("metrics", METRIC_STEP)]:
                names = named_leaves(getattr(plain, field)).keys()
                self.compare(named_leaves(getattr(reply, field)), names, step, [getattr(one, field) for one in heard])
            assert reply.facts == plain.facts and not reply.rows.values
        return found

    def compare(self, found, names, step: float, heard) -> None:
        """A site's rounding adds less than a step, and the total is written in the type that it has."""
        assert found.keys() == names
        by_site = [named_leaves(tree) for tree in heard]
        for name, value in found.items():
            exact = sum(leaves[name].double() for leaves in by_site if name in leaves)
            bound = len(by_site) * step + (FLOAT32 if value.dtype == torch.float32 else 0.0) * exact.abs()
            assert bool(((value.double() - exact).abs() <= bound).all()), name
            self.compared += value.numel()


@pytest.mark.parametrize("name", CASES)
def test_every_sum_of_a_run_is_the_open_one_to_within_the_rounding(name: str) -> None:
    method, k, mix = CASES[name]
    population = Population(make_net(), k=k, mix=mix)
    transport = Compared(population, SecureSettings())
    problem = make_problem(population, transport, rounds=3, seed=1)
    rounds = [*train(method, problem, transport, begin(method, problem, transport))]
    state = rounds[-1][0]
    assert len(rounds) == 3 and all(report.participants >= 2 for _, report in rounds)
    scores = evaluate(method, problem, transport, state.server, ("train", "test"), per_client=False)
    assert scores.splits["test"].sums["clients"] == 9
    assert transport.compared > 200
    for replies in transport.secure.transport.heard:
        assert all(not value.is_floating_point() for reply in replies for value in reply.metrics.values())

    plain = Listening(*sites(population), order=FEDERATION.ids)
    problem = make_problem(population, plain, rounds=3, seed=1)
    *_, (expected, _) = train(method, problem, plain, begin(method, problem, plain))
    assert_same(state.server, expected.server, atol=1e-5, rtol=1e-5)  # parity that all transports are held to


def test_a_coarse_step_shows() -> None:
    """The comparison can fail: sites that round to 2^-4 are outside the bound of 2^-32."""
    population = Population(make_net(), k=1)
    transport = Compared(population, SecureSettings(step=2.0**-4))
    transport.step = 2.0**-32
    problem = make_problem(population, transport, rounds=1, seed=1)
    state = begin(FedAvg(**SMALL), problem, transport)
    with pytest.raises(AssertionError, match=r"models|value"):
        list(train(FedAvg(**SMALL), problem, transport, state))


@pytest.mark.parametrize("method", [PPFL(**SMALL), CFL(**SMALL)], ids=lambda method: method.name)
def test_methods_with_rows_are_refused_before_anything_is_sent(method) -> None:
    population = Population(make_net(), k=2)
    transport = Compared(population, SecureSettings()).secure
    problem = make_problem(population, transport, rounds=2, seed=1)
    carried = transport.bytes_carried
    with pytest.raises(SettingError, match=f"secure sums are on, and {method.name} shows .* of each client"):
        begin(method, problem, transport)
    assert transport.bytes_carried == carried


def test_step_size_trials_that_diverge_are_only_trials() -> None:
    """Where sums are larger than masks carry, a trial has failed, and the search goes on with smaller steps."""
    population = Population(make_net(), k=1)
    settings = SecureSettings(largest=0.02)  # a sum of weights alone is up to 1: every trial fails
    transport = Compared(population, settings).secure
    problem = make_problem(population, transport, rounds=3, seed=1)
    plain = Listening(*sites(population), order=FEDERATION.ids)
    method = FedAvg(batch_size=4)
    too_large = []
    open_total = transport._open

    def watched(*asked):
        try:
            return open_total(*asked)
        except DivergedError:
            too_large.append(asked)
            raise

    transport._open = watched
    chosen = choose_lr(method, problem, transport)
    assert too_large and chosen.lr < choose_lr(method, make_problem(population, plain, rounds=3, seed=1), plain).lr


def test_a_request_is_masked_with_what_belongs_to_a_site() -> None:
    """Each site is asked for its own clients, as without masks."""
    population = Population(make_net(), k=1)
    transport = Compared(population, SecureSettings()).secure
    problem = make_problem(population, transport, rounds=2, seed=1)
    method = FedAvg(**SMALL)
    begin(method, problem, transport)
    who = FEDERATION.ids[:4]
    shared, own = method.send(problem, method.init_server(problem), who, 0.1)
    (reply,) = transport.ask([Train("main", 0, 1, 0, who, 0.1, shared, own)])
    assert float(reply.metrics["asked"]) == float(reply.metrics["participants"]) == 4


def test_a_site_gets_the_packets_that_are_for_it() -> None:
    packets = {name: {other: f"{name} to {other}" for other in NAMES} for name in ("a", "c")}
    request = Unmask("run", "keys", 1, packets)
    roster = Roster(FEDERATION.ids)
    assert route(request, roster, FEDERATION.ids, "b").packets == {"a": {"b": "a to b"}, "c": {"b": "c to b"}}
    assert route(request, roster, FEDERATION.ids) == request  # where names are not known
