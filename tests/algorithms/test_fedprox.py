"""FedProx: its pseudocode, its limits, and the closed form for quadratic losses."""

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import assert_same, positions_of, run
from kit.twins import one_model as naive_one_model
from kit.twins.quadratics import linear_population, proximal_point, regression, start_of
from ppfl.algorithms import FedAvg, FedProx
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}


@pytest.mark.parametrize(
    ("settings", "engine"),
    [({"mu": 0.5}, "loop"), ({"mu": 2.0, "participation": 0.5, "local_epochs": 3}, "stacked")],
    ids=["everyone", "some-clients"],
)
def test_fedprox_is_its_pseudocode(settings: dict, engine: str) -> None:
    method = FedProx(**SMALL, **settings)
    found = run(method, Population(NET, k=1), FEDERATION, rounds=ROUNDS, seed=SEED, engine=engine)
    twin = naive_one_model.fedprox(
        FEDERATION, NET, method, ROUNDS, SEED,
        lambda t: method.step_size(t, ROUNDS), lambda t: positions_of(found.problem, method, t),
    )  # fmt: skip
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(found.server.shared[name], expected.detach(), atol=1e-9, rtol=1e-9)


def test_without_a_proximal_term_it_is_fedavg_to_the_bit() -> None:
    settings = {**SMALL, "participation": 0.5, "local_epochs": 2}
    prox, plain = (
        run(method, Population(NET, k=1), FEDERATION, engine="stacked")
        for method in (FedProx(**settings, mu=0), FedAvg(**settings))
    )
    assert_same(prox.server, plain.server, atol=0, rtol=0)


@pytest.mark.parametrize("mu", [0.1, 15.0])
def test_many_local_steps_on_quadratics_lead_to_the_mean_of_the_proximal_points(mu: float) -> None:
    federation, population = regression(), linear_population()
    w = start_of(population)
    method = FedProx(mu=mu, lr=0.05, batch_size=None, local_steps=400)
    found = run(method, population, federation, rounds=1, engine="stacked")
    each = [federation.train.client(i) for i in range(3)]
    points = torch.stack([proximal_point(own.x, own.y, w, mu) for own in each])
    torch.testing.assert_close(found.server.shared["weight"][0], federation.weights.double() @ points)
