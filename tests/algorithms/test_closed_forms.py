"""Where there is a closed form: proximal points and optima of quadratics, a strong pull, monotone EM."""

import itertools
from functools import cache

import pytest
import torch
from torch import nn

import ppfl
from kit.local_work import slope_and_loss
from kit.problems import make_federation, make_linear, make_net, with_seed
from kit.training import losses_of_clients, networks_of_clients, run
from kit.twins.plain import weights_of
from kit.twins.quadratics import proximal_point, regression

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
QUADRATIC = regression()
LINES = ppfl.Population(with_seed(lambda: nn.Linear(3, 1, bias=False)), k=1, loss="squared")


def trained(method, rounds=4, net=None, k=1, mix="outputs", **settings):
    population = ppfl.Population(net or make_net(dtype=torch.float64), k=k, mix=mix)
    return run(method, population, FEDERATION, rounds=rounds, seed=3, engine="stacked", **settings)


def fitted_lines(method, rounds):
    """A run on the quadratics, and every client's theta."""
    found = run(method, LINES, QUADRATIC, rounds=rounds, engine="stacked")
    return found, torch.stack([mine["weight"][0] for mine in networks_of_clients(found)])


@pytest.mark.parametrize("mu", [0.1, 15.0])
@pytest.mark.parametrize("kind", ["fedprox", "ditto", "pfedme"])
def test_many_steps_on_a_quadratic_reach_the_proximal_points(kind, mu):
    w, many = LINES.initial_network()["weight"][0], {"mu": mu, "lr": 0.05, "momentum": 0.9, "batch_size": None}
    methods = {
        "fedprox": lambda: ppfl.FedProx(**many, local_steps=400),
        "ditto": lambda: ppfl.Ditto(**many, local_steps=400),
        "pfedme": lambda: ppfl.PFedMe(**many, local_steps=1, inner_steps=400, outer_lr=0.3 / mu),
    }
    found, thetas = fitted_lines(methods[kind](), rounds=1)
    each = [QUADRATIC.train.client(i) for i in range(3)]
    points = torch.stack([proximal_point(own.x, own.y, w, mu) for own in each])
    mean = weights_of(QUADRATIC) @ points
    torch.testing.assert_close(thetas, mean.expand(3, -1) if kind == "fedprox" else points)
    if kind == "pfedme":  # a step along the gradient of the envelope, mu (w - prox)
        torch.testing.assert_close(found.server.shared["weight"][0], w - 0.3 * (w - mean))


def test_several_steps_of_scaffold_reach_the_optimum_of_the_sum_where_those_of_fedavg_do_not():
    """Full gradients, clients that disagree; at the end c_i is the gradient of f_i there."""
    best = torch.linalg.lstsq(QUADRATIC.train.x, QUADRATIC.train.y[:, None]).solution[:, 0]  # p_i are shares of samples
    settings = {"lr": 0.1, "batch_size": None, "local_steps": 5, "momentum": 0, "schedule": "constant"}
    (corrected, ours), (_, theirs) = (fitted_lines(m(**settings), rounds=100) for m in (ppfl.Scaffold, ppfl.FedAvg))
    assert float((ours[0] - best).norm()) < 1e-7
    assert float((theirs[0] - best).norm()) > 0.01
    for i, c_i in enumerate(corrected.client_tree()["weight"][:, 0]):
        own = QUADRATIC.train.client(i)
        torch.testing.assert_close(c_i, own.x.T @ (own.x @ best - own.y) / len(own), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("participation", "dropout"), [(0.5, 0.0), (1.0, 0.4)], ids=["some", "lost"])
def test_c_of_scaffold_is_the_weighted_mean_of_the_c_i_after_every_round(participation, dropout):
    method = ppfl.Scaffold(lr=0.2, weight_decay=0.01, batch_size=4, participation=participation)
    found = trained(method, dropout=dropout)
    for at, state in enumerate(found.states):
        own = found.client_tree(at)
        for name, c in state.server.shared["control"].items():
            torch.testing.assert_close(c, torch.tensordot(weights_of(FEDERATION), own[name], 1), atol=1e-12, rtol=0)
            assert at < 2 or bool(c.any())


def test_the_reported_loss_is_the_mean_over_samples_before_the_step():
    found, sizes = trained(ppfl.FedAvg(lr=0.2, batch_size=None)), FEDERATION.train.sizes.double()
    for at, report in enumerate(found.reports):
        assert report.loss == pytest.approx(float(losses_of_clients(found, at) @ sizes / sizes.sum()))


@pytest.mark.parametrize("mu", [1e1, 1e5])
@pytest.mark.parametrize("method", [ppfl.Ditto, ppfl.PFedMe])
def test_a_strong_pull_leaves_own_models_within_a_gradient_of_the_shared_one(method, mu):
    """With lr = 1 / mu every step ends at w - g / mu, and cross-entropy's slopes are at most sqrt(2) long."""
    settings = {"lr": 1 / mu, "mu": mu, "momentum": 0.0, "batch_size": 4, "schedule": "constant"}
    settings |= {"outer_lr": 1e-12} if method is ppfl.PFedMe else {}  # so that w_i stands still
    found = trained(method(**settings), rounds=3, net=make_linear(dtype=torch.float64))
    received = found.states[-2].server.shared
    longest = (FEDERATION.train.x.square().sum(1) + 1).sqrt().max()
    for mine in networks_of_clients(found):
        distance = sum((mine[name] - value).square().sum() for name, value in received.items()).sqrt()
        assert 0 < distance <= 2**0.5 * longest / mu + 1e-8


@cache
def mixture_weights_alone():
    """FedEM with models that do not move."""
    still = ppfl.FedEM(lr=1e-12, weight_decay=0.0, batch_size=None)
    return trained(still, rounds=100, k=3, mix="predictions")


def test_em_never_raises_a_clients_loss_while_models_stay():
    found = mixture_weights_alone()
    losses = torch.stack([losses_of_clients(found, at) for at in range(21)])
    assert bool((losses.diff(dim=0) <= 1e-10).all() and (losses[-1] < losses[0]).all())
    pooled = (losses @ FEDERATION.train.sizes.double() / FEDERATION.train.sizes.sum()).tolist()
    for (before, after), report in zip(itertools.pairwise(pooled), found.reports, strict=False):
        assert after - 1e-9 <= report.loss <= before + 1e-9  # the bound lies between: it touches f at the start


def test_em_ends_where_the_mixture_weights_are_optimal():
    """-log sum_k pi_k p_k is convex in pi: the Frank-Wolfe gap bounds what is left to gain."""
    found = mixture_weights_alone()
    backend = found.transport.sites[0].backend
    for i, pi in enumerate(found.memberships):
        slope, _ = slope_and_loss(backend, found.server.shared, pi, FEDERATION.train.client(i))
        assert float(pi @ slope - slope.min()) < 2.5e-2
