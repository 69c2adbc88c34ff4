"""FedAvg, Local and centralized SGD agree with their naive twins."""

import pytest
import torch
from pydantic import ValidationError

from kit.problems import make_federation, make_net
from kit.training import networks_of_clients, positions_of, run
from kit.twins import one_model as naive_one_model
from kit.twins import ppfl as naive
from ppfl.algorithms import METHODS, Centralized, FedAvg, Local
from ppfl.core.errors import SettingError
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
SEVERAL_MODELS = {"ppfl", "ifca", "cfl", "fedem", "finetune"}


def trained(method, engine="stacked"):
    return run(method, Population(NET, k=1), FEDERATION, rounds=ROUNDS, engine=engine, seed=SEED)


def twin_settings(found):
    """What the naive methods take besides the federation and the network."""
    method, problem = found.method, found.problem
    step_size, clients = lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(problem, method, t)
    return method, ROUNDS, SEED, step_size, clients


def assert_is_network(values, net) -> None:
    for name, expected in net.named_parameters():
        torch.testing.assert_close(values[name], expected.detach(), **TIGHT)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [({}, "loop"), ({"participation": 0.5, "local_steps": 5}, "stacked")],
    ids=["everyone", "some-clients"],
)
def test_fedavg_is_its_pseudocode(settings: dict, engine: str) -> None:
    found = trained(FedAvg(**SMALL, **settings), engine)
    assert_is_network(found.server.shared, naive.fedavg(FEDERATION, NET, *twin_settings(found)))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_local_is_every_client_alone(engine: str) -> None:
    found = trained(Local(**SMALL, local_epochs=2), engine)
    *settings, _ = twin_settings(found)
    twins = naive.local(FEDERATION, NET, *settings)
    for mine, twin in zip(networks_of_clients(found), twins, strict=True):
        assert_is_network(mine, twin)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [({}, "loop"), ({"batch_size": None}, "stacked"), ({"momentum": 0.0, "participation": 0.5}, "stacked")],
    ids=["batches", "all-data", "some-clients"],
)
def test_centralized_is_sgd_on_the_pooled_weighted_loss(settings: dict, engine: str) -> None:
    found = trained(Centralized(**{**SMALL, **settings}), engine)
    assert_is_network(found.server.shared, naive_one_model.centralized(FEDERATION, NET, *twin_settings(found)))


def test_centralized_takes_one_step_per_round() -> None:
    with pytest.raises(ValidationError, match="should be 1"):
        Centralized(local_steps=2)
    with pytest.raises(ValidationError, match="should be None"):
        Centralized(local_epochs=1)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - SEVERAL_MODELS))
def test_methods_with_one_model_refuse_several(name: str) -> None:
    with pytest.raises(SettingError, match="set k = 1"):
        run(METHODS[name](lr=0.1), Population(NET, k=2), FEDERATION)
