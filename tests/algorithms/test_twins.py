"""Every method is its paper's pseudocode (kit.twins), whatever the engine, and the server's optimizers are torch's."""

from typing import Any, NamedTuple

import pytest
import torch

import ppfl
from kit.problems import make_federation, make_net
from kit.training import assert_same, networks_of_clients, run
from kit.twins import TWINS, one_model
from kit.twins.plain import Given
from ppfl.algorithms import METHODS, Method
from ppfl.algorithms.server_optimizers import Adagrad, Momentum
from ppfl.sites import SavedStates

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
NET = make_net(dtype=torch.float64)
W = ppfl.affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
SOME = {"participation": 0.5}
WHOLE_BATCHES = {"batch_size": None, "local_steps": 3}
AS_WRITTEN = {**SMALL, "averaging": "everyone", "start": "uniform", "membership_steps": 1, "penalty": 0.05}
MEMBERS = {**AS_WRITTEN, "averaging": "members", "weight_decay": 0.05}
UNSCALED = {**AS_WRITTEN, "order": "random", "membership_scale": "weighted", "membership_lr": 3.0}
MOMENTUM = {"momentum": 0.9, "local_steps": 4, "inner_steps": 2}
OFTEN, AT_TIMES = {"eps1": 5.0, "eps2": 0.1}, {"eps1": 0.9, "eps2": 0.5, "gamma": 0.3}


class Case(NamedTuple):
    method: Method
    population: dict[str, Any] = {"k": 1}
    engine: str = "stacked"


def mixed(mix, canonical="all"):
    return {"k": 3, "mix": mix, "canonical": canonical}


SLOW_START = {"beta1": 0.5, "tau": 0.05}
CASES = {
    "local": Case(ppfl.Local(**SMALL, local_epochs=2)),
    "fedavg of some clients": Case(ppfl.FedAvg(**SMALL, **SOME, local_steps=5), engine="loop"),
    "fedprox of some clients": Case(ppfl.FedProx(**SMALL, **SOME, mu=2.0, local_epochs=3), engine="loop"),
    "scaffold of some clients": Case(ppfl.Scaffold(**SMALL, **SOME, local_epochs=2)),
    "scaffold with a server step": Case(ppfl.Scaffold(**SMALL | WHOLE_BATCHES, server_lr=0.5), engine="loop"),
    "fedavgm of some clients": Case(ppfl.FedAvgM(**SMALL, **SOME, server_optimizer={"lr": 0.3, "momentum": 0.5})),
    "fedadagrad": Case(ppfl.FedAdagrad(**SMALL, server_optimizer={"lr": 0.1}), engine="loop"),
    "fedadam of some clients": Case(ppfl.FedAdam(**SMALL, **SOME, server_optimizer=SLOW_START, local_epochs=2)),
    "fedyogi of some clients": Case(ppfl.FedYogi(**SMALL, **SOME, server_optimizer=SLOW_START)),
    "ditto of some clients": Case(ppfl.Ditto(**SMALL, **SOME, mu=0.3, local_epochs=2), engine="loop"),
    "pfedme of some clients": Case(ppfl.PFedMe(**SMALL, **SOME, mu=1.0, outer_lr=0.3, beta=1.5, inner_steps=3)),
    "pfedme with momentum": Case(ppfl.PFedMe(**SMALL, **MOMENTUM, mu=2.0, outer_lr=0.1), engine="loop"),
    "finetune by steps": Case(ppfl.FineTune(method=ppfl.FedAvg(**SMALL), steps=5)),
    "finetune by epochs": Case(ppfl.FineTune(method=ppfl.FedAvg(**SMALL), epochs=2, lr=0.05)),
    "finetune of mixed networks": Case(ppfl.FineTune(method=ppfl.PPFL(**MEMBERS)), mixed("weights"), "loop"),
    "finetune of a part": Case(ppfl.FineTune(method=ppfl.PPFL(**MEMBERS), steps=4, part="2.bias"), mixed("weights")),
    "fedsim of some clients": Case(ppfl.FedSim(**SMALL, **SOME, personal_part="input", local_steps=5)),
    "fedalt of some clients": Case(ppfl.FedAlt(**SMALL, **SOME, personal_part="input", local_steps=5)),
    "fedalt, personal epochs": Case(ppfl.FedAlt(**SMALL, momentum=0.0, personal_epochs=3), engine="loop"),
    "fedalt, personal steps": Case(ppfl.FedAlt(**SMALL, personal_part="input", personal_steps=2)),
    "fedper": Case(ppfl.FedPer(**SMALL), engine="loop"),
    "lg-fedavg": Case(ppfl.LGFedAvg(**SMALL)),
    "fedrep": Case(ppfl.FedRep(**SMALL, head_epochs=2)),
    "ifca with momentum": Case(ppfl.IFCA(**SMALL | WHOLE_BATCHES, momentum=0.9), mixed("predictions"), "loop"),
    "ifca of some clients": Case(ppfl.IFCA(**SMALL, **SOME), mixed("outputs")),
    "fedem on whole batches": Case(ppfl.FedEM(**SMALL | WHOLE_BATCHES, momentum=0.0), mixed("predictions"), "loop"),
    "fedem of some clients": Case(ppfl.FedEM(**SMALL, **SOME), mixed("predictions")),
    "cfl, complete linkage": Case(ppfl.CFL(**SMALL, **OFTEN, linkage="complete"), mixed("outputs"), "loop"),
    "cfl, single linkage": Case(ppfl.CFL(**SMALL, **OFTEN, linkage="single"), mixed("outputs")),
    "cfl, cut at times, single linkage": Case(ppfl.CFL(**SMALL, **AT_TIMES, linkage="single"), mixed("outputs")),
    "algorithm O1, outputs": Case(ppfl.PPFL(**AS_WRITTEN), mixed("outputs"), "loop"),
    "algorithm O1, predictions": Case(ppfl.PPFL(**AS_WRITTEN), mixed("predictions"), "loop"),
    "algorithm O1, weights": Case(ppfl.PPFL(**AS_WRITTEN), mixed("weights"), "loop"),
    "algorithm 1": Case(ppfl.PPFL(**AS_WRITTEN, order="random", block_probability=0.4), mixed("predictions")),
    "algorithm 1, unscaled": Case(ppfl.PPFL(**UNSCALED), mixed("weights")),
    "algorithm 1, some clients": Case(ppfl.PPFL(**UNSCALED, participation=0.7), mixed("predictions", "2")),
    "common part, some clients, weights": Case(ppfl.PPFL(**AS_WRITTEN, **SOME), mixed("weights", "2")),
    "members, outputs": Case(ppfl.PPFL(**MEMBERS), mixed("outputs")),
    "members, weights": Case(ppfl.PPFL(**MEMBERS), mixed("weights")),
    "members, common part": Case(ppfl.PPFL(**MEMBERS, local_epochs=2), mixed("predictions", "2")),
    "members, common part, some clients, outputs": Case(ppfl.PPFL(**MEMBERS, **SOME), mixed("outputs", "2"), "loop"),
    "members, common part, some clients, weights": Case(ppfl.PPFL(**MEMBERS, **SOME), mixed("weights", "2"), "loop"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_method_is_its_pseudocode(name):
    method, settings, engine = CASES[name]
    population = ppfl.Population(NET, **settings)
    found = run(method, population, FEDERATION, rounds=ROUNDS, seed=SEED, affinity=W, engine=engine)
    expected = TWINS[method.name](Given(FEDERATION, found.problem, method))
    networks = [{name: p.detach() for name, p in net.named_parameters()} for net in expected.networks]
    if expected.memberships is None:
        assert_same(networks_of_clients(found), networks, **TIGHT)
        return
    torch.testing.assert_close(found.memberships, expected.memberships, **TIGHT)
    assert len(found.memberships.unique(dim=0)) > 1
    if method.name == "ppfl":
        assert float((found.memberships - 1 / 3).abs().amax(1).min()) > 1e-4  # every client took part and moved
    models, canonical = found.models().models, found.problem.population.canonical_names
    for k, net in enumerate(networks):
        ours = {name: leaf[k] if name in canonical else leaf for name, leaf in models.items()}
        assert ours.keys() == net.keys()
        assert_same([ours[name] for name in net], [*net.values()], **TIGHT)


def test_every_method_has_a_case_and_a_twin():
    assert {case.method.name for case in CASES.values()} == METHODS.keys() == TWINS.keys()


def test_one_step_with_momentum_at_the_server_is_sgd_on_pooled_batches():
    method = ppfl.FedAvgM(**SMALL, **SOME, local_steps=1, momentum=0, schedule="constant")
    found = run(method, ppfl.Population(NET, k=1), FEDERATION, rounds=ROUNDS, seed=SEED)
    expected = one_model.pooled(Given(FEDERATION, found.problem, method))
    assert_same(networks_of_clients(found)[0], dict(expected.named_parameters()), **TIGHT)


TORCH = {
    "momentum": (Momentum(lr=0.5, momentum=0.7), torch.optim.SGD, {"lr": 0.5, "momentum": 0.7}),
    "adagrad": (
        Adagrad(lr=0.1, tau=0.01), torch.optim.Adagrad, {"lr": 0.1, "eps": 0.01, "initial_accumulator_value": 1e-4},
    ),
}  # fmt: skip
OPTIMIZED = [
    ("momentum", ppfl.FedAvg(**SMALL), {"k": 1}),
    ("adagrad", ppfl.FedAvg(**SMALL), {"k": 1}),
    ("momentum", ppfl.PPFL(**SMALL, warmup=0), mixed("weights")),
    ("adagrad", ppfl.PPFL(**SMALL, **SOME, order="random"), mixed("predictions")),
    ("momentum", ppfl.Ditto(**SMALL), {"k": 1}),
    ("adagrad", ppfl.PFedMe(**SMALL, mu=1.0, outer_lr=0.2, beta=1.5, inner_steps=2), {"k": 1}),
    ("momentum", ppfl.FedPer(**SMALL), {"k": 1}),
    ("adagrad", ppfl.IFCA(**SMALL), mixed("outputs")),
    ("momentum", ppfl.FedEM(**SMALL), mixed("predictions")),
]


@pytest.mark.parametrize(("kind", "method", "settings"), OPTIMIZED, ids=lambda value: getattr(value, "name", None))
def test_every_round_is_a_step_of_torchs_optimizer_along_the_mean_change(kind, method, settings):
    optimizer, of_torch, same = TORCH[kind]
    population, rounds = ppfl.Population(NET, **settings), {"rounds": ROUNDS, "seed": SEED}
    found = run(method.model_copy(update={"server_optimizer": optimizer}), population, FEDERATION, **rounds)
    x = {name: leaf.clone() for name, leaf in found.states[0].server.shared.items()}
    torchs, steps = of_torch(list(x.values()), **same), 0
    for at, state in enumerate(found.states[:-1]):
        before = state._replace(server=state.server._replace(optimizer={}))
        here = found._replace(states=[before], saved=SavedStates(found.clients[at]))
        plain = run(method, population, FEDERATION, **rounds, resume=here, until=at + 1).server.shared
        for name, leaf in x.items():
            leaf.grad = state.server.shared[name] - plain[name]
        if any(bool(leaf.grad.any()) for leaf in x.values()):  # a survey, or memberships alone, is no step
            torchs.step()
            steps += 1
        assert_same(found.states[at + 1].server.shared, x, **TIGHT)
    assert 2 < steps <= ROUNDS
    assert (steps < ROUNDS) == (method.name == "ppfl")
