"""IFCA, FedEM and CFL agree with naive twins (naive_clusters.py), and give the same on every engine."""

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import assert_same, run
from kit.twins import clusters as naive_clusters
from ppfl.algorithms import CFL, IFCA, FedEM
from ppfl.core.population import Population
from ppfl.data import Federation

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED, K = 4, 3, 3
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
TWO_EPOCHS, WHOLE_BATCHES = {"local_epochs": 2}, {"batch_size": None, "local_steps": 3}


def trained(method, engine, mix="outputs"):
    return run(method, Population(NET, k=K, mix=mix), FEDERATION, rounds=ROUNDS, engine=engine, seed=SEED)


def start_of(found) -> list[nn.Module]:
    return naive_clusters.networks(NET, found.states[0].server.shared)


def lr_of(method):
    return lambda t: method.step_size(t, ROUNDS)


def assert_same_models(found, nets) -> None:
    for k, net in enumerate(nets):
        for name, expected in net.named_parameters():
            torch.testing.assert_close(found.server.shared[name][k], expected.detach(), **TIGHT)


@pytest.mark.parametrize(
    ("settings", "mix", "engine"),
    [
        ({}, "outputs", "loop"),
        ({**TWO_EPOCHS, "momentum": 0.9}, "predictions", "stacked"),
        (WHOLE_BATCHES, "weights", "stacked"),
    ],
    ids=["batches", "momentum", "whole-batches"],
)
def test_ifca_is_its_pseudocode(settings: dict, mix: str, engine: str) -> None:
    method = IFCA(**SMALL | settings)
    found = trained(method, engine, mix)
    nets, choice = naive_clusters.ifca(FEDERATION, start_of(found), method, ROUNDS, SEED, lr_of(method))
    assert found.memberships.argmax(1).tolist() == choice
    assert len(set(choice)) > 1
    assert_same_models(found, nets)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [({}, "loop"), ({**TWO_EPOCHS, "momentum": 0.0}, "stacked"), (WHOLE_BATCHES, "stacked")],
    ids=["batches", "two-epochs", "whole-batches"],
)
def test_fedem_is_its_pseudocode(settings: dict, engine: str) -> None:
    method = FedEM(**SMALL | settings)
    found = trained(method, engine, "predictions")
    nets, pi = naive_clusters.fedem(FEDERATION, start_of(found), method, ROUNDS, SEED, lr_of(method))
    torch.testing.assert_close(found.memberships, pi, **TIGHT)
    assert_same_models(found, nets)


@pytest.mark.parametrize(
    ("eps", "linkage", "engine"),
    [
        ({"eps1": 0.0}, "complete", "stacked"),
        ({"eps1": 5.0, "eps2": 0.1}, "complete", "loop"),
        ({"eps1": 5.0, "eps2": 0.1}, "single", "stacked"),
        ({"eps1": 0.9, "eps2": 0.5, "gamma": 0.3}, "complete", "stacked"),
        ({"eps1": 0.9, "eps2": 0.5, "gamma": 0.3}, "single", "stacked"),
    ],
    ids=["never", "often-complete", "often-single", "at-times-complete", "at-times-single"],
)
def test_cfl_is_its_pseudocode(eps: dict, linkage: str, engine: str) -> None:
    method = CFL(**SMALL, **eps, linkage=linkage)
    found = trained(method, engine)
    nets, cluster, cuts = naive_clusters.cfl(FEDERATION, NET, K, method, ROUNDS, SEED, lr_of(method))
    assert bool(cuts) == (eps["eps1"] > 0)
    assert found.memberships.argmax(1).tolist() == cluster
    assert_same_models(found, nets)


METHODS = {"ifca": IFCA(**SMALL), "fedem": FedEM(**SMALL), "cfl": CFL(**SMALL, eps1=10, eps2=0)}


def with_other_samples(x, y) -> Federation:
    """The same clients with other samples."""
    ids = [FEDERATION.ids[i] for i in FEDERATION.train.client_of().tolist()]
    return Federation.from_arrays(x.float(), y, ids, test_fraction=0.0).to(dtype=torch.float64)


def other_case(name: str):
    """Federation, network and settings of the population."""
    x, y = FEDERATION.train.x, FEDERATION.train.y
    if name == "numbers":
        return with_other_samples(x, x[:, 0].float()), make_net(classes=1, dtype=torch.float64), {"loss": "squared"}
    if name == "images":
        net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 3)).double()
        return with_other_samples(x.reshape(-1, 1, 2, 2), y), net, {}
    return FEDERATION, NET, {"canonical": "2"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["common part", "numbers", "images"])
def test_engines_agree_on_other_networks_and_losses(method: str, case: str) -> None:
    federation, net, settings = other_case(case)
    population = Population(net, k=K, mix="predictions", **settings)
    one, other = (run(METHODS[method], population, federation, engine=engine) for engine in ("loop", "stacked"))
    assert_same(one.everything(), other.everything(), atol=1e-10, rtol=1e-9)
