"""What is personal, sent and kept: parts of networks, frozen layers, own models, fine-tuning, adapters."""

import pytest
import torch
from torch import nn

import ppfl
from kit.local_work import shapes_in
from kit.problems import make_federation, make_net
from kit.training import Recording, assert_same, connect, losses_of_clients, networks_of_clients, positions_of, run
from ppfl.algorithms import METHODS, Wrapper
from ppfl.algorithms.contract import common_network
from ppfl.core import lora, with_adapters
from ppfl.data import digits
from ppfl.server import Watch, choose_lr, evaluate
from ppfl.sites import Setup, Train, client_model

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
SMALL = {"lr": 0.05, "weight_decay": 0.01, "batch_size": 4}
EVERYWHERE = lora(rank=2, alpha=3)


def trained(method, net=NET, k=1, mix="outputs", canonical="all", federation=FEDERATION, rounds=4, **settings):
    population = ppfl.Population(net, k=k, mix=mix, canonical=canonical)
    return run(method, population, federation, **{"rounds": rounds, "engine": "stacked", **settings})


LAST, FIRST = {"2.weight", "2.bias"}, {"0.weight", "0.bias"}
SHARED = {
    "lg-fedavg": (ppfl.LGFedAvg(**SMALL), LAST),
    "fedper": (ppfl.FedPer(**SMALL), FIRST),
    "fedrep": (ppfl.FedRep(**SMALL, head_epochs=2), FIRST),
    "fedalt": (ppfl.FedAlt(**SMALL, personal_part="0"), LAST),
    "fedsim": (ppfl.FedSim(**SMALL, personal_part="2"), FIRST),
    "ditto": (ppfl.Ditto(**SMALL), LAST | FIRST),
    "pfedme": (ppfl.PFedMe(**SMALL), LAST | FIRST),
}


@pytest.mark.parametrize("name", SHARED)
def test_only_the_shared_part_is_sent_either_way_and_who_never_took_part_has_it_and_its_first_personal_part(name):
    method, shared = SHARED[name]
    found = trained(method.model_copy(update={"participation": 0.25}), rounds=2, kind=Recording)
    numbers = sum(NET.get_parameter(leaf).numel() for leaf in shared)
    for (request, reply), report in zip(found.transport.exchanges(), found.reports, strict=True):
        assert request.shared.keys() == shared and not request.own
        assert {leaf for total in reply.totals.values() for leaf in total.value} == shared and not reply.rows.values
        assert report.bytes_up == report.bytes_down == 8 * numbers
    assert found.server.shared.keys() == shared
    seen = {i for t in range(2) for i in positions_of(found.problem, found.method, t)}
    assert seen < set(range(4))
    for i, network in enumerate(networks_of_clients(found)):
        for leaf, value in network.items():
            if i not in seen:
                assert value.equal(found.server.shared[leaf] if leaf in shared else NET.get_parameter(leaf))
            elif shared == LAST | FIRST:  # the whole model is personal too
                assert not value.equal(found.server.shared[leaf])
    if shared != LAST | FIRST:  # the shared part is kept once, also in the models for everyone
        assert found.client_tree().keys() == dict(NET.named_parameters()).keys() - shared
        assert all(found.models().values[leaf].data_ptr() == found.server.shared[leaf].data_ptr() for leaf in shared)


@pytest.mark.parametrize("name", METHODS)
def test_constants_are_neither_sent_nor_kept_nor_changed(name):
    method = ppfl.FineTune(method=ppfl.FedAvg(**SMALL)) if name == "finetune" else METHODS[name](**SMALL)
    several = {"k": 2, "mix": "predictions"} if name in ("ppfl", "ifca", "cfl", "fedem") else {}
    first, moments = nn.Linear(4, 6).requires_grad_(False), nn.BatchNorm1d(6, affine=False).eval()
    net = nn.Sequential(first, moments, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    before = {key: value.clone() for key, value in net.state_dict().items() if key.startswith(("0", "1"))}
    found = trained(method, net, **several, rounds=2, kind=Recording)
    everything = [found.server, found.clients[-1].values]
    for request, reply in found.transport.log:
        everything += [request.start] if isinstance(request, Setup) else []
        if isinstance(request, Train):
            everything += [request.shared, request.own, reply.totals, reply.rows.values]
    leaves = [leaf for tree in everything for leaf in shapes_in(tree)]
    seen = {".".join(name.split(".")[-2:]) for name, _ in leaves}  # a layer and a parameter
    assert not seen & before.keys()
    assert seen >= {"2.weight", "4.weight"}  # the names are looked at in the right place
    assert not {24, 4 * 24, 2 * 24} & {torch.Size(shape).numel() for _, shape in leaves}  # nor under another name
    for key, value in before.items():
        assert net.state_dict()[key].equal(value) and found.problem.population.net.state_dict()[key].equal(value)


@pytest.mark.parametrize(
    ("method", "population"),
    [
        (ppfl.FedAvg(**SMALL), {}),
        (ppfl.Ditto(**SMALL, participation=0.3), {}),
        (ppfl.PPFL(**SMALL, participation=0.5), {"k": 3, "mix": "weights"}),
    ],
)
def test_a_client_lost_in_the_last_round_keeps_the_inner_methods_model(method, population):
    found = trained(ppfl.FineTune(method=method, steps=2), **population, rounds=5, seed=3, dropout=0.5)
    last = found.reports[-1]
    assert found.method.shows == method.shows
    assert 0 < last.participants < 4 and last.bytes_up == 0
    same = torch.isclose(losses_of_clients(found, at=-2), losses_of_clients(found), atol=1e-9, rtol=1e-9)
    assert int((~same).sum()) == last.participants


class Unchanged(Wrapper):
    """A method around another that changes nothing."""


@pytest.mark.parametrize(
    ("method", "population"),
    [(ppfl.Ditto(**SMALL, participation=0.5), {}), (ppfl.CFL(**SMALL, eps1=10, eps2=0), {"k": 2})],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_wrapper_that_changes_nothing_is_the_inner_method(method, population):
    found, inner = (trained(one, **population) for one in (Unchanged(method=method), method))
    assert_same(found.everything(), inner.everything(), atol=0, rtol=0)
    assert found.method.with_local(lr=0.5).local.lr == 0.5 and found.method.shows == method.shows


def test_the_common_network_is_that_of_methods_with_one_network_for_all():
    for method in (ppfl.FedAvg(**SMALL), ppfl.Scaffold(**SMALL), ppfl.FedAdam(**SMALL)):
        found = trained(method)
        assert_same(common_network(method, found.problem, found.server), found.models().values, atol=0, rtol=0)
    own = [ppfl.Ditto(**SMALL), ppfl.FedPer(**SMALL), ppfl.Local(**SMALL), ppfl.FineTune(method=ppfl.FedAvg(**SMALL))]
    for method, k in [*((one, 1) for one in own), (ppfl.PPFL(**SMALL), 2), (ppfl.CFL(**SMALL), 2)]:
        found = trained(method, k=k)
        assert common_network(method, found.problem, found.server) is None


def test_a_step_left_open_is_found_for_the_inner_method():
    problem = trained(ppfl.FedAvg(**SMALL), rounds=10, until=1).problem
    transport, inner = connect(FEDERATION, problem.population, "stacked"), ppfl.FedAvg(batch_size=4)
    alone, tuned = (choose_lr(one, problem, transport) for one in (inner, ppfl.FineTune(method=inner, steps=1)))
    assert alone.lr != "auto" and tuned == ppfl.FineTune(method=alone, steps=1)
    assert tuned.plan(problem, tuned.init_server(problem), 9).task.lr == alone.lr


@pytest.mark.parametrize(
    ("method", "shared"),
    [
        (ppfl.FedAvg(**SMALL), {"0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"}),
        (ppfl.FedAlt(**SMALL, personal_part="adapters.up"), {"0.down.weight", "2.down.weight"}),
        (ppfl.FedPer(**SMALL, personal_part=("adapters",)), set()),
    ],
)
def test_adapters_can_be_common_or_personal(method, shared):
    found = trained(method, with_adapters(NET, EVERYWHERE))
    first, second = (found.personal()[client] for client in FEDERATION.ids[:2])
    assert all(map(torch.equal, first, second)) == (len(shared) == 4)
    changed = {name for name, v in found.server.shared.items() if not v.equal(found.states[0].server.shared[name])}
    assert changed == shared == found.server.shared.keys()


@pytest.mark.parametrize(
    ("part", "kept"), [(lora(rank=2, on="2"), True), (lora(rank=2, on="0"), False), (EVERYWHERE, False)], ids=str
)
@pytest.mark.parametrize("method", [ppfl.PPFL, ppfl.IFCA, ppfl.FineTune], ids=lambda kind: kind.__name__)
def test_a_model_that_leaves_has_its_adapters_merged_and_fits_as_before(method, part, kept):
    """Outputs are kept between membership steps where the adapter ends the network."""
    tuned = {"method": ppfl.PPFL(**SMALL), "epochs": 1}
    found = trained(method(**(tuned if method is ppfl.FineTune else SMALL)), canonical=part, k=2)
    population, own = found.problem.population, FEDERATION.train.client(0)
    assert found.transport.sites[0].backend.caches_outputs is kept
    loss = (
        evaluate(found.method, found.problem, found.transport, found.server, ("train",)).splits["train"].loss.values[0]
    )
    merged = client_model(population, found.models().first(1), predictions=False)
    assert [*merged.state_dict()] == [*NET.state_dict()]
    torch.testing.assert_close(nn.functional.cross_entropy(merged(own.x), own.y), loss, atol=1e-9, rtol=1e-9)


def test_adapters_find_groups_and_beat_one_shared_adapter_and_own_ones_for_the_bytes_of_one():
    """A network that knows the digits, and clients in four groups, each with other names for the digits."""
    x, y, net = digits().x, digits().y, make_net(64, 32, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:600]), y[:600]).backward()
        optimizer.step()
    client = torch.arange(len(x) - 600) % 24
    ids = [f"g{at % 4}-c{at // 4}" for at in client.tolist()]
    federation = ppfl.Federation.from_arrays(x[600:], (y[600:] + client % 4) % 10, ids, test_fraction=0.4)
    part = lora(rank=8, on="2")

    def fitted(method, net, **population):
        method, population = method(lr=0.1, local_epochs=5), ppfl.Population(net, **population)
        return ppfl.fit(population, federation, method, rounds=15, watch=Watch(every=15), progress=False)

    ours = fitted(ppfl.PPFL, net, canonical=part, k=4)
    others = [fitted(method, with_adapters(net, part), k=1) for method in (ppfl.FedAvg, ppfl.Local)]
    assert ours.evaluate(federation).pooled > max(other.evaluate(federation).pooled for other in others) + 0.02
    found = set(zip((name[:2] for name in ours.ids), ours.memberships.argmax(1).tolist(), strict=True))
    assert len(found) == len(dict(found)) == len({model for _, model in found}) == 4  # one model per group
    same = {"canonical": lora(rank=8), "federation": federation, "rounds": 2}
    one, four = (trained(ppfl.PPFL(lr=0.1), net, k, **same).reports[-1].bytes_up for k in (1, 4))
    assert four <= 1.05 * one < 4 * 24 * 0.6 * sum(p.numel() for p in net.parameters())  # less than the network's
