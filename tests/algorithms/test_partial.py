"""Partial personalization: what each method does, how they are each other's special cases, and what stays at home."""

import itertools

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_linear, make_net
from kit.training import Recording, assert_same, networks_of_clients, positions_of, run
from kit.twins import partial as naive_partial
from ppfl.algorithms import FedAlt, FedAvg, FedPer, FedRep, FedSim, LGFedAvg, Local
from ppfl.algorithms.partial import PersonalTraining, parameters_of
from ppfl.core.population import Population
from ppfl.data import Federation

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
WHOLE = {**SMALL, "batch_size": None}


def trained(method, net=NET, federation=FEDERATION, engine="stacked", canonical="all", rounds=ROUNDS, **settings):
    population = Population(net, k=1, canonical=canonical)
    return run(method, population, federation, rounds=rounds, seed=SEED, engine=engine, **settings)


def assert_same_models(one, other) -> None:
    for mine, theirs in zip(networks_of_clients(one), networks_of_clients(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert_same(mine, theirs, **TIGHT)


# ------------------------------------------------------------------ the papers' pseudocode


def assert_is_twin(twin, method, found, *training) -> None:
    """That the models are those of a naive method with the same personal part."""
    part = parameters_of(NET, method.personal_part, "personal_part")
    u, v = twin(
        FEDERATION, NET, part, method, *training, ROUNDS, SEED,
        lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(found.problem, method, t),
    )  # fmt: skip
    for mine, v_i in zip(networks_of_clients(found), v, strict=True):
        assert mine.keys() == u.keys() | v_i.keys()
        assert_same(mine, {**u, **v_i}, **TIGHT)


@pytest.mark.parametrize(
    ("part", "settings", "engine"),
    [
        ("output", {}, "loop"),
        ("input", {"participation": 0.5, "local_steps": 5}, "stacked"),
        (("0", "2"), {"momentum": 0.0, "local_epochs": 2}, "stacked"),
        ((), {"participation": 0.5}, "stacked"),
    ],
    ids=["output", "input-some-clients", "all-personal", "nothing-personal"],
)
def test_fedsim_is_its_pseudocode(part, settings: dict, engine: str) -> None:
    method = FedSim(**SMALL, **settings, personal_part=part)
    assert_is_twin(naive_partial.fedsim, method, trained(method, engine=engine))


@pytest.mark.parametrize(
    ("part", "settings", "first", "engine"),
    [
        ("output", {}, {"epochs": 1, "steps": None}, "loop"),
        ("input", {"participation": 0.5, "local_steps": 5}, {"epochs": None, "steps": 5}, "stacked"),
        ("output", {"momentum": 0.0, "personal_epochs": 3}, {"epochs": 3, "steps": None}, "stacked"),
        ("input", {"personal_steps": 2}, {"epochs": None, "steps": 2}, "stacked"),
    ],
    ids=["as-much-on-both", "some-clients", "personal-epochs", "personal-steps"],
)
def test_fedalt_is_its_pseudocode(part: str, settings: dict, first: dict, engine: str) -> None:
    method = FedAlt(**SMALL, **settings, personal_part=part)
    personal_training = PersonalTraining.like(method, **first)
    assert_is_twin(naive_partial.fedalt, method, trained(method, engine=engine), personal_training)


# ------------------------------------------------------------------ special cases of each other


@pytest.mark.parametrize(
    ("special", "general", "canonical"),
    [
        (FedPer(**SMALL), FedSim(**SMALL, personal_part="output"), "all"),
        (FedPer(**SMALL), FedSim(**SMALL, personal_part="output"), "2"),  # canonical says nothing where k = 1
        (LGFedAvg(**SMALL), FedSim(**SMALL, personal_part="input"), "all"),
        (LGFedAvg(**SMALL), FedSim(**SMALL, personal_part="input"), "0"),
        (FedRep(**SMALL, head_epochs=3), FedAlt(**SMALL, personal_part="output", personal_epochs=3), "2"),
        (FedSim(**SMALL, personal_part=()), FedAvg(**SMALL), "all"),
        (FedAlt(**SMALL, personal_part=()), FedAvg(**SMALL), "2"),
        (FedSim(**SMALL, personal_part=("0", "2")), Local(**SMALL), "0"),
        (FedAlt(**WHOLE, personal_part=("0", "2"), local_epochs=2), Local(**WHOLE, local_epochs=2), "all"),
    ],
    ids=[
        "fedper-is-fedsim", "fedper-common-part", "lg-fedavg-is-fedsim", "lg-fedavg-common-part", "fedrep-is-fedalt",
        "fedsim-of-nothing-is-fedavg", "fedalt-of-nothing-is-fedavg", "fedsim-of-all-is-local",
        "fedalt-of-all-is-local",
    ],
)  # fmt: skip
def test_methods_are_special_cases_of_each_other(special, general, canonical: str) -> None:
    assert_same_models(trained(special, canonical=canonical), trained(general))


def test_a_representation_of_several_layers_is_personal_as_a_whole() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU())
    net = nn.Sequential(body, nn.Linear(6, 3)).double()
    assert_same_models(trained(LGFedAvg(**SMALL), net), trained(FedSim(**SMALL, personal_part="0"), net))


@pytest.mark.parametrize(("method", "limit"), [(LGFedAvg, FedAvg), (FedPer, Local)])
def test_a_network_of_one_layer_has_no_split(method, limit) -> None:
    net = make_linear(dtype=torch.float64)
    assert_same_models(trained(method(**SMALL), net), trained(limit(**SMALL), net))


@pytest.mark.parametrize("method", [FedPer, LGFedAvg])
def test_a_client_that_is_alone_learns_alone(method) -> None:
    federation = make_federation((9,), dtype=torch.float64)
    assert_same_models(trained(method(**SMALL), federation=federation), trained(Local(**SMALL), federation=federation))


def test_clients_with_equal_data_lose_nothing_by_sharing() -> None:
    """The mean of equals is each of them: with the same data everywhere every split is Local."""
    one = FEDERATION.client("client-2")["train"]
    x, y = one.x.repeat(3, 1).float(), one.y.repeat(3)
    same = Federation.from_arrays(x, y, [f"c{i}" for i in range(3) for _ in one.y], test_fraction=0.0)
    same = same.to(dtype=torch.float64)
    full = {**WHOLE, "local_epochs": 3}
    alone = trained(Local(**full), federation=same)
    for method in (FedPer(**full), LGFedAvg(**full), FedSim(**full, personal_part="input")):
        assert_same_models(trained(method, federation=same), alone)


# ------------------------------------------------------------------ what moves, what stays, what leaves


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
    found = trained(method, canonical=canonical, rounds=1, kind=Recording)
    ((request, reply),) = found.transport.exchanges()
    assert request.shared.keys() == set(shared) and not request.own
    assert {leaf for total in reply.totals.values() for leaf in total.value} == set(shared) and not reply.rows.values
    assert found.server.shared.keys() == set(shared)
    assert found.client_tree().keys() == dict(NET.named_parameters()).keys() - set(shared)
    numbers = sum(p.numel() for name, p in NET.named_parameters() if name in shared)
    (report,) = found.reports
    assert report.bytes_up == report.bytes_down == 8 * 4 * numbers


@pytest.mark.parametrize("name", METHODS)
def test_a_client_that_never_took_part_has_its_first_personal_part_and_todays_shared_one(name: str) -> None:
    method, shared = METHODS[name]
    found = trained(method.model_copy(update={"participation": 0.25}), rounds=2)
    seen = set(itertools.chain.from_iterable(positions_of(found.problem, found.method, t) for t in range(2)))
    absent = set(range(4)) - seen
    assert absent
    for i in absent:
        for leaf, value in networks_of_clients(found)[i].items():
            assert value.equal(dict(NET.named_parameters())[leaf]) == (leaf not in shared)


def test_models_for_everyone_hold_the_shared_part_once() -> None:
    found = trained(FedPer(**SMALL))
    leaf = found.models().values["0.weight"]
    assert leaf.shape[0] == 4
    assert leaf.data_ptr() == found.server.shared["0.weight"].data_ptr()


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
    found = trained(method(**SMALL, personal_part="adapter"), Adapted().double())
    assert found.client_tree().keys() == {"adapter.weight", "adapter.bias"}
    first, second, *_ = networks_of_clients(found)
    for name, value in first.items():
        assert value.equal(second[name]) == (not name.startswith("adapter"))


@pytest.mark.parametrize("method", [LGFedAvg(**SMALL), FedAlt(**SMALL, personal_part="input")])
def test_convolutions_in_threads_give_what_the_loop_gives(method) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 2, 4, 4), torch.randint(3, (20,))
    clients = [f"c{i % 3}" for i in range(20)]
    federation = Federation.from_arrays(x, y, clients, test_fraction=0.0).to(dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)).double()
    one, other = (trained(method, net, federation, engine) for engine in ("loop", "threads"))
    assert_same_models(one, other)
