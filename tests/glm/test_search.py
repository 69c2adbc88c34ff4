"""The search for the best fit: laws of nested models, optimality, starts, and the choice of K and residual effects."""

from functools import cache

import numpy as np
import pytest
import torch

from kit import tables
from kit.tables import draw_population, to_double
from ppfl.glm.choose_k import Candidate, Search, automatic, choose, choose_model, draw_folds
from ppfl.glm.families import regression_family
from ppfl.glm.likelihood import Subset, SumOfObjectives
from ppfl.glm.marginal import Marginal
from ppfl.glm.nested import embedded
from ppfl.glm.newton import SMALL_GAIN, Task, newton_step
from ppfl.glm.population_fit import PopulationFit
from ppfl.glm.problem import Evaluator, Problem, precise_log_likelihood
from ppfl.glm.rows import DenseDesign, RowLikelihood


def standardised_problem(x, y, clients, ridge=1.0, family="gaussian") -> Problem:
    """Columns standardised, an intercept last, and a gaussian target standardised."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    order = np.argsort(clients, kind="stable")
    mean, scale = x.mean(0), x.std(0)
    whole = np.c_[(x - mean) / scale, np.ones(len(x))][order]
    y = ((y - y.mean()) / y.std() if family == "gaussian" else y)[order]
    n, q = whole.shape
    none, one = torch.zeros(n, 0).double(), torch.ones(n).double()
    codes = torch.from_numpy(np.unique(np.asarray(clients)[order], return_inverse=True)[1])
    rows = RowLikelihood(
        DenseDesign(torch.from_numpy(whole)), DenseDesign(none), torch.from_numpy(y), one, codes, int(codes.max()) + 1,
        regression_family(family), "weights",
    )  # fmt: skip
    is_slope = to_double([1.0] * (q - 1) + [0.0])
    return Problem.of(rows, ridge, is_slope, to_double([]), [*(mean / scale), 0.0], q - 1)


@cache
def three_patterns(clients: int, rows: int, seed: int = 0) -> Problem:
    """Clients between three canonical models, with noise of variance 1."""
    random = np.random.default_rng(seed)
    theta = np.array([[2.0, 0, 0], [-1, 1.7, 0], [-1, -1.7, 0]])
    ids = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(ids), 3))
    y = (x * (random.dirichlet([0.3] * 3, clients) @ theta)[ids]).sum(1) + random.normal(size=len(ids))
    return standardised_problem(x, y, ids)


@cache
def fit(problem_name: tuple[int, int, int], k: int, residual: str = "none", **settings) -> PopulationFit:
    candidate = Candidate(k, residual)  # type: ignore[arg-type]
    return choose_model(three_patterns(*problem_name), [candidate], Search(**settings))[0]


def precise_objective(problem: Problem, found: PopulationFit) -> tuple[float, float]:
    """Minus the precise log-likelihood, with the penalty, and the error of the integration."""
    log = precise_log_likelihood(found, problem.data)
    return float(found.regularization.value(found.layout, found.parameters)) - log.value, log.error


@pytest.mark.parametrize("name", [(40, 100, 0), (18, 10, 3), (8, 12, 1)])
def test_no_fit_is_worse_than_one_with_fewer_canonical_models(name):
    """Two copies of a canonical model are the same model, so the objective never rises with K, nor with an effect."""
    before = np.inf
    for k in (1, 2, 3, 4):
        found = fit(name, k)
        value, error = precise_objective(three_patterns(*name), found)
        assert value <= before + 0.05 + 3 * error
        before = value
        if k <= 2:
            wider, error = precise_objective(three_patterns(*name), fit(name, k, "full"))
            assert wider <= value + 0.05 + 3 * error


@pytest.mark.parametrize("name", [(40, 100, 0), (18, 10, 3)])
@pytest.mark.parametrize(("k", "residual"), [(2, "none"), (3, "none"), (4, "none"), (2, "full")])
def test_a_converged_fit_is_a_minimum(name, k, residual):
    """Gradient and curvature on fresh points: what one more step would gain is little."""
    problem, found = three_patterns(*name), fit(name, k, residual)
    assert found.converged
    points = Marginal.of(problem.data, found.layout, 1024).adapted(found.vector)
    sums = points.evaluate(found.vector).sums
    task = Task("", found.layout, Subset(), 1024, 0, problem.facts.regularization, 1.0, 1.0)
    left = newton_step(task.add_penalty(found.vector, sums), None, np.inf)
    assert left.gain < SMALL_GAIN + 4 * sums.error  # what the points themselves get wrong


def test_a_saddle_is_left_downhill():
    """x^2 - y^2 at its stationary point has no gradient, and yet a step goes along y."""
    layout = three_patterns(8, 12, 1).facts.layout
    sums = Marginal.of(three_patterns(8, 12, 1).data, layout, 1).adapted(np.zeros(layout.size)).evaluate(
        np.zeros(layout.size)
    )[0]  # fmt: skip
    saddle = sums._replace(gradient=np.zeros(2), hessian=np.diag([2.0, -200.0]))
    step = newton_step(saddle, None, 1.0)
    assert step.gain > 1 and abs(step.direction[1]) > 0.1 and step.direction[0] == 0 and step.curvature == -200.0


def test_columns_that_are_constant_within_clients_do_not_hide_the_differences():
    """A fit with many columns between clients is no worse than the one in which all clients share them."""
    random = np.random.default_rng(0)
    ids = np.repeat(np.arange(30), 8)
    between, x = random.normal(size=(30, 4))[ids], random.normal(size=(240, 1))
    slope = np.where(np.arange(30) % 2, 2.0, -2.0)[ids]
    y = slope * x[:, 0] + between @ [1.0, -1.0, 0.5, 0.0] + 0.5 * random.normal(size=240)
    problem = standardised_problem(np.c_[x, between], y, ids)
    assert problem.facts.tied == (1, 2, 3, 4)
    free = choose_model(problem, [Candidate(2)])[0]
    rows = problem.rows
    designs = (DenseDesign(rows.varying.x[:, some]) for some in ([0, 5], [1, 2, 3, 4]))
    one = torch.ones(4).double()
    shared = Problem.of(rows._replace(**dict(zip(("varying", "shared"), designs, strict=True))), 1.0, one[:2], one)
    tied = choose_model(shared, [Candidate(2)])[0]
    assert free.objective <= tied.objective + 0.05


def test_more_starts_are_never_worse():
    one, ten = (precise_objective(three_patterns(18, 10, 3), fit((18, 10, 3), 3, n_init=n)) for n in (1, 10))
    assert ten[0] <= one[0] + 0.05 + ten[1] + one[1]


def test_the_smallest_simplex_is_found():
    """Clients know their memberships well: the corners are the outermost clients, not canonical models far outside."""
    random = np.random.default_rng(0)
    share = np.concatenate([np.zeros(4), np.ones(4), np.linspace(0.1, 0.9, 8)])
    ids, x = np.repeat(np.arange(16), 10), random.normal(size=(160, 1))
    y = (4 * share[ids] - 2) * x[:, 0] + 0.03 * random.normal(size=160)
    found = choose_model(standardised_problem(x, y, ids), [Candidate(2)])[0]
    slopes = found.parameters.canonical[:, 0, 0].numpy() * y.std() / x.std()
    np.testing.assert_allclose(np.sort(slopes), [-2, 2], atol=0.12)


def test_a_split_and_an_effect_of_zero_are_the_same_model():
    """A model with one corner split, or with L = 0 or a covariance that a wider kind can have, has its likelihood."""
    problem = three_patterns(18, 10, 3)
    layout = problem.facts.layout_of(2, "diagonal")
    vector = np.random.default_rng(0).normal(size=layout.size) / 2
    value = Marginal.of(problem.data, layout, 512).adapted(vector).value(vector)
    for k, residual, corner in ((3, "diagonal", 1), (2, "full", None), (3, "full", 0)):
        larger = problem.facts.layout_of(k, residual)
        same = embedded(layout, vector, larger, corner)
        again = Marginal.of(problem.data, larger, 2048).adapted(same).value(same)
        assert again == pytest.approx(value, abs=1e-6 if corner is None else 0.1)


def test_copies_of_a_canonical_model_move_apart_as_the_curvature_says():
    """The closed form from the smaller model, against differences of the likelihood of the larger one."""
    data = tables.make_rows(draw_population("poisson", 10, 6), tables.make_family("poisson"), "weights")
    problem = tables.make_problem(data, ridge=0.0)
    layout, corner, step, axis = problem.facts.layout_of(2, "none"), 1, 0.1, np.array([0.5, -0.5, 0.5, 0.5])
    at = np.random.default_rng(0).normal(size=layout.size) / 3
    sums = Marginal.of(data, layout, 256).adapted(at).evaluate(at).sums
    curvature = sums.splitting[4:8, 4:8] / (1 + float(layout.unpack(at).alpha[corner]))
    larger = layout._replace(k=3)
    split, apart = embedded(layout, at, larger, corner), np.zeros(larger.size)
    apart[4:8], apart[8:12] = axis, -axis
    points = Marginal.of(data, larger, 4096).adapted(split)
    middle, *ends = (points.value(split + x * apart) for x in (0.0, -step, step))
    assert axis @ curvature @ axis == pytest.approx((sum(ends) - 2 * middle) / step**2, rel=0.05)


def test_three_sites_find_what_one_table_does():
    """The objective is a sum over clients, and the points of a client depend on its own rows alone."""
    problem = three_patterns(18, 10, 3)
    folds = draw_folds(problem.rows, 2, np.random.default_rng(0))
    candidates = [Candidate(1), Candidate(1, "full"), Candidate(2), Candidate(2, "full")]
    sites = []
    for some in torch.arange(18).split([4, 9, 5]):
        is_own = torch.isin(problem.rows.client, some)
        sites.append(Evaluator(Problem(problem.rows.subset(some), problem.facts, folds[is_own])))
    one = Evaluator(Problem(problem.rows, problem.facts, folds))
    together, apart = (choose(each, problem.facts, candidates, Search(), 2) for each in (one, SumOfObjectives(sites)))
    assert together.best == apart.best
    np.testing.assert_allclose(together.held_out, apart.held_out, rtol=1e-6)
    for a, b in zip(together.fits, apart.fits, strict=True):
        np.testing.assert_allclose(a.solution.vector, b.solution.vector, atol=1e-6)
        np.testing.assert_allclose(a.solution.found.hessian, b.solution.found.hessian, rtol=1e-6, atol=1e-6)


def test_the_chosen_fit_is_the_one_that_is_asked_for_directly():
    problem = three_patterns(18, 10, 3)
    found, records = choose_model(problem, automatic(problem, range(1, 4), "auto"))
    direct, _ = choose_model(problem, [Candidate(found.k, found.layout.residual)])
    np.testing.assert_allclose(found.vector, direct.vector, atol=1e-9)
    best = records[(records.k == found.k) & (records.residual == found.layout.residual)].iloc[0]
    most = records.loc[records.held_out.idxmax()]
    assert best.held_out + best.held_out_error >= most.held_out  # within one standard error


def test_names_and_order_of_clients_have_no_effect():
    problem = three_patterns(18, 10, 3)
    rows, order = problem.rows, torch.arange(180).view(18, 10).flip(0).flatten()
    turned = rows.take(order)._replace(client=torch.arange(18).repeat_interleave(10))
    given = problem.facts.regularization.slopes, torch.zeros(0).double()
    again = Problem.of(turned, 1.0, *given, problem.facts.layout.centres, problem.facts.layout.intercept)
    one, other = (choose_model(each, [Candidate(2)])[0] for each in (problem, again))
    np.testing.assert_allclose(one.vector, other.vector, atol=1e-7)
    torch.testing.assert_close(one.posterior.mean.flip(0), other.posterior.mean, rtol=1e-6, atol=1e-6)
