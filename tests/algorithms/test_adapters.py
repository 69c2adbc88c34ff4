"""Training with low-rank adapters: A is common, B is canonical, and everything about mixing is exact."""

import itertools

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import assert_same, at_start, run
from ppfl import Federation, Fitted, fit
from ppfl.algorithms import IFCA, PPFL, FedAlt, FedAvg, FedPer, FineTune, Local
from ppfl.core import Population, affinity, lora, with_adapters
from ppfl.core.adapters import merge_adapters_
from ppfl.data import digits
from ppfl.insight import client_model
from ppfl.server import Watch

FEDERATION = make_federation(dtype=torch.float64)
W = affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
NET = make_net(dtype=torch.float64)
HARD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05, "batch_size": 3, "local_epochs": 2}
SOFT = HARD | {"lr": 0.05}
PARTS = {"all layers": lora(rank=2, alpha=3), "the last": lora(rank=2, on="2"), "the first": lora(rank=2, on="0")}


class TwoImages(nn.Module):
    """Convolutions, an embedding and a linear layer, each of which can be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.signs, self.out = nn.Conv1d(1, 3, 2), nn.Embedding(2, 9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.filters(x[:, None]).flatten(1).relu()
        return self.out(seen + self.signs((x[:, 0] > 0).long()))


def all_kinds() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TwoImages().double()


CASES = [*((NET, part) for part in PARTS.values()), (all_kinds(), lora(rank=2, on=("filters", "signs", "out")))]
IDS = [*PARTS, "every kind of layer"]


def trained(method, population, **settings):
    return run(method, population, FEDERATION, **{"engine": "stacked", **settings})


# ---------------------------------------------------------------------- mixing is exact


@pytest.mark.parametrize("mix", ["outputs", "weights"])
@pytest.mark.parametrize("averaging", ["members", "everyone"])
@pytest.mark.parametrize(("net", "part"), CASES, ids=IDS)
def test_one_adapter_per_client_is_the_run_of_K(net: nn.Module, part, mix: str, averaging: str) -> None:
    """Short cut 1 against K models per client, with momentum, weight decay and several local steps."""
    fast, slow = (
        trained(
            PPFL(**HARD, penalty=0.05, collapse=collapse, start="uniform", averaging=averaging),
            Population(net, canonical=part, k=4, mix=mix),
            affinity=W,
        )
        for collapse in (True, False)
    )
    assert_same(fast.server, slow.server, atol=1e-11, rtol=1e-9)
    assert fast.reports[0].bytes_up < slow.reports[0].bytes_up


@pytest.mark.parametrize("start", ["uniform", "gradients"])
@pytest.mark.parametrize(("net", "part"), CASES, ids=IDS)
def test_mixed_outputs_are_mixed_weights(net: nn.Module, part, start: str) -> None:
    """The whole run, and what comes out: predictions of every client, and its network with merged weights."""
    method = PPFL(**HARD, membership_steps=3, start=start, warmup=0)
    outputs, weights = (trained(method, Population(net, canonical=part, k=3, mix=m)) for m in ("outputs", "weights"))
    assert_same(outputs.server, weights.server, atol=1e-10, rtol=1e-8)
    x = FEDERATION.train.x[:6]
    for at in range(2):
        seen = []
        for found in (outputs, weights):
            models = found.models()
            one = models._replace(memberships=models.memberships[at : at + 1])
            merged = client_model(found.problem.population, one)
            site = found.transport.sites[0]  # frozen layers at the beginning have run there
            seen += [site.backend.predict(one, site.computed.train.x[:6][None])[0], merged(x).softmax(-1)]
            assert [*merged.state_dict()] == [*net.state_dict()]
        for other in seen[1:]:
            torch.testing.assert_close(other, seen[0], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("mix", ["outputs", "weights"])
@pytest.mark.parametrize(("net", "part"), CASES, ids=IDS)
def test_engines_agree(net: nn.Module, part, mix: str) -> None:
    found = [
        trained(PPFL(**HARD, start="gradients"), Population(net, canonical=part, k=2, mix=mix), engine=engine)
        for engine in ("loop", "stacked", "chunks-of-2")
    ]
    assert_same(found[0].everything(), found[1].everything(), atol=1e-10, rtol=1e-8)
    assert_same(found[0].everything(), found[2].everything(), atol=1e-10, rtol=1e-8)


def test_outputs_are_kept_where_the_adapter_ends_the_network() -> None:
    """Then membership steps cost next to nothing. Elsewhere c enters before the end, and outputs cannot be kept."""
    for part, kept in ((PARTS["the last"], True), (PARTS["the first"], False), (PARTS["all layers"], False)):
        found = trained(PPFL(lr=0.1), Population(NET, canonical=part, k=2), rounds=1)
        assert found.transport.sites[0].backend.caches_outputs is kept


# ---------------------------------------------------------------------- edges, and other methods


@pytest.mark.parametrize("k", [1, 3])
def test_equal_memberships_of_adapters_are_one_shared_adapter(k: int) -> None:
    population = Population(NET, canonical=PARTS["all layers"], k=k)
    method = PPFL(**HARD, membership_steps=0, start="uniform", warmup=0)
    start = at_start(method, population, FEDERATION, rounds=3, models=population.initial_models(0))
    ours = trained(method, population, rounds=3, resume=start).server.shared
    alone = Population(with_adapters(NET, PARTS["all layers"]), k=1)
    theirs = trained(FedAvg(**HARD), alone, rounds=3).server.shared
    assert float(theirs["0.up.weight"].abs().max()) > 0
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name].expand_as(value), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize(
    ("method", "shared"),
    [
        (FedAvg(**SOFT), {"0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"}),
        (FedAlt(**SOFT, personal_part="adapters.up"), {"0.down.weight", "2.down.weight"}),
        (FedPer(**SOFT, personal_part=("adapters",)), set()),
    ],
    ids=["common", "B personal", "personal"],
)
def test_adapters_can_be_common_or_personal(method, shared: set[str]) -> None:
    found = trained(method, Population(with_adapters(NET, PARTS["all layers"]), k=1))
    assert found.server.shared.keys() == shared
    first, second = (found.personal()[client] for client in FEDERATION.ids[:2])
    assert all(map(torch.equal, first, second)) == (len(shared) == 4)
    changed = {name for name, v in found.server.shared.items() if not v.equal(found.states[0].server.shared[name])}
    assert changed == shared


def test_wholly_personal_adapters_are_local_training() -> None:
    alone = Population(with_adapters(NET, PARTS["all layers"]), k=1)
    fedper, local = (trained(m, alone) for m in (FedPer(**SOFT, personal_part="adapters"), Local(**SOFT)))
    for one, other in zip(fedper.personal().values(), local.personal().values(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "method", [IFCA(lr=0.1), FineTune(method=PPFL(lr=0.1), lr=0.1, epochs=1)], ids=lambda m: m.name
)
def test_other_methods_of_several_models_take_adapters(method) -> None:
    population = Population(NET, canonical=PARTS["all layers"], k=2)
    found = trained(method, population)
    assert all(bool(leaf.isfinite().all()) for rows in found.personal().values() for leaf in rows)


# ---------------------------------------------------------------------- what it costs, and whether it finds groups


def pretrained_and_groups() -> tuple[nn.Module, Federation]:
    """A network that knows the digits, and clients in four groups, each of which swaps the names of some digits."""
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    public, private = order[:600], order[600:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        loss = nn.functional.cross_entropy(net(x[public]), y[public])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    client = torch.arange(len(private)) % 24
    names = torch.arange(10).repeat(4, 1)
    for group, pair in itertools.product(range(4), range(3)):
        a = (2 * group + 3 * pair) % 10
        b = (a + 1 + pair) % 10
        names[group, [a, b]] = names[group, [b, a]]
    labels = names[client % 4, y[private]]
    ids = [f"g{at % 4}-c{at // 4}" for at in client.tolist()]
    return net, Federation.from_arrays(x[private], labels, ids, test_fraction=0.4)


def test_adapters_find_groups_and_beat_one_shared_adapter_and_own_ones() -> None:
    """B is 0 at first and all K are alike: groups are told apart by the first gradients, which are for B alone."""
    net, federation = pretrained_and_groups()
    part, same = lora(rank=8, on="2"), {"lr": 0.1, "local_epochs": 5}
    adapted = Population(with_adapters(net, part), k=1)

    def trained(population: Population, method) -> Fitted:
        return fit(population, federation, method, rounds=15, watch=Watch(every=15), progress=False)

    ours = trained(Population(net, canonical=part, k=4), PPFL(**same))
    shared, own = (trained(adapted, method).evaluate(federation).pooled for method in (FedAvg(**same), Local(**same)))
    assert ours.evaluate(federation).pooled > max(shared, own) + 0.02
    groups: dict[str, set[int]] = {}
    for client, at in zip(ours.ids, ours.memberships.argmax(1).tolist(), strict=True):
        groups.setdefault(client[:2], set()).add(at)
    assert sorted(map(sorted, groups.values())) == [[0], [1], [2], [3]]


def test_a_client_with_four_adapters_to_mix_sends_one() -> None:
    net, federation = pretrained_and_groups()
    one, four = (
        run(PPFL(lr=0.1), Population(net, canonical=lora(rank=8), k=k), federation, rounds=2, engine="stacked")
        for k in (1, 4)
    )
    assert four.reports[-1].bytes_up <= 1.05 * one.reports[-1].bytes_up
    whole = sum(p.numel() for p in net.parameters())
    assert four.reports[-1].bytes_up < 4 * 24 * 0.6 * whole  # and that is less than the network


def test_merging_is_for_the_model_that_leaves_and_not_for_the_population() -> None:
    population = Population(NET, canonical=PARTS["all layers"], k=2)
    names = [*population.net.state_dict()]
    merge_adapters_(client_model(population, trained(PPFL(lr=0.1), population, rounds=1).models().first(1)))
    assert [*population.net.state_dict()] == [*population.architecture.state_dict()] == names
