"""What is personal, sent and kept: parts of networks, frozen layers, own models, fine-tuning, adapters."""

import math

import pytest
import torch
from torch import nn

import ppfl
from kit.local_work import shapes_in
from kit.problems import make_federation, make_linear, make_net
from kit.training import Recording, connect, losses_of_clients, networks_of_clients, positions_of, run
from ppfl.algorithms import METHODS
from ppfl.algorithms.partial import parameters_of
from ppfl.core import lora, with_adapters
from ppfl.data import digits
from ppfl.insight import client_model
from ppfl.server import Watch, choose_lr, evaluate
from ppfl.sites import Setup, Train

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
SMALL = {"lr": 0.05, "weight_decay": 0.01, "batch_size": 4}


def trained(method, net=NET, k=1, mix="outputs", canonical="all", federation=FEDERATION, rounds=4, **settings):
    population = ppfl.Population(net, k=k, mix=mix, canonical=canonical)
    return run(method, population, federation, **{"rounds": rounds, "engine": "stacked", **settings})


# ---------------------------------------------------------------------- the names of parts


def deep_net() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, 3))


def half_frozen() -> nn.Module:
    """Of which one weight is trained, and nothing else."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)).requires_grad_(False)
    net[1].weight.requires_grad_(True)
    return net


def tied() -> nn.Module:
    net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("encoder", "middle", "decoder")})
    net["decoder"].weight = net["encoder"].weight
    return net


class WithOwnParameter(nn.Sequential):
    """Has a parameter of its own beside its layers, which makes it no layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.shift = nn.Parameter(torch.zeros(4))


PARTS = {
    "first": (deep_net, "input", {"0.0.weight", "0.0.bias"}),
    "last": (deep_net, "output", {"1.weight", "1.bias"}),
    "module": (deep_net, "0", {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}),
    "several": (deep_net, ("0.2", "output"), {"0.2.weight", "0.2.bias", "1.weight", "1.bias"}),
    "one layer": (make_linear, "input", {"weight", "bias"}),
    "a module of that name": (
        lambda: nn.ModuleDict({"output": nn.Linear(1, 1), "then": nn.Linear(1, 1)}),
        "output",
        {"output.weight", "output.bias"},
    ),
    "tied": (tied, "output", {"encoder.weight", "decoder.bias"}),
    "after frozen layers": (half_frozen, "input", {"1.weight"}),
    "before frozen layers": (half_frozen, "output", {"1.weight"}),
    "own parameter": (WithOwnParameter, "input", {"0.weight", "0.bias"}),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_named_as_the_network_names_them(name: str) -> None:
    net, part, expected = PARTS[name]
    assert parameters_of(net(), part, "personal_part") == expected


# ---------------------------------------------------------------------- what moves, what stays, what leaves

LAST, FIRST = {"2.weight", "2.bias"}, {"0.weight", "0.bias"}
SHARED = {
    "lg-fedavg": (ppfl.LGFedAvg(**SMALL), LAST),
    "fedper": (ppfl.FedPer(**SMALL), FIRST),
    "fedrep": (ppfl.FedRep(**SMALL, head_epochs=2), FIRST),
    "fedalt": (ppfl.FedAlt(**SMALL, personal_part="0"), LAST),
    "fedsim": (ppfl.FedSim(**SMALL, personal_part="2"), FIRST),
}


@pytest.mark.parametrize("name", SHARED)
def test_only_the_shared_part_is_sent_either_way_and_kept_once(name: str) -> None:
    method, shared = SHARED[name]
    found = trained(method, canonical="2", rounds=1, kind=Recording)
    ((request, reply),) = found.transport.exchanges()
    assert request.shared.keys() == shared and not request.own
    assert {leaf for total in reply.totals.values() for leaf in total.value} == shared and not reply.rows.values
    assert found.server.shared.keys() == shared
    assert found.client_tree().keys() == dict(NET.named_parameters()).keys() - shared
    numbers = sum(NET.get_parameter(leaf).numel() for leaf in shared)
    (report,) = found.reports
    assert report.bytes_up == report.bytes_down == 8 * 4 * numbers
    for leaf in shared:  # of the models for everyone, too
        values = found.models().values[leaf]
        assert len(values) == 4 and values.data_ptr() == found.server.shared[leaf].data_ptr()


@pytest.mark.parametrize("name", [*SHARED, "ditto", "pfedme"])
def test_a_client_that_never_took_part_has_its_first_personal_part_and_todays_shared_one(name: str) -> None:
    """Where the whole model is personal, it predicts with the shared one."""
    own_models = {"ditto": ppfl.Ditto(**SMALL), "pfedme": ppfl.PFedMe(**SMALL)}
    method, shared = SHARED.get(name) or (own_models[name], LAST | FIRST)
    found = trained(method.model_copy(update={"participation": 0.25}), rounds=2)
    seen = {i for t in range(2) for i in positions_of(found.problem, found.method, t)}
    assert seen < set(range(4))
    for i, network in enumerate(networks_of_clients(found)):
        for leaf, value in network.items():
            if i not in seen:
                assert value.equal(NET.get_parameter(leaf)) == (leaf not in shared)
                assert leaf not in shared or value.equal(found.server.shared[leaf])
            elif name in own_models:
                assert not value.equal(found.server.shared[leaf])


# ---------------------------------------------------------------------- frozen layers


class Shrink(nn.Module):
    """A layer with a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.scale * x)


@pytest.mark.parametrize("name", METHODS)
def test_constants_are_neither_sent_nor_kept_nor_changed(name: str) -> None:
    method = ppfl.FineTune(method=ppfl.FedAvg(**SMALL)) if name == "finetune" else METHODS[name](**SMALL)
    several = {"k": 2, "mix": "predictions"} if name in ("ppfl", "ifca", "cfl", "fedem") else {}
    first = nn.Linear(4, 6).requires_grad_(False)
    net = nn.Sequential(first, Shrink(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    frozen = {"0.weight", "0.bias", "1.scale"}
    before = {key: net.state_dict()[key].clone() for key in frozen}
    found = trained(method, net, **several, rounds=2, kind=Recording)
    everything = [found.server, found.clients[-1].values]
    for request, reply in found.transport.log:
        everything += [request.start] if isinstance(request, Setup) else []
        if isinstance(request, Train):
            everything += [request.shared, request.own, reply.totals, reply.rows.values]
    leaves = [leaf for tree in everything for leaf in shapes_in(tree)]
    seen = {".".join(name.split(".")[-2:]) for name, _ in leaves}  # a layer and a parameter
    assert not seen & frozen
    assert seen >= {"2.weight", "4.weight"}  # the names are looked at in the right place
    for key, value in before.items():
        assert net.state_dict()[key].equal(value) and found.problem.population.net.state_dict()[key].equal(value)
    assert not {24, 4 * 24, 2 * 24} & {math.prod(shape) for _, shape in leaves}  # nor the weight under another name


# ---------------------------------------------------------------------- fine-tuning


def test_steps_of_their_own_fit_clients_better() -> None:
    found = trained(ppfl.FineTune(method=ppfl.FedAvg(lr=0.1, batch_size=None), epochs=20), rounds=10)
    assert bool((losses_of_clients(found) < losses_of_clients(found, at=-2)).all())


@pytest.mark.parametrize(
    ("method", "population"),
    [
        (ppfl.FedAvg(**SMALL), {}),
        (ppfl.Ditto(**SMALL, participation=0.3), {}),
        (ppfl.PPFL(**SMALL, participation=0.5), {"k": 3, "mix": "weights"}),
    ],
    ids=["one network", "own networks", "mixture"],
)
def test_a_client_lost_in_the_last_round_keeps_the_inner_methods_model(method, population: dict) -> None:
    found = trained(ppfl.FineTune(method=method, steps=2), **population, rounds=5, seed=3, dropout=0.5)
    last = found.reports[-1]
    assert 0 < last.participants < 4 and last.bytes_up == 0
    same = torch.isclose(losses_of_clients(found, at=-2), losses_of_clients(found), atol=1e-9, rtol=1e-9)
    assert int((~same).sum()) == last.participants


def test_the_server_sees_the_rows_and_the_penalty_of_the_inner_method() -> None:
    for method in (ppfl.FedAvg(), ppfl.PPFL(penalty=0.1), ppfl.PPFL(share_memberships=False)):
        tuned = ppfl.FineTune(method=method)
        assert tuned.visible_rows == method.visible_rows
        assert tuned.membership_penalty == method.membership_penalty
        some = ppfl.FineTune(method=method.model_copy(update={"participation": 0.5}))
        assert some.with_everyone() == tuned


def test_a_step_left_open_is_found_for_the_inner_method() -> None:
    problem = trained(ppfl.FedAvg(**SMALL), rounds=10, until=1).problem
    transport, inner = connect(FEDERATION, problem.population, "stacked"), ppfl.FedAvg(batch_size=4)
    alone, tuned = (choose_lr(one, problem, transport) for one in (inner, ppfl.FineTune(method=inner, steps=1)))
    assert not alone.needs_lr and tuned == ppfl.FineTune(method=alone, steps=1)
    assert tuned.plan(problem, tuned.init_server(problem), 9).task.lr == alone.lr


# ---------------------------------------------------------------------- adapters

EVERYWHERE = lora(rank=2, alpha=3)


@pytest.mark.parametrize(
    ("method", "shared"),
    [
        (ppfl.FedAvg(**SMALL), {"0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"}),
        (ppfl.FedAlt(**SMALL, personal_part="adapters.up"), {"0.down.weight", "2.down.weight"}),
        (ppfl.FedPer(**SMALL, personal_part=("adapters",)), set()),
    ],
    ids=["common", "B personal", "personal"],
)
def test_adapters_can_be_common_or_personal(method, shared: set[str]) -> None:
    found = trained(method, with_adapters(NET, EVERYWHERE))
    assert found.server.shared.keys() == shared
    first, second = (found.personal()[client] for client in FEDERATION.ids[:2])
    assert all(map(torch.equal, first, second)) == (len(shared) == 4)
    changed = {name for name, v in found.server.shared.items() if not v.equal(found.states[0].server.shared[name])}
    assert changed == shared


@pytest.mark.parametrize("part", [EVERYWHERE, lora(rank=2, on="2"), lora(rank=2, on="0")], ids=str)
@pytest.mark.parametrize(
    "method", [ppfl.PPFL(**SMALL), ppfl.IFCA(lr=0.1), ppfl.FineTune(method=ppfl.PPFL(lr=0.1), lr=0.1, epochs=1)],
    ids=lambda method: method.name,
)  # fmt: skip
def test_a_model_that_leaves_has_its_adapters_merged_and_fits_as_before(method, part) -> None:
    found = trained(method, canonical=part, k=2)
    population, own = found.problem.population, FEDERATION.train.client(0)
    names = [*population.net.state_dict()]
    loss = evaluate(found.method, found.problem, found.transport, found.server, ("train",)).splits["train"].loss[0]
    merged = client_model(population, found.models().first(1))
    assert [*merged.state_dict()] == [*NET.state_dict()]
    torch.testing.assert_close(nn.functional.cross_entropy(merged(own.x), own.y), loss, atol=1e-9, rtol=1e-9)
    assert [*population.net.state_dict()] == [*population.architecture.state_dict()] == names


def test_outputs_are_kept_where_the_adapter_ends_the_network() -> None:
    """Then membership steps cost next to nothing. Elsewhere c enters before the end, and outputs cannot be kept."""
    for part, kept in ((lora(rank=2, on="2"), True), (lora(rank=2, on="0"), False), (EVERYWHERE, False)):
        found = trained(ppfl.PPFL(lr=0.1), canonical=part, k=2, rounds=1)
        assert found.transport.sites[0].backend.caches_outputs is kept


def test_adapters_find_groups_and_beat_one_shared_adapter_and_own_ones_for_the_bytes_of_one() -> None:
    """A network that knows the digits, and clients in four groups, each with other names for the digits.

    B is 0 at first and all K are alike: groups are told apart by the first gradients, which are for B alone.
    """
    (x, y), net = digits(), make_net(64, 32, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:600]), y[:600]).backward()
        optimizer.step()
    client = torch.arange(len(x) - 600) % 24
    ids = [f"g{at % 4}-c{at // 4}" for at in client.tolist()]
    federation = ppfl.Federation.from_arrays(x[600:], (y[600:] + client % 4) % 10, ids, test_fraction=0.4)
    part, same = lora(rank=8, on="2"), {"lr": 0.1, "local_epochs": 5}

    def fitted(method, population: ppfl.Population) -> ppfl.Fitted:
        return ppfl.fit(population, federation, method(**same), rounds=15, watch=Watch(every=15), progress=False)

    ours = fitted(ppfl.PPFL, ppfl.Population(net, canonical=part, k=4))
    alone = ppfl.Population(with_adapters(net, part), k=1)
    others = [fitted(method, alone).evaluate(federation).pooled for method in (ppfl.FedAvg, ppfl.Local)]
    assert ours.evaluate(federation).pooled > max(others) + 0.02
    groups: dict[str, set[int]] = {}
    for name, at in zip(ours.ids, ours.memberships.argmax(1).tolist(), strict=True):
        groups.setdefault(name[:2], set()).add(at)
    assert sorted(map(sorted, groups.values())) == [[0], [1], [2], [3]]
    one, four = (
        trained(ppfl.PPFL(lr=0.1), net, k, canonical=lora(rank=8), federation=federation, rounds=2).reports[-1].bytes_up
        for k in (1, 4)
    )
    assert four <= 1.05 * one < 4 * 24 * 0.6 * sum(p.numel() for p in net.parameters())  # less than the network's
