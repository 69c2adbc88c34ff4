"""FedAvgM, FedAdagrad, FedAdam and FedYogi: their pseudocode, torch's optimizers, and their limits."""

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import assert_same, positions_of, run
from kit.twins import one_model as naive_one_model
from ppfl.algorithms import (
    IFCA,
    PPFL,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedEM,
    FedPer,
    FedYogi,
    PFedMe,
    Rows,
    Total,
)
from ppfl.algorithms.server_optimizers import Adagrad, Adam, Momentum, Yogi
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
SOME = {"participation": 0.5, "local_epochs": 2}
METHODS = [FedAvgM, FedAdagrad, FedAdam, FedYogi]


def trained(method, engine="stacked"):
    return run(method, Population(NET, k=1), FEDERATION, rounds=ROUNDS, seed=SEED, engine=engine)


def twin(naive, found, *more):
    method, problem = found.method, found.problem
    step_size, clients = lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(problem, method, t)
    return naive(FEDERATION, NET, method, ROUNDS, SEED, step_size, clients, *more)


def assert_is(values, expected) -> None:
    for (name, _), value in zip(NET.named_parameters(), expected, strict=True):
        torch.testing.assert_close(values[name], value, **TIGHT)


def merged(method, server, change: float):
    """The next server state where every parameter of every client changed by the same number."""
    total = Total(torch.ones(1), {name: torch.full_like(leaf, change)[None] for name, leaf in server.shared.items()})
    return method.merge(None, server, None, {"change": total}, Rows((), {}))


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
@pytest.mark.parametrize(
    ("settings", "engine"),
    [({"server_lr": 0.1}, "loop"), ({**SOME, "beta1": 0.5, "tau": 0.05}, "stacked")],
    ids=["everyone", "some-clients"],
)
def test_adaptive_methods_are_their_pseudocode(kind, settings: dict, engine: str) -> None:
    found = trained(kind(**SMALL, **settings), engine)
    x, m, v = twin(naive_one_model.fedopt, found)
    assert_is(found.server.shared, x)
    assert_is(found.server.optimizer.first_moment, m)
    assert_is(found.server.optimizer.second_moment, v)


@pytest.mark.parametrize("settings", [{}, {**SOME, "server_lr": 0.3, "server_momentum": 0.5}], ids=["all", "some"])
def test_fedavgm_is_torchs_sgd_with_momentum_on_the_pseudo_gradient(settings: dict) -> None:
    method = FedAvgM(**SMALL, **settings)
    found = trained(method)

    def optimizer_of(x):
        return torch.optim.SGD(x, lr=method.server_lr, momentum=method.server_momentum)

    assert_is(found.server.shared, twin(naive_one_model.fedopt_by_torch, found, optimizer_of))


def test_fedadagrad_is_torchs_adagrad_on_the_pseudo_gradient() -> None:
    method = FedAdagrad(**SMALL, server_lr=0.1, tau=0.01)
    found = trained(method)

    def optimizer_of(x):
        return torch.optim.Adagrad(x, lr=0.1, eps=method.tau, initial_accumulator_value=method.tau**2)

    assert_is(found.server.shared, twin(naive_one_model.fedopt_by_torch, found, optimizer_of))


def test_server_lr_1_without_momentum_is_fedavg_to_the_bit() -> None:
    settings = {**SMALL, **SOME}
    for dtype in (torch.float32, torch.float64):
        federation, net = make_federation(dtype=dtype), make_net(dtype=dtype)
        one, plain = (
            run(method, Population(net, k=1), federation, engine="stacked")
            for method in (FedAvgM(**settings, server_momentum=0, server_lr=1), FedAvg(**settings))
        )
        assert_same(one.server.shared, plain.server.shared, atol=0, rtol=0)


@pytest.mark.parametrize("kind", METHODS)
def test_no_change_leaves_the_model_until_there_was_one(kind) -> None:
    method = kind(**SMALL)
    start = trained(method).states[0].server
    still = merged(method, merged(method, start, 0.0), 0.0)
    assert_same(still.shared, start.shared, atol=0, rtol=0)
    moving = merged(method, merged(method, start, 0.1), 0.0)
    coasts = kind is not FedAdagrad  # momentum goes on, and it has none by default
    for name, leaf in moving.shared.items():
        assert bool((leaf != merged(method, start, 0.1).shared[name]).all()) == coasts


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_with_a_large_tau_an_adaptive_method_is_fedavg_with_a_server_step(kind) -> None:
    """m / (sqrt(v) + tau) is d / (2 tau) where v stays near tau^2."""
    tau = 1e4
    adaptive = kind(**SMALL, server_lr=2 * tau, tau=tau, beta1=0, **({} if kind is FedAdagrad else {"beta2": 1 - 1e-9}))
    assert_same(trained(adaptive).server.shared, trained(FedAvg(**SMALL)).server.shared, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_steps_of_adam_do_not_depend_on_the_size_of_changes(scale: float) -> None:
    method = FedAdam(server_lr=0.1, beta1=0, beta2=0, tau=1e-12)
    start = trained(FedAdam(**SMALL)).states[0].server
    for name, leaf in merged(method, start, -scale).shared.items():
        torch.testing.assert_close(leaf, start.shared[name] - 0.1)


def test_the_second_moment_of_yogi_falls_more_slowly_than_that_of_adam_and_rises_alike() -> None:
    adam, yogi = Adam(), Yogi()
    v, small, large = torch.tensor(1.0), torch.tensor(1e-4), torch.tensor(1e4)
    assert adam.next_second_moment(v, small) < yogi.next_second_moment(v, small) < v
    assert v < adam.next_second_moment(v, large) < yogi.next_second_moment(v, large)
    assert yogi.next_second_moment(v, v) == v


# ---------------------------------------------------------------------- as a setting of other methods

SAME = {  # the optimizers, and FedAvg's variants with the same settings
    "momentum": (Momentum(lr=0.5, momentum=0.7), FedAvgM(**SMALL, server_lr=0.5, server_momentum=0.7)),
    "adagrad": (Adagrad(lr=0.1, tau=0.01), FedAdagrad(**SMALL, server_lr=0.1, tau=0.01)),
    "adam": (Adam(lr=0.1, beta1=0.5), FedAdam(**SMALL, server_lr=0.1, beta1=0.5)),
    "yogi": (Yogi(lr=0.1, beta2=0.9), FedYogi(**SMALL, server_lr=0.1, beta2=0.9)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_setting_of_fedavg_is_the_method_of_that_name_to_the_bit(name: str) -> None:
    optimizer, method = SAME[name]
    one, other = trained(FedAvg(**SMALL, server_optimizer=optimizer)), trained(method)
    assert_same(one.server, other.server, atol=0, rtol=0)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("settings", [{}, {"averaging": "everyone", "collapse": False}], ids=["members", "everyone"])
def test_ppfl_with_one_model_and_an_optimizer_is_fedavg_with_it(name: str, settings: dict) -> None:
    optimizer, method = SAME[name]
    one, other = trained(PPFL(**SMALL, warmup=0, **settings, server_optimizer=optimizer)), trained(method)
    assert_same({n: v[0] for n, v in one.server.shared.items()}, other.server.shared, atol=1e-9, rtol=1e-9)


OTHERS = {
    "ppfl": (PPFL(**SMALL, warmup=0), 3, "weights"),
    "ppfl-random": (PPFL(**SMALL, order="random", participation=0.5), 2, "predictions"),
    "ditto": (Ditto(**SMALL), 1, "outputs"),
    "pfedme": (PFedMe(**SMALL, mu=1.0, outer_lr=0.2, beta=1.5), 1, "outputs"),
    "fedper": (FedPer(**SMALL), 1, "outputs"),
    "ifca": (IFCA(**SMALL), 2, "outputs"),
    "fedem": (FedEM(**SMALL), 2, "predictions"),
}
TORCH = {
    "momentum": (Momentum(lr=0.5, momentum=0.7), lambda x: torch.optim.SGD(x, lr=0.5, momentum=0.7)),
    "adagrad": (
        Adagrad(lr=0.1, tau=0.01),
        lambda x: torch.optim.Adagrad(x, lr=0.1, eps=0.01, initial_accumulator_value=1e-4),
    ),
}


def plain_change(found, at: int, method):
    """What a round without an optimizer does to the models, from where this run was; None where it leaves them."""
    state = found.states[at]
    plain = state._replace(server=state.server._replace(optimizer={}))
    start = found._replace(states=[plain], clients=[found.clients[at]])
    settings = {"rounds": ROUNDS, "seed": SEED, "until": at + 1}
    after = run(method, found.problem.population, FEDERATION, resume=start, **settings).server.shared
    change = {name: leaf - state.server.shared[name] for name, leaf in after.items()}
    return change if any(bool(leaf.any()) for leaf in change.values()) else None


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", TORCH)
def test_every_round_is_a_step_of_torchs_optimizer_along_the_mean_change(name: str, kind: str) -> None:
    method, k, mix = OTHERS[name]
    optimizer, of_torch = TORCH[kind]
    population, optimized = Population(NET, k=k, mix=mix), method.model_copy(update={"server_optimizer": optimizer})
    found = run(optimized, population, FEDERATION, rounds=ROUNDS, seed=SEED)
    x = {n: leaf.clone() for n, leaf in found.states[0].server.shared.items()}
    torchs, steps = of_torch(list(x.values())), 0
    for at in range(ROUNDS):
        change = plain_change(found, at, method)
        if change is not None:  # a survey, or memberships alone, is no step, not even of momentum
            for n, leaf in x.items():
                leaf.grad = -change[n]
            torchs.step()
            steps += 1
        assert_same(found.states[at + 1].server.shared, x, atol=1e-9, rtol=1e-9)
    assert 2 < steps <= ROUNDS
    assert (steps < ROUNDS) == name.startswith("ppfl")
