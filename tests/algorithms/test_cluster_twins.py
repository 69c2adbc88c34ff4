"""IFCA, FedEM and CFL agree with naive twins (naive_cluster.py), and give the same on every engine."""

import pytest
import torch
from ppfl.algorithms.schedules import factor
from ppfl.engines import fit
from torch import nn
from torch.utils import _pytree as pytree

from algorithms import naive_cluster
from ppfl.algorithms import CFL, IFCA, FedEM
from ppfl.core.population import Population
from ppfl.data.federation import Federation
from support import make_federation, make_net

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED, K = 6, 3, 3
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
TIGHT = {"atol": 1e-9, "rtol": 1e-9}


def lr_factor(t: int) -> float:
    return factor("step", t, ROUNDS)


def run(method, engine, mix="outputs"):
    population = Population(NET, k=K, mix=mix)
    return population, fit(population, FEDERATION, method, rounds=ROUNDS, engine=engine, seed=SEED)


def assert_same_models(fitted, nets) -> None:
    for k, net in enumerate(nets):
        for name, expected in net.named_parameters():
            torch.testing.assert_close(fitted.state.server.shared.canonical[name][k], expected.detach(), **TIGHT)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "local_epochs": 2}, {"batch_size": None, "local_steps": 3}])
@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_ifca_is_its_pseudocode(engine: str, settings: dict, mix: str) -> None:
    method = IFCA(**SMALL | settings)
    population, fitted = run(method, engine, mix)
    start = naive_cluster.networks(NET, population.initial(SEED, distinct=True))
    nets, choice = naive_cluster.ifca(FEDERATION, start, method, ROUNDS, SEED, lr_factor)
    assert fitted.memberships.argmax(1).tolist() == choice
    assert len(set(choice)) > 1
    assert_same_models(fitted, nets)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.0, "local_epochs": 2}, {"batch_size": None, "local_steps": 3}])
def test_fedem_is_its_pseudocode(engine: str, settings: dict) -> None:
    method = FedEM(**SMALL | settings)
    population, fitted = run(method, engine, "predictions")
    start = naive_cluster.networks(NET, population.initial(SEED, distinct=True))
    nets, pi = naive_cluster.fedem(FEDERATION, start, method, ROUNDS, SEED, lr_factor)
    torch.testing.assert_close(fitted.memberships, pi, **TIGHT)
    assert_same_models(fitted, nets)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("linkage", ["complete", "single"])
@pytest.mark.parametrize("eps", [{"eps1": 0.0}, {"eps1": 5.0, "eps2": 0.1}, {"eps1": 0.9, "eps2": 0.5, "gamma": 0.3}])
def test_cfl_is_its_pseudocode(engine: str, linkage: str, eps: dict) -> None:
    method = CFL(**SMALL, **eps, linkage=linkage)
    _, fitted = run(method, engine)
    nets, cluster, cuts = naive_cluster.cfl(FEDERATION, NET, K, method, ROUNDS, SEED, lr_factor)
    assert bool(cuts) == (eps["eps1"] > 0)
    assert fitted.memberships.argmax(1).tolist() == cluster
    assert_same_models(fitted, nets)


METHODS = {"ifca": IFCA(**SMALL), "fedem": FedEM(**SMALL), "cfl": CFL(**SMALL, eps1=10, eps2=0)}


def with_other(x, y) -> Federation:
    """The same clients with other samples."""
    ids = [FEDERATION.ids[i] for i in FEDERATION.train.client_of().tolist()]
    return Federation.from_arrays(x.float(), y, ids, test_fraction=0.0).to(dtype=torch.float64)


def other_case(name: str):
    """Federation, network and settings of the population."""
    x, y = FEDERATION.train.x, FEDERATION.train.y
    if name == "numbers":
        return with_other(x, x[:, 0].float()), make_net(classes=1, dtype=torch.float64), {"loss": "squared"}
    if name == "images":
        net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 3)).double()
        return with_other(x.reshape(-1, 1, 2, 2), y), net, {}
    return FEDERATION, NET, {"canonical": "2"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["common part", "numbers", "images"])
def test_engines_agree_on_other_networks_and_losses(method: str, case: str) -> None:
    federation, net, settings = other_case(case)
    population = Population(net, k=K, mix="predictions", **settings)
    server, other = (
        fit(population, federation, METHODS[method], rounds=4, engine=engine, seed=SEED).state.server
        for engine in ("loop", "stacked")
    )
    for a, b in zip(pytree.tree_leaves(server), pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)
