"""Fine-tuning adds local steps to a method that is otherwise untouched."""

import pytest
import torch
from ppfl.algorithms.schedules import factor
from ppfl.core.shared import Shared
from ppfl.engines import Watch, begin, engine_by_name, fit, pose, train, with_chosen_lr
from ppfl.engines.evaluate import client_losses
from ppfl.engines.train import returning
from pydantic import ValidationError
from torch import nn
from torch.utils import _pytree as pytree

import naive
from algorithms import naive_prox
from ppfl.algorithms import PPFL, Centralized, Ditto, FedAvg, FineTune, Local, Personal, PFedMe
from ppfl.algorithms.contract import field_of
from ppfl.algorithms.finetune import network_of_each
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from support import make_federation, make_net

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
    "ditto-some": (Ditto(**SMALL, participation=0.3), {"k": 1}),
    "pfedme": (PFedMe(lr=0.05, batch_size=4), {"k": 1}),
    "ppfl-weights": (PPFL(**SMALL), {"k": 3, "mix": "weights"}),
    "ppfl-last-layer": (PPFL(**SMALL, participation=0.5), {"k": 3, "canonical": "2"}),
    "ppfl-first-layer": (PPFL(**SMALL), {"k": 3, "canonical": "0"}),
    "ppfl-convolutions": (PPFL(**SMALL), {"k": 3, "canonical": "4", "net": CONVOLVES.double()}),
}


def run(method, rounds, net=NET, engine="stacked", **population):
    return fit(Population(net, **population), FEDERATION, method, rounds=rounds, engine=engine, seed=SEED)


@pytest.fixture(params=INNER)
def inner(request):
    return INNER[request.param]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_no_steps_are_the_inner_method(inner, engine: str) -> None:
    method, population = inner
    tuned = run(FineTune(method=method, steps=0), ROUNDS + 1, engine=engine, **population)
    alone = run(method, ROUNDS, engine=engine, **population)
    found, expected = tuned.evaluate(FEDERATION, "train"), alone.evaluate(FEDERATION, "train")
    torch.testing.assert_close(found.loss, expected.loss, **TIGHT)
    for client in FEDERATION.ids:
        x = FEDERATION.client(client)["train"].x
        torch.testing.assert_close(tuned.predict(client, x), alone.predict(client, x), **TIGHT)


def test_training_is_the_inner_methods(inner) -> None:
    """Whatever is tuned at the end, the shared state is that of the inner method by itself."""
    method, population = inner
    tuned, alone = run(FineTune(method=method), ROUNDS + 1, **population), run(method, ROUNDS, **population)
    found, expected = map(pytree.tree_leaves, (tuned.state.server.inner, alone.state.server))
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert tuned.history[-1]["bytes_up"] == 0
    assert tuned.history[-1]["participants"] == FEDERATION.n_clients


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("work", [{"steps": 5}, {"epochs": 2, "lr": 0.05}, {}], ids=["steps", "epochs", "one-epoch"])
def test_each_client_takes_sgd_steps_from_the_model_of_fedavg(engine: str, work: dict) -> None:
    method = FedAvg(**SMALL)
    fitted = run(FineTune(method=method, **work), ROUNDS + 1, engine=engine, k=1)
    start = naive.fedavg(FEDERATION, NET, method, ROUNDS, SEED, lambda t: factor("step", t, ROUNDS))
    settings = FedAvg(**SMALL, local_steps=work.get("steps"), local_epochs=work.get("epochs"))
    twins = naive_prox.finetuned(FEDERATION, lambda i: start, settings, work.get("lr", 0.2), SEED, ROUNDS)
    for i, twin in enumerate(twins):
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(fitted.personal.shared.canonical[name][i, 0], expected.detach(), **TIGHT)


def test_each_client_takes_sgd_steps_from_its_mixed_network() -> None:
    method = PPFL(**SMALL, penalty=0.02)
    fitted = run(FineTune(method=method, steps=4), ROUNDS + 1, k=3, mix="weights")
    alone = run(method, ROUNDS, k=3, mix="weights")

    def mixed(i):
        network = make_net(dtype=torch.float64)
        thetas = alone.state.server.shared.canonical
        network.load_state_dict({name: torch.tensordot(alone.memberships[i], thetas[name], 1) for name in thetas})
        return network

    twins = naive_prox.finetuned(FEDERATION, mixed, FedAvg(**SMALL, local_steps=4), 0.2, SEED, ROUNDS)
    for i, twin in enumerate(twins):
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(fitted.personal.shared.canonical[name][i, 0], expected.detach(), **TIGHT)


def test_steps_of_their_own_fit_clients_better() -> None:
    watch = Watch(objective=True)
    method = FineTune(method=FedAvg(lr=0.1, batch_size=None), epochs=20)
    history = fit(Population(NET, k=1), FEDERATION, method, rounds=10, watch=watch).history
    assert history[-1]["objective"] < history[-2]["objective"]


def test_personal_models_are_the_inner_methods_until_the_last_round() -> None:
    method = FineTune(method=PPFL(**SMALL), steps=1)
    problem = pose(Population(NET, k=3, mix="weights"), FEDERATION, None, 3, SEED)
    kinds = [
        (personal.own, personal.memberships is None)
        for state, _ in train(method, problem, FEDERATION, engine_by_name("stacked"), begin(method, problem))
        for personal in [method.personal(state.server, state.clients)]
    ]
    assert kinds == [(False, False), (False, False), (True, True)]


def test_a_client_lost_in_the_last_round_keeps_the_inner_methods_model(inner) -> None:
    method, population = inner
    tuned = FineTune(method=method, steps=2)
    problem = pose(Population(**{"net": NET, **population}), FEDERATION, None, ROUNDS + 1, SEED, dropout=0.5)
    *_, (before, _), (after, report) = train(
        tuned, problem, FEDERATION, engine_by_name("stacked"), begin(tuned, problem)
    )
    assert 0 < report.participants < FEDERATION.n_clients
    back = returning(problem, tuned.plan(problem, before.server, ROUNDS), ROUNDS).who.tolist()
    losses = [client_losses(problem, tuned.personal(s.server, s.clients), FEDERATION) for s in (before, after)]
    for i in range(FEDERATION.n_clients):
        assert torch.allclose(losses[0][i], losses[1][i], **TIGHT) == (i not in back)


def test_own_models_that_are_mixed_become_one_network_each() -> None:
    g = torch.Generator().manual_seed(0)
    models = Shared({"a": torch.randn(2, 4, generator=g)}, {"b": torch.randn(2, 3, 5, generator=g)})
    c = torch.rand(2, 3, generator=g)
    networks = network_of_each(Personal(models, c, own=True), 2, None)
    torch.testing.assert_close(networks.canonical["b"], torch.stack([c[i] @ models.canonical["b"][i] for i in (0, 1)]))
    assert networks.common["a"].equal(models.common["a"])


def test_rows_of_clients_are_found_in_the_inner_state() -> None:
    method = FineTune(method=PPFL(**SMALL))
    problem = pose(Population(NET, k=3, mix="weights"), FEDERATION, None, 3, SEED)
    server = begin(method, problem).server
    assert [field_of(server, name) is server.inner.memberships for name in method.by_client] == [True]


def test_a_step_left_open_is_found_for_the_inner_method() -> None:
    engine = engine_by_name("stacked")
    problem = pose(Population(NET, k=1), FEDERATION, None, 10, SEED)
    alone = with_chosen_lr(FedAvg(batch_size=4), problem, FEDERATION, engine)
    method = with_chosen_lr(FineTune(method=FedAvg(batch_size=4), steps=1), problem, FEDERATION, engine)
    assert method == FineTune(method=alone, steps=1)
    assert method.plan(problem, begin(method, problem).server, 9).task.lr == alone.lr


def test_what_is_not_one_network_a_client_is_refused() -> None:
    for mix in ("outputs", "predictions"):
        with pytest.raises(SettingError, match="one network a client.*set mix = 'weights'"):
            run(FineTune(method=PPFL(**SMALL)), 3, k=3, mix=mix)
    with pytest.raises(SettingError, match="set k = 1"):
        run(FineTune(method=FedAvg(**SMALL)), 3, k=3, mix="weights")
    with pytest.raises(SettingError, match="rounds >= 2"):
        run(FineTune(method=FedAvg(**SMALL)), 1, k=1)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="keep one of them"):
        FineTune(steps=1, epochs=1)
    with pytest.raises(ValidationError, match="finetune"):
        FineTune(method=FineTune())
