"""Likelihoods of clients, compared with loops and closed forms."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy import stats

import ppfl.glm.likelihoods as likelihoods
from drawn_populations import FAMILIES, draw_population, make_family, make_rows, to_double
from ppfl.glm.designs import ChoiceDesign, DenseDesign, SparseDesign
from ppfl.glm.families import MultinomialFamily
from ppfl.glm.likelihoods import ClientRows, Coefficients, GaussianMoments
from ppfl.glm.membership_grid import DirichletPrior, Grid, concentration, grid_size, spread_memberships
from ppfl.glm.solvers.marginal import Marginal
from ppfl.glm.solvers.parameters import ParameterShape, Regularization

K = 3


def coefficients_for(rows: ClientRows, seed: int = 0) -> Coefficients:
    g = torch.Generator().manual_seed(seed)
    m = rows.varying.outputs(rows.family.outputs)
    canonical = torch.randn(K, rows.varying.columns, m, generator=g, dtype=torch.float64) / 2
    shared = torch.randn(rows.shared.columns, m, generator=g, dtype=torch.float64) / 2
    return Coefficients(canonical, shared, torch.tensor(0.3, dtype=torch.float64))


def log_density_by_scipy(name: str, mean: np.ndarray, y: float, dispersion: float) -> float:  # type: ignore[type-arg]
    if name == "gaussian":
        return float(stats.norm.logpdf(y, mean[0], np.sqrt(dispersion)))
    if name == "poisson":
        return float(stats.poisson.logpmf(y, mean[0]))
    if name == "gamma":
        return float(stats.gamma.logpdf(y, 1 / dispersion, scale=mean[0] * dispersion))
    return float(np.log(mean[int(y)]))


def mean_by_numpy(name: str, eta: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    if name == "gaussian":
        return eta
    if name in ("poisson", "gamma"):
        return np.exp(eta)
    if name == "bernoulli":
        return np.array([1 / (1 + np.exp(eta[0])), 1 / (1 + np.exp(-eta[0]))])
    return np.exp(eta) / np.exp(eta).sum()


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_clients_log_likelihood_is_the_sum_of_its_rows(name: str, mix: str) -> None:
    drawn = draw_population(name, clients=4, rows=5)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(drawn.y))
    rows = make_rows(drawn, make_family(name), mix, shared=["x1"], weight=weight)
    grid = Grid(spread_memberships(K, 6), torch.rand(4, K).double() / 5)
    grid.floor[0] = 0
    coefficients = coefficients_for(rows)
    found = rows.client_log_likelihoods(coefficients, grid)
    memberships = grid.floor[:, None] + grid.scale[:, None, None] * grid.atoms
    assert isinstance(rows.varying, DenseDesign)
    assert isinstance(rows.shared, DenseDesign)
    for client in range(4):
        for g, c in enumerate(memberships[client].numpy()):
            total = 0.0
            for row in np.flatnonzero(rows.client.numpy() == client):
                common = rows.shared.x[row].numpy() @ coefficients.shared.numpy()
                varying = rows.varying.x[row].numpy()
                eta = np.stack([varying @ theta.numpy() + common for theta in coefficients.canonical])
                if mix == "weights":
                    mean = mean_by_numpy(name, c @ eta)
                else:
                    mean = sum(share * mean_by_numpy(name, one) for share, one in zip(c, eta, strict=True))
                density = log_density_by_scipy(name, mean, float(rows.y[row]), float(np.exp(0.3)))
                total += float(rows.weight[row]) * density
            assert float(found[client, g]) == pytest.approx(total, rel=1e-9)
    torch.testing.assert_close(rows.client_log_likelihoods(coefficients, memberships[:, 2:3]), found[:, 2:3])
    full_grid = rows.client_log_likelihoods(coefficients, Grid.full(K, 6, 4))
    torch.testing.assert_close(full_grid[0], found[0])


def test_moments_have_the_likelihood_of_gaussian_rows() -> None:
    rows = make_rows(draw_population("gaussian", clients=6, rows=9), make_family("gaussian"), "weights", shared=["x0"])
    coefficients, moments = coefficients_for(rows), GaussianMoments.of(rows)
    floor = torch.rand(6, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4
    own = torch.rand(6, 1, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for c in (Grid.full(K, 11, 6), Grid(spread_memberships(K, 11), floor), own):
        torch.testing.assert_close(
            moments.client_log_likelihoods(coefficients, c), rows.client_log_likelihoods(coefficients, c)
        )
    some = torch.tensor([1, 4, 5])
    for data in (rows, moments):
        torch.testing.assert_close(
            data.subset(some).client_log_likelihoods(coefficients, own[some]),
            data.client_log_likelihoods(coefficients, own)[some],
        )


def test_a_sparse_table_is_the_same_table() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 5, generator=g, dtype=torch.float64) * (torch.rand(20, 5, generator=g) < 0.4)
    dense, sparse = DenseDesign(x), SparseDesign(sp.csr_array(x.numpy()))
    theta = torch.randn(K, 5, 2, generator=g, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(20, K, 2, generator=g, dtype=torch.float64)
    gradients = []
    for design in (dense, sparse):
        (gradient,) = torch.autograd.grad((design.predictors(theta) * slopes).sum(), theta)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(dense.predictors(theta), sparse.predictors(theta))
    client = torch.arange(20) // 7
    torch.testing.assert_close(
        dense.client_gradients(slopes[:, 0], client, 3), sparse.client_gradients(slopes[:, 0], client, 3)
    )
    torch.testing.assert_close(dense.take(slice(3, 9)).predictors(theta), sparse.take(slice(3, 9)).predictors(theta))


@pytest.mark.parametrize("mix", ["weights", "predictions"])
def test_a_choice_is_a_softmax_over_the_available_alternatives(mix: str) -> None:
    random = np.random.default_rng(0)
    x, available = random.normal(size=(6, 3, 2)), np.ones((6, 3), dtype=bool)
    available[::2, 2] = False
    chosen = np.zeros(6)
    design = ChoiceDesign(to_double(x * available[..., None]), torch.from_numpy(available))
    empty = ChoiceDesign(torch.zeros(6, 3, 0).double(), torch.from_numpy(available))
    client = torch.tensor([0, 0, 0, 1, 1, 1])
    rows = ClientRows(design, empty, to_double(chosen), torch.ones(6).double(), client, 2, MultinomialFamily(3), mix)
    coefficients, atoms = coefficients_for(rows), spread_memberships(K, 5)
    theta = coefficients.canonical[..., 0].numpy()

    def probability(taste: np.ndarray, row: int) -> float:  # type: ignore[type-arg]
        utility = np.exp(x[row] @ taste) * available[row]
        return float(utility[0] / utility.sum())

    found = rows.client_log_likelihoods(coefficients, Grid.full(K, 5, 2))
    for at, c in enumerate(atoms.numpy()):
        for number in range(2):
            own_rows = range(3 * number, 3 * number + 3)
            if mix == "weights":
                expected = sum(np.log(probability(c @ theta, row)) for row in own_rows)
            else:
                expected = sum(
                    np.log(sum(s * probability(t, row) for s, t in zip(c, theta, strict=True))) for row in own_rows
                )
            assert float(found[number, at]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_marginal_has_the_right_gradient(name: str, mix: str) -> None:
    rows = make_rows(draw_population(name, clients=5, rows=4), make_family(name), mix, shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, rows.family.outputs)
    floor = torch.rand(5, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 5
    regularization = Regularization(0.1, 0.2, torch.ones(shape.varying).double(), torch.ones(shape.shared).double())
    objective = Marginal(rows, shape, Grid(spread_memberships(K, 12), floor), regularization)
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    _, gradient = objective(at)
    for entry in range(shape.size):
        step = np.zeros(shape.size)
        step[entry] = 1e-5
        numerical = (objective(at + step)[0] - objective(at - step)[0]) / 2e-5
        assert gradient[entry] == pytest.approx(numerical, rel=1e-5, abs=1e-7)


def test_chunks_give_the_same_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(draw_population("poisson", clients=7, rows=5), make_family("poisson"), "weights")
    shape = ParameterShape(K, rows.varying.columns, 0, 1)
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    regularization = Regularization(0.1, 0.0, torch.ones(shape.varying).double(), torch.ones(0).double())
    whole = Marginal(rows, shape, Grid.full(K, 10, 7), regularization)(at)
    monkeypatch.setattr(likelihoods, "_CHUNK_SIZE", 10 * 2 * 11)  # two clients at a time
    assert len(list(rows.chunks(10))) == 4
    value, gradient = Marginal(rows, shape, Grid.full(K, 10, 7), regularization)(at)
    assert value == pytest.approx(whole[0], rel=1e-12)
    np.testing.assert_allclose(gradient, whole[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("alpha", [0.2, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_grid_integrates_over_dirichlet_distributions(k: int, alpha: float) -> None:
    """The grid reproduces the known means and variances of Dirichlet(alpha)."""
    grid = Grid.full(k, grid_size(k), 1)
    log_alpha = torch.full((k,), float(np.log(alpha)), dtype=torch.float64)
    alpha = float(concentration(log_alpha)[0])
    weight = DirichletPrior.of(grid).log_weights(log_alpha).exp()[0]
    mean = weight @ grid.atoms
    assert float((mean - 1 / k).abs().max()) < 0.01
    variance = weight @ (grid.atoms - 1 / k).square()
    expected = (1 / k) * (1 - 1 / k) / (k * alpha + 1)
    assert float((variance / expected - 1).abs().max()) < 0.05


@pytest.mark.parametrize("k", [2, 3])
def test_a_shrunk_grid_integrates_like_a_fine_full_grid(k: int) -> None:
    """For an integrand that is concentrated in a corner of the simplex."""
    log_alpha = torch.linspace(-1.0, 0.5, k, dtype=torch.float64)
    floor = torch.full((1, k), 0.1, dtype=torch.float64)
    floor[0, 0] = 0.6
    best = floor[0] + (1 - float(floor.sum())) / k
    values = []
    for grid in (Grid(spread_memberships(k, 400), floor), Grid.full(k, 100_000, 1)):
        memberships = grid.floor[:, None] + grid.scale[:, None, None] * grid.atoms
        logs = -0.5 * ((memberships - best) / 0.02).square().sum(-1)
        values.append(float(torch.logsumexp(logs + DirichletPrior.of(grid).log_weights(log_alpha), 1)))
    assert values[0] == pytest.approx(values[1], abs=0.05)


@pytest.mark.parametrize("log_alpha", [-4.0, 0.0, 3.0, 30.0])
def test_no_shrunk_grid_has_a_total_weight_above_one(log_alpha: float) -> None:
    """For any concentration; an unbounded weight would make the likelihood unbounded."""
    g = torch.Generator().manual_seed(0)
    best = torch.rand(200, K, generator=g, dtype=torch.float64).pow(3)
    best = best / best.sum(1, keepdim=True)
    width = torch.logspace(-4, -1.5, 200, dtype=torch.float64)[:, None].expand(-1, K)
    grid = Grid.full(K, grid_size(K), 200).shrink_around(best, width)
    weight = DirichletPrior.of(grid).log_weights(torch.full((K,), log_alpha, dtype=torch.float64)).exp().sum(1)
    assert float(weight.max()) < 1.1
