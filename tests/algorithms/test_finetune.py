"""Fine-tuning adds local steps to a method that is otherwise untouched."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import assert_same, connect, losses_of_clients, networks_of_clients, positions_of, run
from kit.twins import own_models as naive_own_models
from kit.twins import ppfl as naive
from ppfl.algorithms import PPFL, Centralized, Ditto, FedAvg, FineTune, Local, PFedMe
from ppfl.core.errors import SettingError
from ppfl.core.models import Mixture, Networks
from ppfl.core.population import Population
from ppfl.server import choose_lr

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
CONVOLVES = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))
ROUNDS, SEED = 5, 3
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
INNER = {
    "fedavg": (FedAvg(**SMALL), {"k": 1}),
    "fedavg-predictions": (FedAvg(**SMALL), {"k": 1, "mix": "predictions"}),
    "local": (Local(**SMALL), {"k": 1}),
    "centralized": (Centralized(**SMALL), {"k": 1}),
    "ditto-some-clients": (Ditto(**SMALL, participation=0.3), {"k": 1}),
    "pfedme": (PFedMe(lr=0.05, batch_size=4), {"k": 1}),
    "ppfl-weights": (PPFL(**SMALL), {"k": 3, "mix": "weights"}),
    "ppfl-private": (PPFL(**SMALL, share_memberships=False), {"k": 3, "mix": "weights"}),
    "ppfl-last-layer": (PPFL(**SMALL, participation=0.5), {"k": 3, "canonical": "2"}),
    "ppfl-first-layer": (PPFL(**SMALL), {"k": 3, "canonical": "0"}),
    "ppfl-convolutions": (PPFL(**SMALL), {"k": 3, "canonical": "4", "net": CONVOLVES.double()}),
}


def trained(method, rounds=ROUNDS, engine="stacked", dropout=0.0, net=NET, **population):
    return run(
        method, Population(net, **population), FEDERATION, rounds=rounds, engine=engine, seed=SEED, dropout=dropout
    )


@pytest.fixture(params=INNER)
def inner(request):
    return INNER[request.param]


def test_no_steps_are_the_inner_method(inner) -> None:
    method, population = inner
    tuned = trained(FineTune(method=method, steps=0), ROUNDS + 1, **population)
    alone = trained(method, **population)
    torch.testing.assert_close(losses_of_clients(tuned), losses_of_clients(alone), **TIGHT)


def test_training_before_the_last_round_is_the_inner_methods(inner) -> None:
    """Whatever is tuned at the end, the server's state is that of the inner method by itself."""
    method, population = inner
    tuned, alone = trained(FineTune(method=method), ROUNDS + 1, **population), trained(method, **population)
    assert_same(tuned.server, alone.server, atol=0, rtol=0)
    assert tuned.reports[-1].bytes_up == 0
    assert tuned.reports[-1].participants == FEDERATION.n_clients


@pytest.mark.parametrize(
    ("work", "engine"),
    [({"steps": 5}, "stacked"), ({"epochs": 2, "lr": 0.05}, "stacked"), ({}, "loop")],
    ids=["steps", "epochs", "one-epoch"],
)
def test_each_client_takes_sgd_steps_from_the_model_of_fedavg(work: dict, engine: str) -> None:
    method = FedAvg(**SMALL)
    found = trained(FineTune(method=method, **work), ROUNDS + 1, engine, k=1)
    start = naive.fedavg(
        FEDERATION, NET, method, ROUNDS, SEED,
        lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(found.problem, method, t),
    )  # fmt: skip
    settings = FedAvg(**SMALL, local_steps=work.get("steps"), local_epochs=work.get("epochs"))
    twins = naive_own_models.finetuned(FEDERATION, lambda i: start, settings, work.get("lr", 0.2), SEED, ROUNDS)
    for mine, twin in zip(networks_of_clients(found), twins, strict=True):
        assert_same(mine, {name: p.detach() for name, p in twin.named_parameters()}, **TIGHT)


def test_each_client_takes_sgd_steps_from_its_mixed_network() -> None:
    method = PPFL(**SMALL)
    found = trained(FineTune(method=method, steps=4), ROUNDS + 1, k=3, mix="weights")
    alone = trained(method, k=3, mix="weights")

    def mixed(i):
        network = make_net(dtype=torch.float64)
        thetas = alone.server.shared
        network.load_state_dict({name: torch.tensordot(alone.memberships[i], thetas[name], 1) for name in thetas})
        return network

    twins = naive_own_models.finetuned(FEDERATION, mixed, FedAvg(**SMALL, local_steps=4), 0.2, SEED, ROUNDS)
    for mine, twin in zip(networks_of_clients(found), twins, strict=True):
        assert_same(mine, {name: p.detach() for name, p in twin.named_parameters()}, **TIGHT)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_with_a_part_only_that_part_becomes_the_clients_own(engine: str) -> None:
    method = PPFL(**SMALL)
    found = trained(FineTune(method=method, steps=4, part="2.bias"), ROUNDS + 1, engine, k=3, mix="weights")
    alone = trained(method, engine=engine, k=3, mix="weights")
    thetas = alone.server.shared

    def all_but_the_bias_frozen(i):
        network = make_net(dtype=torch.float64)
        network.load_state_dict({name: torch.tensordot(alone.memberships[i], thetas[name], 1) for name in thetas})
        for name, p in network.named_parameters():
            p.requires_grad_(name == "2.bias")
        return network

    settings = FedAvg(**SMALL, local_steps=4)
    twins = naive_own_models.finetuned(FEDERATION, all_but_the_bias_frozen, settings, 0.2, SEED, ROUNDS)
    for mine, twin in zip(networks_of_clients(found), twins, strict=True):
        assert_same(mine, {name: p.detach() for name, p in twin.named_parameters()}, **TIGHT)


def test_a_part_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match="part names 'head'"):
        trained(FineTune(method=FedAvg(**SMALL), part="head"), k=1)


def test_steps_of_their_own_fit_clients_better() -> None:
    found = trained(FineTune(method=FedAvg(lr=0.1, batch_size=None), epochs=20), 10, k=1)
    assert bool((losses_of_clients(found) < losses_of_clients(found, at=-2)).all())


def test_personal_models_are_the_inner_methods_until_the_last_round() -> None:
    found = trained(FineTune(method=PPFL(**SMALL), steps=1), 3, k=3, mix="weights")
    assert [type(found.models(at)) for at in (1, 2, 3)] == [Mixture, Mixture, Networks]


def test_a_client_lost_in_the_last_round_keeps_the_inner_methods_model(inner) -> None:
    method, population = inner
    found = trained(FineTune(method=method, steps=2), ROUNDS + 1, dropout=0.5, **population)
    assert 0 < found.reports[-1].participants < FEDERATION.n_clients
    tuned = found.client_tree().own.exists > 0
    assert int(tuned.sum()) == found.reports[-1].participants
    before, after = losses_of_clients(found, at=-2), losses_of_clients(found)
    assert torch.isclose(before, after, **TIGHT).equal(~tuned)


def test_the_server_sees_the_rows_and_the_penalty_of_the_inner_method() -> None:
    for method in (FedAvg(**SMALL), PPFL(**SMALL, penalty=0.1), PPFL(**SMALL, share_memberships=False)):
        tuned = FineTune(method=method)
        assert tuned.visible_rows == method.visible_rows
        assert tuned.membership_penalty == method.membership_penalty


def test_a_step_left_open_is_found_for_the_inner_method() -> None:
    population = Population(NET, k=1)
    transport = connect(FEDERATION, population, "stacked")
    problem = trained(FedAvg(**SMALL), 10, k=1).problem
    inner = FedAvg(batch_size=4)
    alone, tuned = (choose_lr(one, problem, transport) for one in (inner, FineTune(method=inner, steps=1)))
    assert not alone.needs_lr and tuned == FineTune(method=alone, steps=1)
    assert tuned.plan(problem, tuned.init_server(problem), 9).task.lr == alone.lr


def test_what_does_not_end_in_one_network_per_client_is_refused() -> None:
    for mix in ("outputs", "predictions"):
        with pytest.raises(SettingError, match="one network per client.*set mix = 'weights'"):
            trained(FineTune(method=PPFL(**SMALL)), 3, k=3, mix=mix)
    with pytest.raises(SettingError, match="set k = 1"):
        trained(FineTune(method=FedAvg(**SMALL)), 3, k=3, mix="weights")
    with pytest.raises(SettingError, match="rounds >= 2"):
        trained(FineTune(method=FedAvg(**SMALL)), 1, k=1)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="keep one of them"):
        FineTune(steps=1, epochs=1)
    with pytest.raises(ValidationError, match="finetune"):
        FineTune(method=FineTune())
