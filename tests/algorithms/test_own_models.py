"""Ditto and pFedMe, where every client has a model beside the shared one: their pseudocode, their limits, and closed
forms where there are any."""

import pytest
import torch
from pydantic import ValidationError

from kit.problems import make_federation, make_linear, make_net
from kit.training import assert_same, networks_of_clients, positions_of, run
from kit.twins import own_models as naive_own_models
from kit.twins.quadratics import linear_population, proximal_point, regression, start_of
from ppfl.algorithms import Ditto, FedAvg, Local, PFedMe
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}


def trained(method, engine="stacked", rounds=ROUNDS, net=NET):
    return run(method, Population(net, k=1), FEDERATION, rounds=rounds, engine=engine, seed=SEED)


def assert_is_network(values, net) -> None:
    for name, expected in net.named_parameters():
        torch.testing.assert_close(values[name], expected.detach(), **TIGHT)


@pytest.mark.parametrize(
    ("method", "twin", "engine"),
    [
        (Ditto(**SMALL), naive_own_models.ditto, "loop"),
        (Ditto(**SMALL, mu=0.3, local_epochs=2, participation=0.5), naive_own_models.ditto, "stacked"),
        (PFedMe(**{**SMALL, "lr": 0.05}), naive_own_models.pfedme, "loop"),
        (
            PFedMe(**SMALL, mu=1.0, outer_lr=0.3, beta=1.5, inner_steps=3, participation=0.5),
            naive_own_models.pfedme,
            "stacked",
        ),
        (PFedMe(**SMALL, mu=2.0, outer_lr=0.1, momentum=0.9, local_steps=4), naive_own_models.pfedme, "stacked"),
    ],
    ids=["ditto", "ditto-some-clients", "pfedme", "pfedme-some-clients", "pfedme-momentum"],
)
def test_methods_with_own_models_are_their_pseudocode(method, twin, engine: str) -> None:
    found = trained(method, engine)
    w, models = twin(
        FEDERATION, NET, method, ROUNDS, SEED,
        lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(found.problem, method, t),
    )  # fmt: skip
    assert_is_network(found.server.shared, w)
    for i, mine in enumerate(networks_of_clients(found)):
        assert_is_network(mine, models.get(i, w))


@pytest.mark.parametrize("method", [Ditto(**SMALL, participation=0.25), PFedMe(lr=0.05, participation=0.25)])
def test_a_client_that_never_took_part_predicts_with_the_shared_model(method) -> None:
    found = trained(method, rounds=1)
    (busy,) = positions_of(found.problem, method, 0)
    for i, mine in enumerate(networks_of_clients(found)):
        assert all(mine[name].equal(value) for name, value in found.server.shared.items()) == (i != busy)


# ---------------------------------------------------------------------- limits


def test_ditto_without_a_pull_is_local() -> None:
    ditto, local = trained(Ditto(**SMALL, mu=0)), trained(Local(**SMALL))
    assert_same(networks_of_clients(ditto), networks_of_clients(local), atol=0, rtol=0)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_dittos_shared_model_is_that_of_fedavg(mu: float) -> None:
    settings = {**SMALL, "participation": 0.5}
    assert_same(trained(Ditto(**settings, mu=mu)).server, trained(FedAvg(**settings)).server, atol=0, rtol=0)


@pytest.mark.parametrize("mu", [1e1, 1e5])
@pytest.mark.parametrize("method", [Ditto, PFedMe])
def test_a_strong_pull_leaves_own_models_within_a_gradient_of_the_shared_one(method, mu: float) -> None:
    """With lr = 1 / mu every step ends at w - g / mu, and cross-entropy's slopes are at most sqrt(2) long."""
    settings = {"lr": 1 / mu, "mu": mu, "momentum": 0.0, "batch_size": 4, "schedule": "constant"}
    settings |= {"outer_lr": 1e-12} if method is PFedMe else {}  # so that w_i stands still
    found = trained(method(**settings), rounds=3, net=make_linear(dtype=torch.float64))
    received = found.states[-2].server.shared
    longest = (FEDERATION.train.x.square().sum(1) + 1).sqrt().max()
    for mine in networks_of_clients(found):
        distance = sum((mine[name] - value).square().sum() for name, value in received.items()).sqrt()
        assert 0 < distance <= 2**0.5 * longest / mu + 1e-8


def test_beta_is_how_far_the_server_goes() -> None:
    settings = {"lr": 0.05, "mu": 5.0, "outer_lr": 0.1, "batch_size": 4}
    start = Population(NET, k=1).initial_network()
    whole, half = (trained(PFedMe(**settings, beta=beta), rounds=1).server.shared for beta in (1.0, 0.5))
    for name, value in start.items():
        torch.testing.assert_close(half[name], (value + whole[name]) / 2)


# ---------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("mu", [0.1, 15.0])
@pytest.mark.parametrize("kind", ["ditto", "pfedme"])
def test_many_steps_on_a_quadratic_reach_the_proximal_point(kind: str, mu: float) -> None:
    federation, population = regression(), linear_population()
    w, many = start_of(population), {"mu": mu, "lr": 0.05, "momentum": 0.9, "batch_size": None}
    if kind == "ditto":
        method = Ditto(**many, local_steps=400)
    else:
        method = PFedMe(**many, local_steps=1, inner_steps=400, outer_lr=0.3 / mu)
    found = run(method, population, federation, rounds=1, engine="stacked")
    each = [federation.train.client(i) for i in range(3)]
    points = torch.stack([proximal_point(own.x, own.y, w, mu) for own in each])
    torch.testing.assert_close(torch.stack([mine["weight"][0] for mine in networks_of_clients(found)]), points)
    if kind == "pfedme":  # a step along the gradient of the envelope, mu (w - prox)
        expected = w - 0.3 * (w - federation.weights.double() @ points)
        torch.testing.assert_close(found.server.shared["weight"][0], expected)


def test_outer_steps_that_would_lead_away_are_refused() -> None:
    with pytest.raises(ValidationError, match="keep it below 2"):
        PFedMe(mu=30, outer_lr=0.1)
