"""The rates of Section 3.2: Corollary O1 on full gradients, Corollary 1 with noise, constants measured on the problem.

Each of two linear models is right about one kind of clients but for a column that misleads both, so that both blocks
have to move. There are two clients: the measure adds up over clients before it is squared, which is at most M times the
sum of squares by which F falls, and the factor 2 of Theorem 2 covers M = 2.
"""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

import ppfl
from kit.problems import make_contradicting_federation, make_linear
from kit.training import at_start, run
from ppfl.server import Watch, measure

SIZE, RHO, PENALTY = 12, 0.5, 0.02
EXACT = {
    "momentum": 0, "batch_size": None, "schedule": "constant", "start": "uniform", "order": "random", "warmup": 0,
    "averaging": "everyone", "membership_steps": 1, "membership_scale": "weighted", "penalty": PENALTY,
    "block_probability": RHO, "local_steps": 1,
}  # fmt: skip
L = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()  # of two neighbours, who count p = 1/2 each


class Objective:
    """F and its gradients at the states of a run, by plain autograd."""

    def __init__(self, federation, population):
        self.net, self.shapes = population.net, {n: v.shape for n, v in population.initial_models(0).items()}
        self.data = [(own.x, own.y) for own in map(federation.train.client, range(2))]

    def place(self, state):
        """theta in one row, and C."""
        return torch.cat([state.server.shared[name].flatten() for name in self.shapes]), state.server.memberships

    def client_loss(self, theta, c, x, y):
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        models = {n: part.reshape(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}
        each = (functional_call(self.net, {n: v[k] for n, v in models.items()}, (x,)).softmax(1) for k in range(2))
        mixed = sum(share * prediction for share, prediction in zip(c, each, strict=True))
        return -mixed.gather(1, y[:, None]).log().mean()

    def value(self, theta, C):
        """Eq. (9)."""
        losses = (self.client_loss(theta, c, *data) / 2 for c, data in zip(C, self.data, strict=True))
        return sum(losses) + PENALTY * (C * (L @ C)).sum()

    def at(self, state):
        return float(self.value(*self.place(state)))

    def measures(self, states, eta):
        """|G^t|^2 of Section 3.2 at these states."""

        def one(theta, C):
            by_theta, by_C = grad(self.value, argnums=(0, 1))(theta, C)
            after = (C.log() - eta * by_C).softmax(1)
            return by_theta.square().sum() + ((C - after).abs().sum() / eta).square()

        return vmap(one)(*map(torch.stack, zip(*map(self.place, states), strict=True)))

    def smoothness(self, state):
        """L_1 and L_2 of Assumption 1 at a state."""
        (theta, C), by_theta, by_c = self.place(state), [], []
        for c, data in zip(C, self.data, strict=True):
            by_theta.append(torch.linalg.matrix_norm(jacrev(grad(self.client_loss))(theta, c, *data), 2))
            by_c.append(jacrev(grad(self.client_loss, argnums=1), argnums=1)(theta, c, *data).abs().max() / 2)
        return float(max(by_theta)), float(max(by_c)) + 4 * PENALTY  # surrogate: 2 lambda d_ii, twice for the lift

    def noise(self, state, batch_size):
        """sigma_1^2 + delta^2 of Assumptions 2 and 3 at a state, for batches without replacement."""
        (theta, C), variances, whole = self.place(state), [], []
        for c, (x, y) in zip(C, self.data, strict=True):
            whole.append(grad(self.client_loss)(theta, c, x, y))
            each = torch.stack([grad(self.client_loss)(theta, c, x[n : n + 1], y[n : n + 1]) for n in range(SIZE)])
            variances.append((each - whole[-1]).square().sum(1).mean() * (SIZE - batch_size) / (SIZE - 1) / batch_size)
        delta = ((whole[0] - whole[1]) / 2).square().sum()  # both are as far from their mean
        return float(max(variances) + delta)


def trained(method, rounds, groups=(0, 1)):
    """A run from models that are each right about one of the groups but for a column, and its objective."""
    federation = make_contradicting_federation(groups, SIZE)
    population = ppfl.Population(make_linear(classes=2, dtype=torch.float64), k=2, mix="predictions")
    models = {name: torch.zeros_like(theta) for name, theta in population.initial_models(0).items()}
    models["weight"][:, 1, 0] = torch.tensor([3.0, -3.0])
    models["weight"][:, 1, 1] = 2.0
    settings = {"rounds": rounds, "seed": 0, "affinity": ppfl.affinity.uniform(federation.ids)}
    start = at_start(method, population, federation, models=models, **settings)
    found = run(method, population, federation, engine="stacked", resume=start, **settings)
    return found, Objective(federation, population)


def weakest_descent(F, states, eta, local_steps=1):
    """min_h rho_h (1 - gamma_h L_h), the denominator of Theorem 2; eta must be as short as the theorem asks."""
    L_1, L_2 = (max(constants) for constants in zip(*map(F.smoothness, states[::40]), strict=True))
    assert eta <= min(1 / (32 * local_steps * L_1), 2 / L_2)
    return min(RHO * (1 - 4 * eta * L_1), (1 - RHO) * (1 - eta / 2 * L_2))


@pytest.mark.parametrize(("eta", "local_steps", "groups"), [(0.045, 1, (0, 1)), (0.025, 2, (0, 0))])
def test_on_full_gradients_the_running_mean_of_the_measure_falls_as_one_over_T(eta, local_steps, groups):
    """Corollary O1: at most 2 Delta_F / (T eta min_h rho_h (1 - gamma_h L_h)), with what F has fallen by so far."""
    method = ppfl.PPFL(**EXACT | {"local_steps": local_steps}, lr=eta / local_steps, membership_lr=eta)
    found, F = trained(method, 160, groups)
    descent = weakest_descent(F, found.states, eta, local_steps)
    sums = F.measures(found.states, eta).cumsum(0)
    for t in (40, 80, 160):
        fallen = F.at(found.states[0]) - F.at(found.states[t])
        assert float(sums[t - 1]) / t <= 2 * fallen / (t * eta * descent)


def test_with_noisy_gradients_the_mean_of_the_measure_stays_below_the_bound_of_corollary_1():
    """eta = 1 / sqrt(T): (2 Delta_F + rho_1 (sigma_1^2 + delta^2)) / sqrt(T) over the same denominator, sigma_2 = 0."""
    T, batch_size = 441, 3
    eta = T**-0.5
    found, F = trained(ppfl.PPFL(**EXACT | {"batch_size": batch_size}, lr=eta, membership_lr=eta), T)
    noise = max(F.noise(state, batch_size) for state in found.states[::40])
    assert noise > 0.05
    descent, measures = weakest_descent(F, found.states, eta), F.measures(found.states[:-1], eta)
    fallen = F.at(found.states[0]) - F.at(found.state)
    bound = (2 * fallen + RHO * noise) / (T**0.5 * descent)
    assert float(measures.mean()) <= bound < float(measures[0])


def test_the_figure_that_is_reported_is_the_measure():
    """With a penalty between neighbours, and at a state where neither part is small."""
    found, F = trained(ppfl.PPFL(**EXACT, lr=0.5, membership_lr=0.3), 6)
    watch = Watch(stationarity=True, objective=True)
    reported = measure(found.method, found.problem, found.transport, found.state, watch).record
    assert reported["stationarity"] == pytest.approx(float(F.measures([found.state], 0.3)), rel=1e-6)
    assert reported["objective"] == pytest.approx(F.at(found.state), rel=1e-6)
