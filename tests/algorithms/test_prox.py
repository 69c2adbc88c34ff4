"""Ditto, pFedMe and centralized SGD: their pseudocode, their limits, and closed forms where there are any."""

import pytest
import torch
from ppfl.algorithms.schedules import factor
from ppfl.engines import fit, pose
from pydantic import ValidationError
from torch import nn

from algorithms import naive_prox
from ppfl.algorithms import Centralized, Ditto, FedAvg, Local, PFedMe
from ppfl.algorithms.contract import participants
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import Federation
from support import make_federation, make_linear, make_net

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
ROUNDS, SEED = 6, 3
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}


def lr_factor(t: int) -> float:
    return factor("step", t, ROUNDS)


def run(method, engine="stacked", rounds=ROUNDS, net=NET, federation=FEDERATION, **settings):
    return fit(Population(net, k=1, **settings), federation, method, rounds=rounds, engine=engine, seed=SEED)


def who_of(method):
    problem = pose(Population(NET, k=1), FEDERATION, None, ROUNDS, SEED)
    return lambda t: participants(problem, method.participation, t).tolist()


def assert_is(shared, network, **tolerance) -> None:
    """That the leaves (1, ...) of a model are a network's."""
    for name, expected in network.named_parameters():
        torch.testing.assert_close(shared.by_name()[name][0], expected.detach(), **(tolerance or TIGHT))


def own(fitted, i):
    """The model that a client predicts with."""
    assert fitted.personal.own
    return fitted.personal.shared.map(lambda leaf: leaf[i])


def assert_equal(one, other) -> None:
    for a, b in zip(one.leaves(), other.leaves(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


# ---------------------------------------------------------------------- twins


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    "settings", [{}, {"batch_size": None}, {"momentum": 0.0}, {"participation": 0.5}], ids=lambda s: " ".join(s)
)
def test_centralized_is_sgd_on_the_pooled_weighted_loss(engine: str, settings: dict) -> None:
    method = Centralized(**{**SMALL, **settings})
    fitted = run(method, engine)
    twin = naive_prox.centralized(FEDERATION, NET, method, ROUNDS, SEED, lr_factor, who_of(method))
    assert_is(fitted.personal.shared, twin)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("method", "twin"),
    [
        (Ditto(**SMALL), naive_prox.ditto),
        (Ditto(**SMALL, mu=0.3, local_epochs=2, participation=0.5), naive_prox.ditto),
        (PFedMe(**{**SMALL, "lr": 0.05}), naive_prox.pfedme),
        (PFedMe(**SMALL, mu=1.0, outer_lr=0.3, beta=1.5, inner_steps=3, participation=0.5), naive_prox.pfedme),
        (PFedMe(**SMALL, mu=2.0, outer_lr=0.1, momentum=0.9, local_steps=4), naive_prox.pfedme),
    ],
    ids=["ditto", "ditto-some", "pfedme", "pfedme-some", "pfedme-momentum"],
)
def test_methods_with_a_model_a_client_are_their_pseudocode(engine: str, method, twin) -> None:
    fitted = run(method, engine)
    w, models = twin(FEDERATION, NET, method, ROUNDS, SEED, lr_factor, who_of(method))
    assert_is(fitted.state.server.shared, w)
    for i in range(FEDERATION.n_clients):
        assert_is(own(fitted, i), models.get(i, w))


def test_who_never_took_part_predicts_with_the_shared_model() -> None:
    for method in (Ditto(**SMALL, participation=0.25), PFedMe(lr=0.05, participation=0.25)):
        fitted = run(method, rounds=1)
        (busy,) = who_of(method)(0)
        for i in range(FEDERATION.n_clients):
            pairs = zip(own(fitted, i).leaves(), fitted.state.server.shared.leaves(), strict=True)
            assert all(mine.equal(shared) for mine, shared in pairs) == (i != busy)


# ---------------------------------------------------------------------- limits


def test_ditto_without_a_pull_is_local() -> None:
    ditto, local = run(Ditto(**SMALL, mu=0)), run(Local(**SMALL))
    assert_equal(ditto.personal.shared, local.personal.shared)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_dittos_shared_model_is_that_of_fedavg(mu: float) -> None:
    settings = {**SMALL, "participation": 0.5}
    assert_equal(run(Ditto(**settings, mu=mu)).state.server.shared, run(FedAvg(**settings)).state.server.shared)


@pytest.mark.parametrize("mu", [1e1, 1e3, 1e5])
@pytest.mark.parametrize("method", [Ditto, PFedMe])
def test_a_strong_pull_leaves_own_models_within_a_gradient_of_the_shared_one(method, mu: float) -> None:
    """With lr = 1 / mu every step ends at w - g / mu, and cross-entropy's slopes are at most sqrt(2) long."""
    settings = {"lr": 1 / mu, "mu": mu, "momentum": 0.0, "batch_size": 4, "schedule": "constant"}
    settings |= {"outer_lr": 1e-9 / mu} if method is PFedMe else {}  # so that w_i stands still
    net = make_linear(dtype=torch.float64)
    before = run(method(**settings), rounds=2, net=net)
    after = run(method(**settings), rounds=3, net=net)
    longest = (FEDERATION.train.x.square().sum(1) + 1).sqrt().max()
    for i in range(FEDERATION.n_clients):
        gaps = own(after, i).map(torch.sub, before.state.server.shared)
        distance = sum(gap.square().sum() for gap in gaps.leaves()).sqrt()
        assert 0 < distance <= 2**0.5 * longest / mu + 1e-8


def test_beta_is_how_far_the_server_goes() -> None:
    settings = {"lr": 0.05, "mu": 5.0, "outer_lr": 0.1, "batch_size": 4}
    start = Population(NET, k=1).initial(SEED)
    whole, half = (run(PFedMe(**settings, beta=beta), rounds=1).state.server.shared for beta in (1.0, 0.5))
    for a, b, c in zip(start.leaves(), half.leaves(), whole.leaves(), strict=True):
        torch.testing.assert_close(b, (a + c) / 2)


# ---------------------------------------------------------------------- closed forms


def regression() -> Federation:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(60, 3, generator=g), torch.randn(3, generator=g)
    y = x @ w + torch.randn(60, generator=g)
    return Federation.from_arrays(x, y, ["a", "b", "c"] * 20, test_fraction=0, task="regression").to(
        dtype=torch.float64
    )


def prox(x, y, w, mu):
    """argmin of |x theta - y|^2 / 2n + mu/2 |theta - w|^2."""
    n = len(x)
    return torch.linalg.solve(x.T @ x / n + mu * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y / n + mu * w)


@pytest.mark.parametrize("mu", [0.1, 1.0, 15.0])
@pytest.mark.parametrize(
    "method",
    [
        lambda mu: Ditto(mu=mu, lr=0.05, batch_size=None, local_steps=1000),
        lambda mu: PFedMe(mu=mu, lr=0.05, batch_size=None, local_steps=1, inner_steps=1000, outer_lr=0.3 / mu),
    ],
    ids=["ditto", "pfedme"],
)
def test_many_steps_on_a_quadratic_reach_the_proximal_point(method, mu: float) -> None:
    federation = regression()
    net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Flatten(0)).double()
    w = net[0].weight.detach()[0].clone()
    fitted = run(method(mu), rounds=1, net=net, federation=federation, loss="squared")
    ends = []
    for i, client in enumerate(federation.ids):
        mine = federation.client(client)["train"]
        ends.append(prox(mine.x, mine.y, w, mu))
        torch.testing.assert_close(own(fitted, i).by_name()["0.weight"][0, 0], ends[-1])
    if isinstance(fitted.algorithm, PFedMe):  # a step along the gradient of the envelope, mu (w - prox)
        expected = w - 0.3 * (w - federation.weights.double() @ torch.stack(ends))
        torch.testing.assert_close(fitted.state.server.shared.canonical["0.weight"][0, 0], expected)


# ---------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize("method", [Centralized, Ditto, PFedMe])
def test_more_models_than_one_are_refused(method) -> None:
    with pytest.raises(SettingError, match="set k = 1"):
        fit(Population(NET, k=2), FEDERATION, method(lr=0.1), rounds=1)


def test_settings_that_contradict_the_method_are_refused() -> None:
    with pytest.raises(ValidationError, match="should be 1"):
        Centralized(local_steps=2)
    with pytest.raises(ValidationError, match="should be None"):
        Centralized(local_epochs=1)
    with pytest.raises(ValidationError, match="keep it below 2"):
        PFedMe(mu=30, outer_lr=0.1)
