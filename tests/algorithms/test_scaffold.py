"""SCAFFOLD: its pseudocode, what its control variates are, and that they undo the drift of clients."""

import pytest
import torch
from pydantic import ValidationError

from kit.problems import make_federation, make_net
from kit.training import assert_same, positions_of, run
from kit.twins import one_model as naive_one_model
from kit.twins.ppfl import weights_of
from kit.twins.quadratics import linear_population, pooled_optimum, regression
from ppfl.algorithms import FedAvg, Scaffold
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}


def trained(method, engine="stacked", rounds=ROUNDS, **settings):
    return run(method, Population(NET, k=1), FEDERATION, rounds=rounds, seed=SEED, engine=engine, **settings)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "loop"),
        ({"participation": 0.5, "local_epochs": 2}, "stacked"),
        ({"server_lr": 0.5, "batch_size": None, "local_steps": 3}, "stacked"),
    ],
    ids=["everyone", "some-clients", "server-step"],
)
def test_scaffold_is_its_pseudocode(settings: dict, engine: str) -> None:
    method = Scaffold(**{**SMALL, **settings})
    found = trained(method, engine)
    x, c, c_i = naive_one_model.scaffold(
        FEDERATION, NET, method, ROUNDS, SEED,
        lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(found.problem, method, t),
    )  # fmt: skip
    own = found.client_tree()
    for at, (name, _) in enumerate(NET.named_parameters()):
        torch.testing.assert_close(found.server.shared["model"][name], x[at], **TIGHT)
        torch.testing.assert_close(found.server.shared["control"][name], c[at], **TIGHT)
        torch.testing.assert_close(own[name], torch.stack([one[at] for one in c_i]), **TIGHT)


@pytest.mark.parametrize(
    ("participation", "dropout"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.4)], ids=["everyone", "some", "lost"]
)
def test_c_is_the_weighted_mean_of_the_c_i_after_every_round(participation: float, dropout: float) -> None:
    found = trained(Scaffold(**SMALL, participation=participation), dropout=dropout)
    p = weights_of(FEDERATION)
    for at in range(ROUNDS + 1):
        own = found.client_tree(at)
        for name, c in found.states[at].server.shared["control"].items():
            torch.testing.assert_close(c, torch.tensordot(p, own[name], 1), atol=1e-12, rtol=0)
            assert at < 2 or bool(c.any())


def test_the_first_round_is_fedavgs_since_there_is_nothing_to_correct_yet() -> None:
    corrected, plain = trained(Scaffold(**SMALL), rounds=1), trained(FedAvg(**SMALL, momentum=0), rounds=1)
    assert_same(corrected.server.shared["model"], plain.server.shared, atol=1e-15, rtol=1e-12)


def test_with_one_local_step_and_everyone_it_is_fedavg() -> None:
    """c_i is then the last gradient of f_i and c that of the sum: the corrections sum to 0 over clients."""
    settings = {"lr": 0.1, "batch_size": None, "local_steps": 1, "momentum": 0}
    corrected, plain = (
        run(method, linear_population(), regression(), rounds=ROUNDS)
        for method in (Scaffold(**settings), FedAvg(**settings))
    )
    assert_same(corrected.server.shared["model"], plain.server.shared, **TIGHT)


def test_several_local_steps_reach_the_optimum_of_the_sum_where_those_of_fedavg_do_not() -> None:
    """Quadratic losses and full gradients, clients that disagree; at the end c_i is the gradient of f_i there."""
    federation = regression()
    best = pooled_optimum(federation)
    settings = {"lr": 0.1, "batch_size": None, "local_steps": 5, "momentum": 0, "schedule": "constant"}
    corrected, plain = (
        run(method, linear_population(), federation, rounds=150, engine="stacked")
        for method in (Scaffold(**settings), FedAvg(**settings))
    )
    assert float((corrected.server.shared["model"]["weight"][0] - best).norm()) < 1e-8
    assert float((plain.server.shared["weight"][0] - best).norm()) > 0.01
    for i, c_i in enumerate(corrected.client_tree()["weight"][:, 0]):
        own = federation.train.client(i)
        torch.testing.assert_close(c_i, own.x.T @ (own.x @ best - own.y) / len(own), atol=1e-7, rtol=0)


def test_momentum_is_refused() -> None:
    with pytest.raises(ValidationError, match="momentum"):
        Scaffold(momentum=0.9)
