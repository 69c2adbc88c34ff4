"""The study of the rates: its steps are those of the theorems, and its constants bound what they are said to bound."""

import math
from statistics import fmean

import pytest
import torch
from torch.func import grad, jacrev, vmap

from kit.experiments import run_study
from ppfl.data import SampleSpec
from ppfl.paper import load_study
from ppfl.paper.convergence import PROMISES, Constants, all_series, chart_lines, constants, fitted_slope, theorem_bound
from ppfl.runs import RunFolder

EXPERIMENTS = {
    (case.name, label): e for case in load_study("convergence").cases for label, e in case.experiments.items()
}
DATA = next(iter(EXPERIMENTS.values())).build_data()
CLIENTS = [(own.x.double(), own.y.double().flatten()) for own in map(DATA.train.client, range(DATA.n_clients))]
L_1 = max(float(torch.linalg.svdvals(x)[0]) ** 2 / len(x) / 4 for x, _ in CLIENTS)


def loss(theta, c, x, y):  # f_i with mixed weights; theta (K, d)
    return torch.nn.functional.binary_cross_entropy_with_logits(x @ (c @ theta), y)


def loss_at_start(experiment):
    """F(z^0), which is at least Delta_F, because F is not negative."""
    (seed,) = experiment.seeds
    start = experiment.build_population(SampleSpec.of(DATA), seed).initial_models(seed, distinct=True)[
        "classifier.weight"
    ]
    theta, even = start.double()[:, 0], torch.full((2,), 0.5).double()
    return fmean(float(loss(theta, even, x, y)) for x, y in CLIENTS)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    cases = ["corollary-o1", "theorem-2", "corollary-1-T800", "theorem-3-full"]
    study = load_study("convergence", ["rounds=16", "watch.every=1"], cases)
    return study, *run_study(study, tmp_path_factory.mktemp("runs"))


def test_methods_are_the_algorithms_as_written_with_steps_within_the_bounds_of_the_theorems():
    for (case, label), experiment in EXPERIMENTS.items():
        method, T, where = experiment.method, experiment.rounds, f"{case}, {label}"
        E, eta = method.local_steps, method.membership_lr
        assert (method.start, method.averaging, method.membership_scale) == ("uniform", "everyone", "weighted"), where
        assert (method.warmup, method.momentum, method.weight_decay, method.membership_steps) == (0, 0, 0, 1), where
        assert method.schedule == "constant", where
        assert E * method.lr == pytest.approx(eta, rel=1e-3), where
        assert eta <= (1 / (16 * L_1) if method.order == "alternating" else 1 / (32 * E * L_1)), where
        if case.startswith("corollary-1"):
            assert eta == pytest.approx(T**-0.5, rel=1e-3) and T >= 1024 * (E * L_1) ** 2, where
        if case.startswith("theorem-3-T"):
            batch, size, gap = method.batch_size, len(CLIENTS[0][0]), loss_at_start(experiment)
            noise = max(float(x.square().sum(1).mean()) for x, _ in CLIENTS) * (size - batch) / (size - 1) / batch
            limits = (4 * gap / (4 * L_1 * noise * T)) ** 0.5, (4 * gap / (128 * L_1**2 * (4 * L_1) * T)) ** (1 / 3)
            assert eta == pytest.approx(min(limits), rel=5e-3), where


def test_constants_bound_derivatives_at_any_point(short):
    study, runs, _ = short
    run, generator = runs["theorem-2"]["noisy c"][0], torch.Generator().manual_seed(0)
    found = constants(study.cases[1].experiments["noisy c"], run)
    final = RunFolder(run.folder).read().result.state.server["shared.classifier.weight"].double()[:, 0]
    assert math.isclose(found.L_1, L_1)
    exact = study.cases[0].experiments["E=1"]
    assert constants(exact, runs["corollary-o1"]["E=1"][0]).gap == pytest.approx(loss_at_start(exact), rel=1e-5)
    for _ in range(5):
        theta = torch.randn(2, 2, generator=generator).double()
        theta *= final.norm(dim=1).max() / theta.norm(dim=1).max()
        c = torch.rand(1, generator=generator).double()
        c = torch.cat([c, 1 - c])
        for x, y in CLIENTS:
            assert float(torch.linalg.matrix_norm(jacrev(grad(loss))(theta, c, x, y).reshape(4, 4), 2)) <= found.L_1
            assert 0.5 * float(jacrev(grad(loss, argnums=1), argnums=1)(theta, c, x, y).abs().max()) <= found.L_2
            for at, limit in ((0, found.sigma_1), (1, found.sigma_2)):
                one_by_one = vmap(grad(loss, argnums=at), in_dims=(None, None, 0, 0))
                each = one_by_one(theta, c, x[:, None], y[:, None]).flatten(1)
                spread = (each - each.mean(0)).square().sum(1).mean()
                assert float(spread) * (60 - 10) / 59 / 10 <= limit
        both = torch.stack([grad(loss)(theta, c, x, y) for x, y in CLIENTS])
        assert float((both - both.mean(0)).square().sum() / 2) <= 4 * found.L_1


def test_the_bound_falls_as_one_over_t_without_noise_and_else_to_a_floor():
    method = EXPERIMENTS["corollary-o1", "E=1"].method
    exact = Constants(L_1=0.3, L_2=0.1, sigma_1=0, sigma_2=0, delta=0, gap=0.5, clients=2)
    noisy = exact._replace(sigma_1=0.2, delta=0.1)
    for own in (method, method.model_copy(update={"order": "alternating"})):
        falling, floor = theorem_bound(own, exact, 100), theorem_bound(own, noisy, 10**12)
        assert theorem_bound(own, exact, 200) == pytest.approx(falling / 2)
        assert theorem_bound(own, noisy, 100) == pytest.approx(floor + falling) and floor > 0


def test_means_of_the_recorded_measure_stay_below_the_bound(short):
    study, runs, _ = short
    found = all_series(study, runs)
    assert len(found) == sum(len(case.experiments) for case in study.cases)
    for own in found:
        case = next(case.name for case in study.cases if PROMISES[case.name.split("-T")[0]] == own.promise)
        measured = [row["stationarity"] for row in runs[case][own.label][0].metrics]
        assert own.means == pytest.approx({T: fmean(measured[:T]) for T in own.means})
        assert set(own.means) == ({16} if "-T" in case else {4, 8, 16})
        assert all(mean < own.bounds[T] for T, mean in own.means.items())
    assert fitted_slope({T: 3 * T**-0.5 for T in (10, 30, 700)}) == pytest.approx(-0.5)
    (first, start), (last, end) = chart_lines(found, full_gradients=True)["T^-1"]
    assert math.log(end / start) / math.log(last / first) == pytest.approx(-1)
