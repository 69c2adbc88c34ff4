"""What clients' data are worth, against loops and closed forms."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy import stats

import ppfl.glm.likelihoods as likelihoods
from drawn_populations import FAMILIES, double, draw, family_of, rows_of
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
    drawn = draw(name, clients=4, rows=5)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(drawn.y))
    rows = rows_of(drawn, family_of(name), mix, shared=["x1"], weight=weight)
    grid = Grid(spread_memberships(K, 6), torch.rand(4, K).double() / 5)  # a part of the simplex for each client
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
                both = rows.shared.x[row].numpy() @ coefficients.shared.numpy()
                eta = np.stack([rows.varying.x[row].numpy() @ theta.numpy() + both for theta in coefficients.canonical])
                if mix == "weights":
                    mean = mean_by_numpy(name, c @ eta)
                else:
                    mean = sum(share * mean_by_numpy(name, one) for share, one in zip(c, eta, strict=True))
                density = log_density_by_scipy(name, mean, float(rows.y[row]), float(np.exp(0.3)))
                total += float(rows.weight[row]) * density
            assert float(found[client, g]) == pytest.approx(total, rel=1e-9)
    torch.testing.assert_close(rows.client_log_likelihoods(coefficients, memberships[:, 2:3]), found[:, 2:3])
    everyone = rows.client_log_likelihoods(coefficients, Grid.full(K, 6, 4))
    torch.testing.assert_close(everyone[0], found[0])


def test_moments_know_all_that_gaussian_rows_know() -> None:
    rows = rows_of(draw("gaussian", clients=6, rows=9), family_of("gaussian"), "weights", shared=["x0"])
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
def test_a_choice_is_a_softmax_over_the_alternatives_that_are_there(mix: str) -> None:
    random = np.random.default_rng(0)
    x, there = random.normal(size=(6, 3, 2)), np.ones((6, 3), dtype=bool)
    there[::2, 2] = False
    taken = np.zeros(6)
    design = ChoiceDesign(double(x * there[..., None]), torch.from_numpy(there))
    empty = ChoiceDesign(torch.zeros(6, 3, 0).double(), torch.from_numpy(there))
    client = torch.tensor([0, 0, 0, 1, 1, 1])
    rows = ClientRows(design, empty, double(taken), torch.ones(6).double(), client, 2, MultinomialFamily(3), mix)
    coefficients, atoms = coefficients_for(rows), spread_memberships(K, 5)
    theta = coefficients.canonical[..., 0].numpy()

    def probability(taste: np.ndarray, row: int) -> float:  # type: ignore[type-arg]
        worth = np.exp(x[row] @ taste) * there[row]
        return float(worth[0] / worth.sum())

    found = rows.client_log_likelihoods(coefficients, Grid.full(K, 5, 2))
    for at, c in enumerate(atoms.numpy()):
        for owner in range(2):
            mine = range(3 * owner, 3 * owner + 3)
            if mix == "weights":
                expected = sum(np.log(probability(c @ theta, row)) for row in mine)
            else:
                expected = sum(
                    np.log(sum(s * probability(t, row) for s, t in zip(c, theta, strict=True))) for row in mine
                )
            assert float(found[owner, at]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_marginal_has_the_slope_it_says(name: str, mix: str) -> None:
    rows = rows_of(draw(name, clients=5, rows=4), family_of(name), mix, shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, rows.family.outputs)
    floor = torch.rand(5, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 5
    regularization = Regularization(0.1, 0.2, torch.ones(shape.varying).double(), torch.ones(shape.shared).double())
    objective = Marginal(rows, shape, Grid(spread_memberships(K, 12), floor), regularization)
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    _, slope = objective(at)
    for entry in range(shape.size):
        step = np.zeros(shape.size)
        step[entry] = 1e-5
        numerical = (objective(at + step)[0] - objective(at - step)[0]) / 2e-5
        assert slope[entry] == pytest.approx(numerical, rel=1e-5, abs=1e-7)


def test_pieces_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(draw("poisson", clients=7, rows=5), family_of("poisson"), "weights")
    shape = ParameterShape(K, rows.varying.columns, 0, 1)
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    regularization = Regularization(0.1, 0.0, torch.ones(shape.varying).double(), torch.ones(0).double())
    whole = Marginal(rows, shape, Grid.full(K, 10, 7), regularization)(at)
    monkeypatch.setattr(likelihoods, "_CHUNK_SIZE", 10 * 2 * 11)  # two clients at a time
    assert len(list(rows.chunks(10))) == 4
    value, slope = Marginal(rows, shape, Grid.full(K, 10, 7), regularization)(at)
    assert value == pytest.approx(whole[0], rel=1e-12)
    np.testing.assert_allclose(slope, whole[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("alpha", [0.2, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_grid_integrates_over_dirichlet_distributions(k: int, alpha: float) -> None:
    """Means and variances of Dirichlet(alpha) are known; the grid has to give them."""
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
def test_a_part_of_the_simplex_holds_what_the_whole_has_there(k: int) -> None:
    """An integrand that lives in a corner of the simplex, by a client's own part and by a very fine grid."""
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
def test_no_part_of_the_simplex_weighs_more_than_the_whole(log_alpha: float) -> None:
    """However alike clients are said to be: a weight without bound would be a likelihood without bound."""
    g = torch.Generator().manual_seed(0)
    best = torch.rand(200, K, generator=g, dtype=torch.float64).pow(3)
    best = best / best.sum(1, keepdim=True)
    width = torch.logspace(-4, -1.5, 200, dtype=torch.float64)[:, None].expand(-1, K)
    grid = Grid.full(K, grid_size(K), 200).shrink_around(best, width)
    weight = DirichletPrior.of(grid).log_weights(torch.full((K,), log_alpha, dtype=torch.float64)).exp().sum(1)
    assert float(weight.max()) < 1.1
