"""What every method owes, on every engine and every transport, with a network that is a chain and one that is not."""

import math
from functools import cache

import pytest
import torch
from torch import nn

from kit.cases import CASES, SIZES
from kit.problems import make_federation, make_net
from kit.training import BytesTransport, assert_same, run, tensors
from ppfl.algorithms import METHODS, FedAvg, Local
from ppfl.core import affinity
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.server import InProcess

DROPOUTS = (0.0, 0.4)  # with SIZES and seed 1: all but one come back, then one alone, two, three
ALL_LOST = 1 - 1e-9


class Residual(nn.Module):
    """No chain: tokens by an embedding, a residual layer, a layer norm; dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(3, 4), nn.LayerNorm(4)
        self.inner, self.out, self.dropout = nn.Linear(4, 4), nn.Linear(4, 3), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.embedding((x[:, 0] > 0).long())
        return self.out(self.dropout(self.norm(x + torch.tanh(self.inner(x)))))


def residual(dtype=torch.float64, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Residual(dropout).to(dtype)


PARTS = {"0": "embedding", "2": "out"}  # what personal_part names in the chain, and here


def on_residual(case):
    method, k, mix = case
    part = getattr(method, "personal_part", None)
    if isinstance(part, tuple):
        method = method.model_copy(update={"personal_part": tuple(PARTS[name] for name in part)})
    return method, k, mix


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


@cache
def finished_run(name: str, dropout: float, engine: str = "loop"):
    """A run in float64 that several tests look at."""
    return trained(CASES[name], make_federation(SIZES, dtype=torch.float64), engine=engine, dropout=dropout)


def trained(case, federation, net=None, **settings):
    method, k, mix = case
    population = Population(make_net(dtype=federation.train.x.dtype) if net is None else net, k=k, mix=mix)
    likeness = affinity.from_labels(federation.label_counts().to(federation.train.x.dtype), federation.ids)
    pulls = getattr(method, "share_memberships", True)
    return run(method, population, federation, affinity=likeness if pulls else None, **settings)


def test_every_method_is_among_the_cases() -> None:
    assert {method.name for method, *_ in CASES.values()} == METHODS.keys()


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("engine", ["stacked", "chunks-of-2", "threads"])
def test_engines_give_the_same_trajectory(name: str, engine: str, dropout: float) -> None:
    found = finished_run(name, dropout, engine)
    assert_same(found.everything(), finished_run(name, dropout).everything(), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("dropout_layer", [0.0, 0.5])
def test_engines_give_the_same_trajectory_on_a_network_that_is_no_chain(case, dropout_layer: float) -> None:
    federation, net = make_federation(SIZES, dtype=torch.float64), residual(dropout=dropout_layer)
    reference = trained(on_residual(case), federation, net, dropout=0.4)
    found = trained(on_residual(case), federation, net, engine="stacked", dropout=0.4)
    assert_same(found.everything(), reference.everything(), atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sites", [1, 3])
def test_messages_as_bytes_give_the_same_states_and_carry_what_is_reported(name: str, engine: str, sites: int) -> None:
    federation, reference = make_federation(SIZES, dtype=torch.float64), finished_run(name, 0.0, engine)
    found = trained(CASES[name], federation, engine=engine, kind=BytesTransport, sites=sites)
    assert_same(found.everything(), reference.everything(), atol=1e-10, rtol=1e-9)
    same = reference if sites == 1 else trained(CASES[name], federation, engine=engine, kind=InProcess, sites=sites)
    carried = [[report.bytes_carried for report in one.reports] for one in (found, same)]
    assert carried[0] == carried[1] and min(carried[0]) > 0
    for one, other in zip(found.reports, reference.reports, strict=True):
        for name in ("participants", "lost", "refused", "bytes_up", "bytes_down"):
            assert getattr(one, name) == getattr(other, name)
        assert one.loss == pytest.approx(other.loss, nan_ok=True)


def test_single_precision_engines_agree_to_rounding_error(case) -> None:
    federation = make_federation(SIZES)
    reference = trained(case, federation)
    found = trained(case, federation, engine="stacked")
    assert_same(found.everything(), reference.everything(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("dropout", DROPOUTS)
def test_the_order_of_clients_is_irrelevant(name: str, dropout: float) -> None:
    federation, expected = (
        make_federation(SIZES, dtype=torch.float64),
        finished_run(name, dropout, "stacked").personal(),
    )
    turned = federation.select(federation.ids[::-1])
    found = trained(CASES[name], turned, engine="stacked", dropout=dropout).personal()
    for client in federation.ids:
        assert_same(found[client], expected[client], atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("engine", ["loop", "threads"])
def test_a_round_leaves_the_data_and_earlier_server_states_untouched(case, engine: str) -> None:
    federation = make_federation(SIZES)
    data = federation.train.x, federation.train.y, federation.weights
    kept_data = [leaf.clone() for leaf in data]
    half = trained(case, federation, until=2)
    kept = [leaf.clone() for leaf in tensors(half.everything())]
    trained(case, federation, engine=engine, resume=half)
    assert_same(half.everything(), kept, atol=0, rtol=0)
    assert_same(data, kept_data, atol=0, rtol=0)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("engine", ["loop", "threads"])
def test_a_resumed_run_ends_with_the_same_bits(name: str, engine: str, dropout: float) -> None:
    federation, whole = make_federation(SIZES, dtype=torch.float64), finished_run(name, dropout, engine)
    half = trained(CASES[name], federation, engine=engine, until=2, dropout=dropout)
    resumed = trained(CASES[name], federation, engine=engine, resume=half, dropout=dropout)
    assert_same(resumed.everything(), whole.everything(), atol=0, rtol=0)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("engine", ["loop", "threads"])
def test_client_states_on_disk_give_the_same_bits(name: str, engine: str, dropout: float) -> None:
    federation, expected = make_federation(SIZES, dtype=torch.float64), finished_run(name, dropout, engine)
    found = trained(CASES[name], federation, engine=engine, dropout=dropout, on_disk=True)
    assert_same(found.everything(), expected.everything(), atol=0, rtol=0)
    assert_same([rows.values for rows in found.clients], [rows.values for rows in expected.clients], atol=0, rtol=0)


@pytest.mark.parametrize("on_disk", [(True, True), (True, False), (False, True)])
def test_a_run_resumed_with_states_elsewhere_ends_with_the_same_bits(name: str, on_disk: tuple[bool, bool]) -> None:
    federation, whole = make_federation(SIZES, dtype=torch.float64), finished_run(name, 0.4)
    half = trained(CASES[name], federation, until=2, dropout=0.4, on_disk=on_disk[0])
    resumed = trained(CASES[name], federation, resume=half, dropout=0.4, on_disk=on_disk[1])
    assert_same(resumed.everything(), whole.everything(), atol=0, rtol=0)


@pytest.mark.parametrize("engine", ["loop", "threads"])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(name: str, engine: str) -> None:
    federation, first = make_federation(SIZES, dtype=torch.float64), finished_run(name, 0.0, engine).everything()
    same, other = (trained(CASES[name], federation, engine=engine, seed=seed).everything() for seed in (1, 2))
    assert_same(same, first, atol=0, rtol=0)
    assert any(not x.equal(y) for x, y in zip(tensors(first), tensors(other), strict=True))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (15,)])
def test_clients_with_one_sample_each_and_one_client_alone(case, engine: str, sizes) -> None:
    method, k, mix = case
    found = trained((method, k if len(sizes) > 1 else 1, mix), make_federation(sizes), engine=engine)
    assert all(bool(leaf.isfinite().all()) for leaf in tensors(found.everything()))


@pytest.mark.parametrize("engine", ["loop", "threads"])
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_clients_that_take_no_part_or_are_lost_stay_as_they_are(name: str, engine: str, dropout: float) -> None:
    found = finished_run(name, dropout, engine)
    for before, after, report in zip(found.clients, found.clients[1:], found.reports, strict=False):
        same = torch.ones(len(SIZES), dtype=torch.bool)
        for name, leaf in before.values.items():
            same &= (leaf == after.values[name]).flatten(1).all(1) if leaf.dim() > 1 else leaf == after.values[name]
        assert not before.values or int((~same).sum()) <= report.participants
        assert report.participants + report.lost <= len(SIZES)


def test_a_round_in_which_all_are_lost_changes_nothing(case) -> None:
    federation = make_federation(SIZES)
    whole = trained(case, federation, until=1)
    lost = trained(case, federation, dropout=ALL_LOST)
    assert_same(lost.server, lost.states[0].server, atol=0, rtol=0)
    assert_same(lost.clients[-1].values, lost.clients[0].values, atol=0, rtol=0)
    for report in lost.reports:
        assert report.participants == report.bytes_up == 0 and report.lost > 0 and math.isnan(report.loss)
    assert lost.reports[0].bytes_down > 0 or whole.reports[0].bytes_down == 0  # they were sent what to work on


def test_where_no_client_happens_to_be_lost_the_bits_are_those_of_no_dropout(case) -> None:
    federation = make_federation(SIZES)
    without = trained(case, federation, engine="stacked")
    with_luck = trained(case, federation, engine="stacked", dropout=1 - ALL_LOST)
    assert_same(with_luck.everything(), without.everything(), atol=0, rtol=0)


def test_clients_are_lost_independently_in_every_round_at_the_rate_asked_for() -> None:
    clients, rounds, dropout = 500, 20, 0.3
    federation = make_federation((1,) * clients)
    found = run(
        Local(lr=0.1), Population(make_net(), k=1), federation, engine="stacked", rounds=rounds, dropout=dropout
    )
    lost = torch.tensor([report.lost for report in found.reports], dtype=torch.float64)
    spread = (dropout * (1 - dropout)) ** 0.5
    assert abs(float(lost.mean()) / clients - dropout) < 4.5 * spread / (clients * rounds) ** 0.5
    assert 0.4 < float(lost.std()) / (spread * clients**0.5) < 1.9  # rounds draw anew, clients by themselves


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(dropout: float) -> None:
    with pytest.raises(SettingError, match="0 <= dropout < 1"):
        run(FedAvg(lr=0.1), Population(make_net(), k=1), make_federation(), dropout=dropout)
