"""What must hold of IFCA whatever the numbers are."""

import pytest
import torch
from torch import nn

from kit.problems import make_contradicting_federation, make_federation, make_linear, make_net
from kit.training import at_start, positions_of, run
from ppfl.algorithms import IFCA, PPFL, FedAvg
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.simplex import harden

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
NET = make_net(dtype=torch.float64)
SMALL = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}


def trained(method, population, federation=FEDERATION, rounds=4, models=None):
    """A run, from given models if any."""
    start = None if models is None else at_start(method, population, federation, rounds=rounds, models=models)
    return run(method, population, federation, rounds=rounds, engine="stacked", resume=start)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_every_client_chooses_the_model_with_the_least_loss_on_its_training_data(participation: float) -> None:
    method = IFCA(**SMALL, participation=participation)
    found = trained(method, Population(NET, k=3))
    for round in range(4):
        models = found.states[round].server.shared
        for i in positions_of(found.problem, method, round):
            own = FEDERATION.train.client(i)
            losses = []
            for k in range(3):
                output = torch.func.functional_call(NET, {name: theta[k] for name, theta in models.items()}, (own.x,))
                losses.append(float(nn.functional.cross_entropy(output, own.y)))
            chosen = found.client_tree(round + 1).membership[i]
            assert chosen.tolist() == [float(k == losses.index(min(losses))) for k in range(3)]


def test_it_is_fedavg_within_its_clusters_and_leaves_the_others_alone() -> None:
    population = Population(NET, k=3)
    one_hopeless = {
        name: torch.cat([theta[:2], 1000 * theta[2:]])
        for name, theta in population.initial_models(0, distinct=True).items()
    }
    found = trained(IFCA(**SMALL), population, rounds=1, models=one_hopeless)
    choice, after = found.client_tree().membership.argmax(1), found.server.shared
    assert set(choice.tolist()) == {0, 1}
    for name, theta in one_hopeless.items():
        assert after[name][2].equal(theta[2])
    for k in (0, 1):
        cluster = FEDERATION.select([client for client, of in zip(FEDERATION.ids, choice, strict=True) if of == k])
        own = {name: theta[k] for name, theta in one_hopeless.items()}
        alone = trained(FedAvg(**SMALL), Population(NET, k=1), cluster, rounds=1, models=own)
        for name, expected in alone.server.shared.items():
            torch.testing.assert_close(after[name][k], expected)


@pytest.mark.parametrize("k", [1, 4])
def test_a_client_uploads_one_model_and_k_numbers(k: int) -> None:
    net = make_net()
    found = trained(IFCA(lr=0.1), Population(net, k=k), make_federation(), rounds=1)
    assert found.reports[0].bytes_up == 4 * 4 * (sum(p.numel() for p in net.parameters()) + k)


def test_more_clusters_than_clients_are_refused() -> None:
    with pytest.raises(SettingError, match="k <= 6"):
        trained(IFCA(**SMALL), Population(NET, k=7))


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_it_chooses_what_ppfl_comes_to_where_one_model_is_right_about_every_sample(mix: str) -> None:
    """Section O3.1: memberships then move to corners, and the max rule finds the model with the least loss."""
    federation = make_contradicting_federation()
    population = Population(make_linear(classes=2, dtype=torch.float64), k=2, mix=mix)
    models = {name: torch.zeros_like(theta) for name, theta in population.initial_models(0).items()}
    models["weight"][:, 1, 0] = torch.tensor([3.0, -3.0])  # the first column decides, for label 1 and against it
    chosen = trained(IFCA(lr=1e-12, batch_size=None), population, federation, rounds=1, models=models)
    still = PPFL(lr=1e-12, batch_size=None, start="uniform", membership_steps=100, membership_lr=1.0, warmup=0)
    moved = trained(still, population, federation, rounds=3, models=models).memberships
    assert float(moved.amax(1).min()) > 0.99
    assert harden(moved).equal(chosen.client_tree().membership)
    assert moved.argmax(1).tolist() == [0, 1, 0, 0, 1]
