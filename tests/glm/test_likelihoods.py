"""Likelihoods of clients, compared with loops and closed forms."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy import stats

import ppfl.glm.sample_rows as sample_rows
from kit.tables import FAMILIES, draw_population, make_family, make_rows, to_double
from ppfl.glm.designs import ChoiceDesign, DenseDesign, SparseDesign
from ppfl.glm.families import REGRESSIONS, MultinomialFamily
from ppfl.glm.gaussian_moments import GaussianMoments, fastest_form
from ppfl.glm.likelihoods import Coefficients
from ppfl.glm.sample_rows import ClientRows
from ppfl.glm.solvers.marginal import Marginal
from ppfl.glm.solvers.parameters import ParameterShape, Regularization

K = 3
EVERY_FAMILY = (*FAMILIES, "negative binomial", "zero-inflated poisson", "zero-inflated negative binomial")


def coefficients_for(rows: ClientRows, seed: int = 0) -> Coefficients:
    g = torch.Generator().manual_seed(seed)
    m = rows.varying.outputs(rows.family.outputs)
    canonical = torch.randn(K, rows.varying.columns, m, generator=g, dtype=torch.float64) / 2
    shared = torch.randn(rows.shared.columns, m, generator=g, dtype=torch.float64) / 2
    nuisance = torch.tensor([0.3, -0.7], dtype=torch.float64)[: len(rows.family.nuisance)]
    return Coefficients(canonical, shared, nuisance)


def draw_memberships(clients: int, count: int) -> torch.Tensor:
    """(clients, K, count), some of them at the faces of the simplex."""
    drawn = np.random.default_rng(0).dirichlet([0.3] * K, (clients, count))
    drawn[:, 0] = [0.0, *[1 / (K - 1)] * (K - 1)]
    return torch.from_numpy(drawn.swapaxes(1, 2).copy())


def log_density_by_scipy(name: str, mean: np.ndarray, y: float, nuisance: list[float]) -> float:  # type: ignore[type-arg]
    if name.startswith("zero-inflated"):
        share = 1 / (1 + np.exp(-nuisance[-1]))
        counts = np.exp(log_density_by_scipy(name.removeprefix("zero-inflated "), mean, y, nuisance[:-1]))
        return float(np.log(share * (y == 0) + (1 - share) * counts))
    dispersion = float(np.exp(nuisance[0])) if nuisance else 1.0
    if name == "negative binomial":
        return float(stats.nbinom.logpmf(y, 1 / dispersion, 1 / (1 + dispersion * mean[0])))
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
    if name in REGRESSIONS:
        return np.exp(eta)
    if name == "bernoulli":
        return np.array([1 / (1 + np.exp(eta[0])), 1 / (1 + np.exp(-eta[0]))])
    return np.exp(eta) / np.exp(eta).sum()


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_a_clients_log_likelihood_is_the_sum_of_its_rows(name: str, mix: str) -> None:
    drawn = draw_population(name, clients=4, rows=5)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(drawn.y))
    rows = make_rows(drawn, make_family(name), mix, shared=["x1"], weight=weight)
    memberships = draw_memberships(4, 6)
    coefficients = coefficients_for(rows)
    found = rows.client_log_likelihoods(coefficients, memberships)
    assert isinstance(rows.varying, DenseDesign)
    assert isinstance(rows.shared, DenseDesign)
    for client in range(4):
        for g, c in enumerate(memberships[client].T.numpy()):
            total = 0.0
            for row in np.flatnonzero(rows.client.numpy() == client):
                common = rows.shared.x[row].numpy() @ coefficients.shared.numpy()
                varying = rows.varying.x[row].numpy()
                eta = np.stack([varying @ theta.numpy() + common for theta in coefficients.canonical])
                if mix == "weights":
                    mean = mean_by_numpy(name, c @ eta)
                else:
                    mean = sum(share * mean_by_numpy(name, one) for share, one in zip(c, eta, strict=True))
                density = log_density_by_scipy(name, mean, float(rows.y[row]), coefficients.nuisance.tolist())
                total += float(rows.weight[row]) * density
            assert float(found[client, g]) == pytest.approx(total, rel=1e-9)
    torch.testing.assert_close(rows.client_log_likelihoods(coefficients, memberships[..., 2:3]), found[:, 2:3])
    common = rows.client_log_likelihoods(coefficients, memberships[:1])
    torch.testing.assert_close(common[0], found[0])
    for chunk in rows.chunks(6):
        torch.testing.assert_close(
            chunk.data.client_log_likelihoods(coefficients, memberships[chunk.clients]), found[chunk.clients]
        )


def test_moments_have_the_likelihood_of_gaussian_rows() -> None:
    rows = make_rows(draw_population("gaussian", clients=6, rows=9), make_family("gaussian"), "weights", shared=["x0"])
    coefficients, moments = coefficients_for(rows), GaussianMoments.of(rows)
    for c in (draw_memberships(1, 11), draw_memberships(6, 11), draw_memberships(6, 1)):
        torch.testing.assert_close(
            moments.client_log_likelihoods(coefficients, c), rows.client_log_likelihoods(coefficients, c)
        )
    some, own = torch.tensor([1, 4, 5]), draw_memberships(6, 4)
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
    coefficients, atoms = coefficients_for(rows), draw_memberships(1, 5)
    theta = coefficients.canonical[..., 0].numpy()

    def probability(taste: np.ndarray, row: int) -> float:  # type: ignore[type-arg]
        utility = np.exp(x[row] @ taste) * available[row]
        return float(utility[0] / utility.sum())

    found = rows.client_log_likelihoods(coefficients, atoms)
    for at, c in enumerate(atoms[0].T.numpy()):
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
@pytest.mark.parametrize("name", [*EVERY_FAMILY, "heteroscedastic gaussian"])
def test_the_marginal_has_the_right_gradient(name: str, mix: str) -> None:
    rows = make_rows(draw_population(name, clients=5, rows=4), make_family(name), mix, shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, rows.family.outputs, len(rows.family.nuisance))
    regularization = Regularization(0.1, 0.2, torch.ones(shape.varying).double(), torch.ones(shape.shared).double())
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    objective = Marginal.of(fastest_form(rows), shape, regularization, 16).adapted(at)
    _, gradient = objective(at)
    for entry in range(shape.size):
        step = np.zeros(shape.size)
        step[entry] = 1e-5
        numerical = (objective(at + step)[0] - objective(at - step)[0]) / 2e-5
        assert gradient[entry] == pytest.approx(numerical, rel=1e-5, abs=1e-7)


def test_chunks_give_the_same_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(draw_population("poisson", clients=7, rows=5), make_family("poisson"), "weights")
    shape = ParameterShape(K, rows.varying.columns, 0, 1, len(rows.family.nuisance))
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    regularization = Regularization(0.1, 0.0, torch.ones(shape.varying).double(), torch.ones(0).double())
    whole = Marginal.of(rows, shape, regularization, 16).adapted(at)
    monkeypatch.setattr(sample_rows, "CHUNK_SIZE", 16 * 2 * 15)  # few clients at a time
    assert len(list(rows.chunks(16))) > 2
    parts = Marginal.of(rows, shape, regularization, 16).adapted(at)
    assert parts(at)[0] == pytest.approx(whole(at)[0], rel=1e-12)
    np.testing.assert_allclose(parts(at)[1], whole(at)[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "name", ["gaussian", "heteroscedastic gaussian", "poisson", "gamma", "bernoulli", "negative binomial"]
)
def test_the_marginal_has_the_right_hessian(name: str) -> None:
    """Louis' formula against differences of the gradient."""
    rows = make_rows(draw_population(name, clients=6, rows=5), make_family(name), "weights", shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, 1, len(rows.family.nuisance))
    regularization = Regularization(0.1, 0.2, torch.ones(shape.varying).double(), torch.ones(shape.shared).double())
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    objective = Marginal.of(fastest_form(rows), shape, regularization, 16).adapted(at)
    value, gradient, hessian, *_ = objective.with_hessian(at)
    assert value == pytest.approx(objective(at)[0], rel=1e-12)
    np.testing.assert_allclose(gradient, objective(at)[1], atol=1e-10)
    steps = 1e-5 * np.eye(shape.size)
    numerical = np.stack([(objective(at + step)[1] - objective(at - step)[1]) / 2e-5 for step in steps])
    np.testing.assert_allclose(hessian, numerical, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shared", [None, ["x2"]])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_of_scores_from_moments_are_those_of_all_points(shared: list[str] | None, is_weighted: bool) -> None:
    rows = make_rows(draw_population("gaussian", clients=6, rows=5), make_family("gaussian"), "weights", shared=shared)
    c = draw_memberships(6, 7)
    random = torch.Generator().manual_seed(1)
    weights = torch.rand(6, 7, generator=random, dtype=torch.float64).softmax(1)
    client_weight = torch.rand(6, 1, generator=random, dtype=torch.float64) if is_weighted else None
    found = GaussianMoments.of(rows).scores(coefficients_for(rows), c)
    assert found.own_sums is not None
    short, long = (each.sums(weights, c.log1p(), client_weight) for each in (found, found._replace(own_sums=None)))
    for name in short._fields:
        torch.testing.assert_close(getattr(short, name), getattr(long, name), rtol=1e-10, atol=1e-10)
