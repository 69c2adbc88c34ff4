"""What must hold of FedEM whatever the numbers are."""

import itertools

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import losses_of_clients, positions_of, run
from ppfl.algorithms import FedEM
from ppfl.core.backends import Batch
from ppfl.core.errors import SettingError
from ppfl.core.population import Population

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
NET = make_net(dtype=torch.float64)
SMALL = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
STILL = {"lr": 1e-12, "weight_decay": 0.0, "batch_size": None}  # models that do not move


def trained(method, rounds, mix="predictions"):
    return run(method, Population(NET, k=3, mix=mix), FEDERATION, rounds=rounds, engine="stacked")


@pytest.fixture(scope="module")
def mixture_weights_alone():
    return trained(FedEM(**STILL), 120)


def test_em_never_raises_a_clients_loss_while_models_stay(mixture_weights_alone) -> None:
    found = mixture_weights_alone
    losses = [losses_of_clients(found, at) for at in range(21)]
    for before, after in itertools.pairwise(losses):
        assert bool((after <= before + 1e-10).all())
    assert bool((losses[-1] < losses[0]).all())
    sizes = FEDERATION.train.sizes.double()
    pooled = [float(loss @ sizes / sizes.sum()) for loss in losses]
    for (before, after), report in zip(itertools.pairwise(pooled), found.reports, strict=False):
        assert after - 1e-9 <= report.loss <= before + 1e-9  # the bound lies between: it touches f at the start


def test_em_ends_where_the_mixture_weights_are_optimal(mixture_weights_alone) -> None:
    """-log sum_k pi_k p_k is convex in pi: the Frank-Wolfe gap bounds what is left to gain."""
    found = mixture_weights_alone
    backend = found.transport.sites[0].backend
    for i, pi in enumerate(found.memberships):
        own = FEDERATION.train.client(i)
        even = torch.full_like(own.x[None, :, 0], 1 / len(own))
        batch = Batch(own.x[None], own.y[None], even, torch.tensor([len(own)]), torch.arange(len(own))[None], None)
        slope, _ = backend.membership_gradients(found.server.shared, pi[None], batch)
        assert float(pi @ slope[0] - slope.min()) < 2e-2


def test_mixture_weights_are_shares_and_stay_with_absent_clients() -> None:
    method = FedEM(**SMALL, participation=0.5)
    found = trained(method, 4)
    for round in range(4):
        before, after = (found.client_tree(at).membership for at in (round, round + 1))
        absent = [i for i in range(6) if i not in positions_of(found.problem, method, round)]
        assert after[absent].equal(before[absent]) and not after.equal(before)
        torch.testing.assert_close(after.sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_it_asks_for_mixed_predictions(mix: str) -> None:
    with pytest.raises(SettingError, match='set mix = "predictions"'):
        trained(FedEM(**SMALL), 1, mix)
