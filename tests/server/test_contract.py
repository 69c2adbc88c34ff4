"""What every method promises, however its clients are computed, spread over sites, stored, stopped and lost."""

import math
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

from kit.cases import CASES, SIZES, run_case
from kit.networks import OwnFunction, Recurrent, Residual, make_net, with_seed
from kit.problems import make_federation
from kit.refusals import SettingError, assert_refused
from kit.training import BytesTransport, Trained, assert_same, luck, run, tensors
from ppfl import Federation, Population
from ppfl.algorithms import METHODS, FedAvg, Local, message

FEDERATION = make_federation(SIZES, dtype=torch.float64)
SAME_BITS = {"atol": 0, "rtol": 0}
DROPOUT, ALL_LOST = 0.4, 1 - 1e-9
CHANGES = {
    "clients in reverse order": {"turned": True},
    "the stacked engine": {"engine": "stacked"},
    "three sites": {"sites": 3},
    "messages as bytes": {"kind": BytesTransport},
    "states on disk": {"on_disk": True},
    "stopped after two rounds, then threads over two sites": {"then": {"engine": "threads", "sites": 2}},
}


@cache
def chosen_seed() -> int:
    """Loses one client in the first round, all but one in the second, and none in the third."""

    def lost(seed: int, round: int) -> int:
        return int((luck(seed, "dropout", FEDERATION.ids, round) < DROPOUT).sum())

    wanted = {0: 1, 1: len(SIZES) - 1, 2: 0}
    return next(seed for seed in range(10**5) if all(lost(seed, round) == n for round, n in wanted.items()))


def copies(tree) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in tensors(tree)]


def data_of(federation: Federation) -> tuple[torch.Tensor, ...]:
    return federation.train.x, federation.train.y, federation.weights


class Compared:
    """Runs of one method and network that differ in what must not matter."""

    def __init__(self, case, net: nn.Module | None = None, **settings) -> None:
        self.run = partial(run_case, case, net=net, seed=chosen_seed(), dropout=DROPOUT, **settings)
        self.reference = self.run(FEDERATION)

    def difference(self, turned: bool = False, then: dict | None = None, **how) -> str | None:
        """How a run with these changes differs from the reference: loop, one site, in memory, never stopped."""
        federation = FEDERATION.select(FEDERATION.ids[::-1]) if turned else FEDERATION
        data, until = copies(data_of(federation)), None if then is None else 2
        try:
            found = self.run(federation, until=until, **how)
            reports, states = found.reports, copies(found.everything())
            if isinstance(found.transport, BytesTransport):
                reported = [report.bytes_carried for report in reports]
                assert found.transport.bytes_carried == found.transport.carried > sum(reported) and min(reported) > 0
            if then is not None:
                first, found = found, self.run(federation, resume=found, **then)
                reports = first.reports + found.reports
                assert_same(first.everything(), states, **SAME_BITS)
            assert_same(data_of(federation), data, **SAME_BITS)
            self.compare(found, reports)
        except AssertionError as error:
            return str(error)
        return None

    def compare(self, found: Trained, reports) -> None:
        expected = self.reference.by_client()
        for client, tree in found.by_client().items():
            assert_same(tree, expected[client], atol=1e-9, rtol=1e-8)
        for one, other in zip(reports, self.reference.reports, strict=True):
            for name in ("participants", "lost", "refused", "bytes_up", "bytes_down"):
                assert getattr(one, name) == getattr(other, name), name
            assert one.loss == pytest.approx(other.loss, nan_ok=True)

    def check(self) -> None:
        """Everything is changed at once; where that fails, one change at a time, to name those that matter."""
        everything = {setting: value for change in CHANGES.values() for setting, value in change.items()}
        if said := self.difference(**everything):
            alone = [name for name, change in CHANGES.items() if self.difference(**change)]
            pytest.fail(f"differs with {', '.join(alone) or 'all changes at once alone'}: {said}")


@cache
def compared(name: str) -> Compared:
    return Compared(CASES[name])


def test_every_method_is_among_the_cases() -> None:
    assert {method.name for method, *_ in CASES.values()} == METHODS.keys()


@pytest.mark.parametrize("name", CASES)
def test_everything_else_gives_the_reference(name: str) -> None:
    """Order of clients, engine, sites, messages, states on disk and a stop change nothing beyond rounding."""
    compared(name).check()


def test_what_does_matter_is_named() -> None:
    """The comparison can fail, and says which change it fails with."""

    @message
    class FirstClientLeads(FedAvg):
        def merge(self, problem, server, task, totals, rows):
            merged = super().merge(problem, server, task, totals, rows)
            return server if problem.roster.ids[0] == FEDERATION.ids[-1] else merged

    with pytest.raises(pytest.fail.Exception, match="differs with clients in reverse order: "):
        Compared((FirstClientLeads(lr=0.3), 1, "outputs")).check()


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_on_disk_has_the_same_bits(name: str) -> None:
    """The same engine gives the same bits, wherever states are and whenever it stops; without filters too."""
    trained = partial(compared(name).run, FEDERATION, engine="threads")
    whole, half = trained(), trained(until=2, on_disk=True, filters=())
    assert_same(whole.everything(), compared(name).reference.everything(), atol=1e-10, rtol=1e-9)
    assert_same(trained(resume=half, on_disk=False, filters=()).everything(), whole.everything(), **SAME_BITS)
    for one, other in zip(half.clients, whole.clients, strict=False):
        assert_same(one.values, other.values, **SAME_BITS)


@pytest.mark.parametrize("name", CASES)
def test_another_seed_differs_and_single_precision_is_near(name: str) -> None:
    expected = compared(name).reference
    other = run_case(CASES[name], FEDERATION, until=1, seed=chosen_seed() + 1)
    first, second = (tensors((one.states[1].server, one.clients[1].values)) for one in (expected, other))
    assert any(not a.equal(b) for a, b in zip(first, second, strict=True))
    one, many = (compared(name).run(make_federation(SIZES), engine=engine) for engine in ("loop", "stacked"))
    assert_same(many.everything(), one.everything(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_lost_and_absent_clients_stay_as_they_are(name: str) -> None:
    found = compared(name).reference
    for before, after, report in zip(found.clients, found.clients[1:], found.reports, strict=False):
        moved = torch.zeros(len(SIZES), dtype=torch.bool)
        for leaf, later in zip(before.values.values(), after.values.values(), strict=True):
            moved |= (leaf != later).reshape(len(SIZES), -1).any(1)
        assert int(moved.sum()) <= report.participants
        assert report.participants + report.lost <= len(SIZES)
    nobody = run_case(CASES[name], FEDERATION, dropout=ALL_LOST, rounds=2)
    assert_same(nobody.everything(), (nobody.states[0].server, nobody.clients[0].values), **SAME_BITS)
    for report in nobody.reports:
        assert report.participants == report.bytes_up == 0 and report.lost > 0 and math.isnan(report.loss)
    sent = nobody.reports[0].bytes_down > 0  # what they were to work on
    assert sent or found.reports[0].bytes_down == 0


@pytest.mark.parametrize("name", CASES)
def test_one_sample_per_client_and_one_client_alone_stay_finite(name: str) -> None:
    method, k, mix = CASES[name]
    for sizes, models, engine in (((1, 1, 1), k, "stacked"), ((15,), 1, "loop")):
        found = run_case((method, models, mix), make_federation(sizes), engine=engine, rounds=2)
        assert all(bool(leaf.isfinite().all()) for leaf in tensors(found.everything()))


# ---------------------------------------------------------------------- other networks


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))


LSTM_WITH_DROPOUT = partial(Recurrent, dropout=0.5)
NETWORKS = {  # those that vmap cannot run too; each with some of the methods
    "residual": (Residual, ["fedavg", "pfedme", "ifca", "ppfl-weights", "ppfl-outputs", "finetune-ditto"]),
    "dropout": (with_dropout, ["scaffold", "pooled-some", "fedem", "ppfl-predictions", "cfl"]),
    "lstm": (Recurrent, ["ditto", "fedper-some", "fedem", "ppfl-weights", "ppfl-private"]),
    "lstm with dropout": (LSTM_WITH_DROPOUT, ["local", "fedprox", "finetune", "ppfl-outputs", "ppfl-predictions"]),
    "packed": (partial(Recurrent, packed=True), ["fedavg", "fedsim", "ifca", "ppfl-weights", "finetune-ppfl"]),
    "own function": (OwnFunction, ["scaffold", "pooled-some", "ditto", "ppfl-outputs", "ppfl-random-some"]),
}
PAIRS = [(network, name) for network, (_, names) in NETWORKS.items() for name in names]


@pytest.mark.parametrize(("network", "name"), PAIRS)
def test_other_networks_give_the_reference_too(network: str, name: str) -> None:
    (make, _), (method, k, mix) = NETWORKS[network], CASES[name]
    Compared((method.with_local(lr=0.05), k, mix), with_seed(make), rounds=3).check()


# ---------------------------------------------------------------------- clients that are lost


@pytest.mark.parametrize("name", ["fedavg", "scaffold-some", "ppfl-outputs"])
def test_where_no_client_happens_to_be_lost_the_bits_are_those_of_no_dropout(name: str) -> None:
    with_luck, without = (run_case(CASES[name], FEDERATION, dropout=dropout) for dropout in (1 - ALL_LOST, 0.0))
    assert_same(with_luck.everything(), without.everything(), **SAME_BITS)


def test_a_client_is_lost_by_a_draw_of_its_own_in_every_round() -> None:
    found = run(Local(lr=0.1), Population(make_net(), k=1), make_federation(SIZES), dropout=DROPOUT, rounds=20)
    draws = [luck(found.problem.seed, "dropout", FEDERATION.ids, round) for round in range(20)]
    assert [report.lost for report in found.reports] == [int((drawn < DROPOUT).sum()) for drawn in draws]


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_a_dropout_that_is_no_share_of_clients_is_refused(dropout: float) -> None:
    assert_refused(lambda: run_case(CASES["fedavg"], FEDERATION, dropout=dropout), SettingError, "0 <= dropout < 1")


# ---------------------------------------------------------------------- several cores

ON_TWO_CORES = """
import threading, torch
torch.set_num_threads(2)
from kit.cases import run_case
from kit.networks import make_net
from kit.problems import make_federation
from kit.training import assert_same
from ppfl.algorithms import FedAvg
from ppfl.sites import Stacked

class Watched(FedAvg):
    def work(self, *arguments):
        threads.add(threading.current_thread().name)
        return super().work(*arguments)

threads, federation = set(), make_federation((5, 7, 4, 6), dtype=torch.float64)
case, net = (Watched(lr=0.05, batch_size=4), 1, "outputs"), make_net(hidden=200_000, dtype=torch.float64)
found = run_case(case, federation, net, engine=Stacked(), rounds=2, dropout=0.2)
print(len(threads), sum(report.lost for report in found.reports))
expected = run_case(case, federation, net, rounds=2, dropout=0.2)
assert_same(found.everything(), expected.everything(), atol=1e-10, rtol=1e-9)
"""


@pytest.mark.processes
def test_the_default_engine_on_two_cores_gives_the_reference() -> None:
    """Models so large that a round is more than one chunk are divided among threads without being asked to."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ON_TWO_CORES],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    threads, lost = map(int, done.stdout.split())
    assert threads == 2 and lost > 0
