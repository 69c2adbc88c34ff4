"""Every method is its paper's pseudocode (kit.twins), whatever the engine, and the server's optimizers are torch's."""

from typing import Any, NamedTuple

import pytest
import torch

import ppfl
from kit.problems import make_federation, make_net
from kit.training import Trained, assert_same, networks_of_clients, run
from kit.twins import TWINS, Given
from ppfl.algorithms import METHODS, Method
from ppfl.algorithms.server_optimizers import Adagrad, Momentum

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
OFTEN, AT_TIMES = {"eps1": 5.0, "eps2": 0.1}, {"eps1": 0.9, "eps2": 0.5, "gamma": 0.3}


class Case(NamedTuple):
    method: Method
    population: dict[str, Any] = {"k": 1}
    engine: str = "stacked"


def mixed(mix: str, canonical: str = "all") -> dict[str, Any]:
    return {"k": 3, "mix": mix, "canonical": canonical}


CASES = {
    "local": Case(ppfl.Local(**SMALL, local_epochs=2)),
    "fedavg": Case(ppfl.FedAvg(**SMALL), engine="loop"),
    "fedavg of some clients": Case(ppfl.FedAvg(**SMALL, **SOME, local_steps=5)),
    "centralized": Case(ppfl.Centralized(**SMALL), engine="loop"),
    "centralized of some clients": Case(ppfl.Centralized(**SMALL, **SOME, momentum=0.0)),
    "fedprox": Case(ppfl.FedProx(**SMALL, mu=0.5), engine="loop"),
    "fedprox of some clients": Case(ppfl.FedProx(**SMALL, **SOME, mu=2.0, local_epochs=3)),
    "scaffold": Case(ppfl.Scaffold(**SMALL), engine="loop"),
    "scaffold of some clients": Case(ppfl.Scaffold(**SMALL, **SOME, local_epochs=2)),
    "scaffold with a server step": Case(ppfl.Scaffold(**SMALL | WHOLE_BATCHES, server_lr=0.5)),
    "fedavgm": Case(ppfl.FedAvgM(**SMALL), engine="loop"),
    "fedavgm of some clients": Case(ppfl.FedAvgM(**SMALL, **SOME, server_lr=0.3, server_momentum=0.5)),
    "fedadagrad": Case(ppfl.FedAdagrad(**SMALL, server_lr=0.1), engine="loop"),
    "fedadam": Case(ppfl.FedAdam(**SMALL, server_lr=0.1)),
    "fedadam of some clients": Case(ppfl.FedAdam(**SMALL, **SOME, beta1=0.5, tau=0.05, local_epochs=2)),
    "fedyogi of some clients": Case(ppfl.FedYogi(**SMALL, **SOME, beta1=0.5, tau=0.05)),
    "ditto": Case(ppfl.Ditto(**SMALL), engine="loop"),
    "ditto of some clients": Case(ppfl.Ditto(**SMALL, **SOME, mu=0.3, local_epochs=2)),
    "pfedme": Case(ppfl.PFedMe(**SMALL | {"lr": 0.05}, inner_steps=2), engine="loop"),
    "pfedme of some clients": Case(ppfl.PFedMe(**SMALL, **SOME, mu=1.0, outer_lr=0.3, beta=1.5, inner_steps=3)),
    "pfedme with momentum": Case(
        ppfl.PFedMe(**SMALL, mu=2.0, outer_lr=0.1, momentum=0.9, local_steps=4, inner_steps=2)
    ),
    "finetune by steps": Case(ppfl.FineTune(method=ppfl.FedAvg(**SMALL), steps=5)),
    "finetune by epochs": Case(ppfl.FineTune(method=ppfl.FedAvg(**SMALL), epochs=2, lr=0.05)),
    "finetune of mixed networks": Case(ppfl.FineTune(method=ppfl.PPFL(**MEMBERS)), mixed("weights"), "loop"),
    "finetune of one parameter": Case(
        ppfl.FineTune(method=ppfl.PPFL(**MEMBERS), steps=4, part="2.bias"), mixed("weights")
    ),
    "fedsim": Case(ppfl.FedSim(**SMALL), engine="loop"),
    "fedsim of some clients": Case(ppfl.FedSim(**SMALL, **SOME, personal_part="input", local_steps=5)),
    "fedsim, all personal": Case(ppfl.FedSim(**SMALL, personal_part=("0", "2"), momentum=0.0, local_epochs=2)),
    "fedalt": Case(ppfl.FedAlt(**SMALL), engine="loop"),
    "fedalt of some clients": Case(ppfl.FedAlt(**SMALL, **SOME, personal_part="input", local_steps=5)),
    "fedalt, personal epochs": Case(ppfl.FedAlt(**SMALL, momentum=0.0, personal_epochs=3)),
    "fedalt, personal steps": Case(ppfl.FedAlt(**SMALL, personal_part="input", personal_steps=2)),
    "fedper": Case(ppfl.FedPer(**SMALL)),
    "lg-fedavg": Case(ppfl.LGFedAvg(**SMALL)),
    "fedrep": Case(ppfl.FedRep(**SMALL, head_epochs=2)),
    "ifca": Case(ppfl.IFCA(**SMALL), mixed("outputs"), "loop"),
    "ifca with momentum": Case(ppfl.IFCA(**SMALL | WHOLE_BATCHES, momentum=0.9), mixed("predictions")),
    "ifca of some clients": Case(ppfl.IFCA(**SMALL, **SOME), mixed("outputs")),
    "fedem": Case(ppfl.FedEM(**SMALL), mixed("predictions"), "loop"),
    "fedem on whole batches": Case(ppfl.FedEM(**SMALL | WHOLE_BATCHES, momentum=0.0), mixed("predictions")),
    "fedem of some clients": Case(ppfl.FedEM(**SMALL, **SOME), mixed("predictions")),
    "cfl, never cut": Case(ppfl.CFL(**SMALL, eps1=0.0), mixed("outputs")),
    "cfl, complete linkage": Case(ppfl.CFL(**SMALL, **OFTEN, linkage="complete"), mixed("outputs"), "loop"),
    "cfl, single linkage": Case(ppfl.CFL(**SMALL, **OFTEN, linkage="single"), mixed("outputs")),
    "cfl, cut at times, complete linkage": Case(ppfl.CFL(**SMALL, **AT_TIMES, linkage="complete"), mixed("outputs")),
    "cfl, cut at times, single linkage": Case(ppfl.CFL(**SMALL, **AT_TIMES, linkage="single"), mixed("outputs")),
    "algorithm O1, outputs": Case(ppfl.PPFL(**AS_WRITTEN), mixed("outputs"), "loop"),
    "algorithm O1, predictions": Case(ppfl.PPFL(**AS_WRITTEN), mixed("predictions"), "loop"),
    "algorithm O1, weights": Case(ppfl.PPFL(**AS_WRITTEN), mixed("weights"), "loop"),
    "algorithm 1": Case(ppfl.PPFL(**AS_WRITTEN, order="random", block_probability=0.4), mixed("predictions")),
    "algorithm 1, unscaled": Case(
        ppfl.PPFL(**AS_WRITTEN, order="random", membership_scale="weighted", membership_lr=3.0), mixed("weights")
    ),
    "algorithm 1, common part, some clients": Case(
        ppfl.PPFL(**AS_WRITTEN, participation=0.7, order="random"), mixed("predictions", "2")
    ),
    "five plain steps": Case(ppfl.PPFL(**AS_WRITTEN | {"penalty": 0.0}, local_steps=5, momentum=0.0), mixed("outputs")),
    "common part, some clients, outputs": Case(ppfl.PPFL(**AS_WRITTEN, **SOME), mixed("outputs", "2")),
    "common part, some clients, weights": Case(ppfl.PPFL(**AS_WRITTEN, **SOME), mixed("weights", "2")),
    "members, outputs": Case(ppfl.PPFL(**MEMBERS), mixed("outputs")),
    "members, weights": Case(ppfl.PPFL(**MEMBERS), mixed("weights")),
    "members, common part": Case(ppfl.PPFL(**MEMBERS, local_epochs=2), mixed("predictions", "2")),
    "members, common part, some clients, outputs": Case(ppfl.PPFL(**MEMBERS, **SOME), mixed("outputs", "2"), "loop"),
    "members, common part, some clients, weights": Case(ppfl.PPFL(**MEMBERS, **SOME), mixed("weights", "2"), "loop"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_method_is_its_pseudocode(name: str) -> None:
    method, settings, engine = CASES[name]
    population = ppfl.Population(NET, **settings)
    found = run(method, population, FEDERATION, rounds=ROUNDS, seed=SEED, affinity=W, engine=engine)
    expected = TWINS[method.name](Given(FEDERATION, found.problem, method))
    networks = [dict(net.named_parameters()) for net in expected.networks]
    if expected.memberships is None:
        assert_same(networks_of_clients(found), networks, **TIGHT)
        return
    torch.testing.assert_close(found.memberships, expected.memberships, **TIGHT)
    if method.name == "ppfl":
        assert float((found.memberships - 1 / 3).abs().amax(1).min()) > 1e-4  # every client took part and moved
    else:
        assert (len(found.memberships.unique(dim=0)) > 1) == (name != "cfl, never cut")
    models, canonical = found.models().models, found.problem.population.canonical_names
    for k, net in enumerate(networks):
        for parameter, value in net.items():
            ours = models[parameter][k] if parameter in canonical else models[parameter]
            torch.testing.assert_close(ours, value.detach(), **TIGHT)


def test_every_method_has_a_case_and_a_twin() -> None:
    assert {case.method.name for case in CASES.values()} == METHODS.keys() == TWINS.keys()


# ---------------------------------------------------------------------- the server's optimizers

TORCH = {
    "momentum": (Momentum(lr=0.5, momentum=0.7), lambda x: torch.optim.SGD(x, lr=0.5, momentum=0.7)),
    "adagrad": (
        Adagrad(lr=0.1, tau=0.01),
        lambda x: torch.optim.Adagrad(x, lr=0.1, eps=0.01, initial_accumulator_value=1e-4),
    ),
}
OPTIMIZED = {
    "fedavg": (ppfl.FedAvg(**SMALL), {"k": 1}, TORCH),
    "ppfl": (ppfl.PPFL(**SMALL, warmup=0), mixed("weights"), TORCH),
    "ppfl in random order": (ppfl.PPFL(**SMALL, **SOME, order="random"), mixed("predictions"), TORCH),
    "ditto": (ppfl.Ditto(**SMALL), {"k": 1}, ["momentum"]),
    "pfedme": (ppfl.PFedMe(**SMALL, mu=1.0, outer_lr=0.2, beta=1.5, inner_steps=2), {"k": 1}, ["adagrad"]),
    "fedper": (ppfl.FedPer(**SMALL), {"k": 1}, ["momentum"]),
    "ifca": (ppfl.IFCA(**SMALL), mixed("outputs"), ["adagrad"]),
    "fedem": (ppfl.FedEM(**SMALL), mixed("predictions"), ["momentum"]),
}


def plain_change(found: Trained, at: int, method: Method) -> dict[str, torch.Tensor] | None:
    """What a round without an optimizer does to the models, from where this run was; None where it leaves them."""
    state = found.states[at]
    plain = state._replace(server=state.server._replace(optimizer={}))
    start = found._replace(states=[plain], clients=[found.clients[at]])
    settings = {"rounds": ROUNDS, "seed": SEED, "until": at + 1}
    after = run(method, found.problem.population, FEDERATION, resume=start, **settings).server.shared
    change = {name: leaf - state.server.shared[name] for name, leaf in after.items()}
    return change if any(bool(leaf.any()) for leaf in change.values()) else None


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (_, _, kinds) in OPTIMIZED.items() for kind in kinds]
)
def test_every_round_is_a_step_of_torchs_optimizer_along_the_mean_change(name: str, kind: str) -> None:
    (method, settings, _), (optimizer, of_torch) = OPTIMIZED[name], TORCH[kind]
    optimized = method.model_copy(update={"server_optimizer": optimizer})
    found = run(optimized, ppfl.Population(NET, **settings), FEDERATION, rounds=ROUNDS, seed=SEED)
    x = {n: leaf.clone() for n, leaf in found.states[0].server.shared.items()}
    torchs, steps = of_torch(list(x.values())), 0
    for at in range(ROUNDS):
        change = plain_change(found, at, method)
        if change is not None:  # a survey, or memberships alone, is no step, not even of momentum
            for n, leaf in x.items():
                leaf.grad = -change[n]
            torchs.step()
            steps += 1
        assert_same(found.states[at + 1].server.shared, x, **TIGHT)
    assert 2 < steps <= ROUNDS
    assert (steps < ROUNDS) == name.startswith("ppfl")
