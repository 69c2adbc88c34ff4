"""Partial personalization: what each method does, how they are each other's special cases, and what stays at home."""

import itertools

import pytest
import torch
from ppfl.algorithms.batches import LocalData, id_keys
from ppfl.algorithms.descent import descend_networks
from ppfl.algorithms.schedules import factor
from ppfl.engines import Loop, Stacked, begin, fit, pose
from torch import nn

from algorithms import naive_partial
from ppfl.algorithms import FedAlt, FedAvg, FedPer, FedRep, FedSim, LGFedAvg, Local
from ppfl.algorithms.contract import participants
from ppfl.algorithms.fedavg import one_model
from ppfl.algorithms.partial import parameters_of
from ppfl.core.population import Population
from ppfl.core.workspace import Workspace
from support import make_federation, make_linear, make_net

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}


def trained(method, net=NET, federation=FEDERATION, engine="stacked", canonical="all", rounds=ROUNDS):
    population = Population(net, k=1, canonical=canonical)
    return fit(population, federation, method, rounds=rounds, seed=SEED, engine=engine)


def own_models(fitted) -> list[dict[str, torch.Tensor]]:
    """Every client's network, parameters by name."""
    personal = fitted.personal
    networks = one_model(personal.shared, k_at=1 if personal.own else 0).by_name()
    return [{n: leaf[i] if personal.own else leaf for n, leaf in networks.items()} for i in range(len(fitted.ids))]


def assert_same_models(fitted, other) -> None:
    for mine, theirs in zip(own_models(fitted), own_models(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], **TIGHT)


def assert_is_twin(fitted, twin) -> None:
    u, v = twin
    for mine, v_i in zip(own_models(fitted), v, strict=True):
        assert mine.keys() == u.keys() | v_i.keys()
        for name, expected in {**u, **v_i}.items():
            torch.testing.assert_close(mine[name], expected, **TIGHT)


def lr_factor(t: int) -> float:
    return factor("step", t, ROUNDS)


def clients_of(method):
    problem = pose(Population(NET, k=1), FEDERATION, None, ROUNDS, SEED)
    return lambda t: participants(problem, method.participation, t).tolist()


# ------------------------------------------------------------------ the papers' pseudocode


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("part", ["output", "input", ("0", "2"), ()])
@pytest.mark.parametrize("some", [{}, {"participation": 0.5, "local_steps": 5}, {"momentum": 0.0, "local_epochs": 2}])
def test_fedsim_is_its_pseudocode(engine: str, part, some: dict) -> None:
    method = FedSim(**SMALL, **some, personal_part=part)
    personal = parameters_of(NET, part, "personal_part")
    twin = naive_partial.fedsim(FEDERATION, NET, personal, method, ROUNDS, SEED, lr_factor, clients_of(method))
    assert_is_twin(trained(method, engine=engine), twin)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("part", ["output", "input"])
@pytest.mark.parametrize(
    "some",
    [{}, {"participation": 0.5, "local_steps": 5}, {"momentum": 0.0, "personal_epochs": 3}, {"personal_steps": 2}],
)
def test_fedalt_is_its_pseudocode(engine: str, part: str, some: dict) -> None:
    method = FedAlt(**SMALL, **some, personal_part=part)
    personal, first = parameters_of(NET, part, "personal_part"), method.personal_work()
    twin = naive_partial.fedalt(FEDERATION, NET, personal, method, first, ROUNDS, SEED, lr_factor, clients_of(method))
    assert_is_twin(trained(method, engine=engine), twin)


# ------------------------------------------------------------------ special cases of each other


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("canonical", ["all", "2", "0"])
@pytest.mark.parametrize(
    ("special", "general"),
    [
        (FedPer(**SMALL), FedSim(**SMALL, personal_part="output")),
        (LGFedAvg(**SMALL), FedSim(**SMALL, personal_part="input")),
        (FedRep(**SMALL, head_epochs=3), FedAlt(**SMALL, personal_part="output", personal_epochs=3)),
        (FedSim(**SMALL, personal_part=()), FedAvg(**SMALL)),
        (FedAlt(**SMALL, personal_part=()), FedAvg(**SMALL)),
        (FedSim(**SMALL, personal_part=("0", "2")), Local(**SMALL)),
        (
            FedAlt(**{**SMALL, "batch_size": None}, personal_part=("0", "2"), local_epochs=2),
            Local(**{**SMALL, "batch_size": None}, local_epochs=2),
        ),
    ],
    ids=["fedper", "lg-fedavg", "fedrep", "fedsim-fedavg", "fedalt-fedavg", "fedsim-local", "fedalt-local"],
)
def test_relations(special, general, canonical: str, engine: str) -> None:
    assert_same_models(trained(special, engine=engine, canonical=canonical), trained(general, canonical=canonical))


def test_a_representation_of_several_layers_is_personal_as_a_whole() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU())
    net = nn.Sequential(body, nn.Linear(6, 3)).double()
    assert_same_models(trained(LGFedAvg(**SMALL), net), trained(FedSim(**SMALL, personal_part="0"), net))


@pytest.mark.parametrize(("method", "limit"), [(LGFedAvg, FedAvg), (FedPer, Local), (FedSim, Local)])
def test_a_network_of_one_layer_has_no_split(method, limit) -> None:
    net = make_linear(dtype=torch.float64)
    assert_same_models(trained(method(**SMALL), net), trained(limit(**SMALL), net))


@pytest.mark.parametrize("method", [FedPer, LGFedAvg])
def test_a_client_that_is_alone_learns_alone(method) -> None:
    federation = make_federation((9,), dtype=torch.float64)
    assert_same_models(trained(method(**SMALL), federation=federation), trained(Local(**SMALL), federation=federation))


def test_like_clients_have_like_parts_so_that_nothing_is_lost_by_sharing() -> None:
    """The mean of equals is each of them: with the same data everywhere every split is Local."""
    one = FEDERATION.client("client-2")["train"]
    x, y = one.x.repeat(3, 1).float(), one.y.repeat(3)
    same = type(FEDERATION).from_arrays(x, y, [f"c{i}" for i in range(3) for _ in one.y], test_fraction=0.0)
    same = same.to(dtype=torch.float64)
    full = {**SMALL, "batch_size": None, "local_epochs": 3}
    alone = trained(Local(**full), federation=same)
    for method in (FedPer(**full), LGFedAvg(**full), FedSim(**full, personal_part="input")):
        assert_same_models(trained(method, federation=same), alone)


# ------------------------------------------------------------------ what moves, what stays, what leaves


@pytest.mark.parametrize("space", [None, Workspace()], ids=["autograd", "by-hand"])
def test_what_is_frozen_keeps_its_bits(space) -> None:
    who = torch.tensor([2, 1, 0, 3])
    data = LocalData(FEDERATION.train, FEDERATION.weights.double(), id_keys(FEDERATION.ids), who, SEED, 0, space)
    population = Population(NET, k=1)
    start = one_model(population.initial(0))
    method = FedAvg(**SMALL, momentum=0.9)
    networks = start.copies(4, None)
    descend_networks(population, networks, data, method, 0.2, only={"2.weight"})
    for name, value in networks.by_name().items():
        unmoved = value.equal(start.by_name()[name].expand_as(value))
        assert unmoved == (name != "2.weight")


METHODS = {
    "lg-fedavg": (LGFedAvg(**SMALL), ["2.weight", "2.bias"]),
    "fedper": (FedPer(**SMALL), ["0.weight", "0.bias"]),
    "fedrep": (FedRep(**SMALL, head_epochs=2), ["0.weight", "0.bias"]),
    "fedalt": (FedAlt(**SMALL, personal_part="0"), ["2.weight", "2.bias"]),
    "fedsim": (FedSim(**SMALL, personal_part="2"), ["0.weight", "0.bias"]),
}


@pytest.mark.parametrize("canonical", ["all", "2"])
@pytest.mark.parametrize("name", METHODS)
def test_only_the_shared_part_is_sent_either_way(name: str, canonical: str) -> None:
    method, shared = METHODS[name]
    population = Population(NET, k=1, canonical=canonical)
    problem = pose(population, FEDERATION, None, ROUNDS, SEED)
    state = begin(method, problem)
    plan = method.plan(problem, state.server, 0)
    who = torch.tensor([2])
    data = LocalData(FEDERATION.train, problem.weights, id_keys(FEDERATION.ids), who, SEED, 0)
    client = state.clients.map(lambda leaf: leaf[who])
    with torch.no_grad():
        work = method.work(population, plan.task, plan.shared, plan.own, client, data)
    assert not work.upload.rows
    assert not plan.own
    assert {name for sum_ in work.upload.sums.values() for name in sum_.value.by_name()} == set(shared)
    assert plan.shared.by_name().keys() == set(shared)
    assert not client.by_name().keys() & set(shared)
    numbers = sum(p.numel() for name, p in NET.named_parameters() if name in shared)
    report = trained(method, canonical=canonical, rounds=1).history[0]
    assert report["bytes_up"] == report["bytes_down"] == 8 * 4 * numbers


@pytest.mark.parametrize("name", METHODS)
def test_who_never_took_part_has_its_first_personal_part_and_todays_shared_one(name: str) -> None:
    method = METHODS[name][0].model_copy(update={"participation": 0.25})
    seen = set(itertools.chain.from_iterable(clients_of(method)(t) for t in range(2)))
    absent = set(range(4)) - seen
    assert absent
    fitted = trained(method, rounds=2)
    for i in absent:
        for name_, value in own_models(fitted)[i].items():
            assert value.equal(dict(NET.named_parameters())[name_]) == (name_ not in METHODS[name][1])


def test_models_for_everyone_hold_the_shared_part_once() -> None:
    fitted = trained(FedPer(**SMALL))
    leaf = fitted.personal.shared.canonical["0.weight"]
    assert leaf.shape[0] == 4
    assert leaf.data_ptr() == fitted.state.server.shared.canonical["0.weight"].data_ptr()


class Adapted(nn.Module):
    """A network with a small module of its own in the middle, beside which the signal also passes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.adapter, self.classifier = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.classifier(hidden + self.adapter(hidden))


@pytest.mark.parametrize("method", [FedSim, FedAlt])
def test_an_adapter_is_a_module_like_any_other(method) -> None:
    torch.manual_seed(0)
    fitted = trained(method(**SMALL, personal_part="adapter"), Adapted().double())
    assert fitted.state.clients.by_name().keys() == {"adapter.weight", "adapter.bias"}
    first, second, *_ = own_models(fitted)
    for name, value in first.items():
        assert value.equal(second[name]) == (not name.startswith("adapter"))


@pytest.mark.parametrize("method", [METHODS[name][0] for name in METHODS])
def test_convolutions_in_threads_are_the_loops(method) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 2, 4, 4), torch.randint(3, (20,))
    clients = [f"c{i % 3}" for i in range(20)]
    federation = type(FEDERATION).from_arrays(x, y, clients, test_fraction=0.0).to(dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)).double()
    part = {"personal_part": "input"} if "personal_part" in type(method).model_fields else {}
    method = method.model_copy(update=part)
    one, other = (trained(method, net, federation, engine) for engine in (Loop(), Stacked(2, threads=2)))
    assert_same_models(one, other)
