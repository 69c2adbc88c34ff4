"""The study of the rates: its steps are those of the theorems, and its constants bound what they are said to bound."""

import math
import xml.etree.ElementTree as ET
from statistics import fmean

import pytest
import torch
from torch.func import grad, jacrev, vmap

from kit.experiments import run_study
from ppfl.paper import all_series, chart_lines, load_study, study_tables
from ppfl.paper.convergence import PROMISES, Constants, constants, fitted_slope, theorem_bound
from ppfl.runs import Experiment, RunFolder

STUDY = load_study("convergence")
EXPERIMENTS = {(case.name, label): e for case in STUDY.cases for label, e in case.experiments.items()}
DATA = next(iter(EXPERIMENTS.values())).data.build()
CLIENTS = [DATA.train.client(i) for i in range(DATA.n_clients)]
INPUTS = [own.x.double() for own in CLIENTS]
L_1 = max(float(torch.linalg.svdvals(x)[0]) ** 2 / len(x) / 4 for x in INPUTS)


def loss(theta: torch.Tensor, c: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """f_i with mixed weights; theta (K, d)."""
    return torch.nn.functional.binary_cross_entropy_with_logits(x @ (c @ theta), y)


def loss_at_start(experiment: Experiment) -> float:
    """F(z^0), which is at least Delta_F, because F is not negative."""
    (seed,) = experiment.seeds
    start = experiment.build_population(DATA, seed).initial_models(seed, distinct=True)["classifier.weight"]
    theta, even = start.double()[:, 0], torch.full((2,), 0.5).double()
    return fmean(float(loss(theta, even, own.x.double(), own.y.double().flatten())) for own in CLIENTS)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The study with a few rounds of some of its cases, its runs, and its page."""
    cases = ["corollary-o1", "theorem-2", "corollary-1-T800", "theorem-3-full"]
    study = load_study("convergence", ["rounds=16", "watch.every=1"], cases)
    return study, *run_study(study, tmp_path_factory.mktemp("runs"))


def test_methods_are_the_algorithms_as_written_with_steps_within_the_bounds_of_the_theorems() -> None:
    for (case, label), experiment in EXPERIMENTS.items():
        method, T, where = experiment.algorithm, experiment.rounds, f"{case}, {label}"
        E, eta = method.local_steps, method.membership_lr
        assert (method.start, method.averaging, method.membership_scale) == ("uniform", "everyone", "weighted"), where
        assert (method.warmup, method.momentum, method.weight_decay, method.membership_steps) == (0, 0, 0, 1), where
        assert method.schedule == "constant", where
        assert E * method.lr == pytest.approx(eta, rel=1e-3), where
        assert eta <= (1 / (16 * L_1) if method.order == "alternating" else 1 / (32 * E * L_1)), where
        if case.startswith("corollary-1"):
            assert eta == pytest.approx(T**-0.5, rel=1e-3) and T >= 1024 * (E * L_1) ** 2, where
        if case.startswith("theorem-3-T"):
            batch, size = method.batch_size, len(INPUTS[0])
            noise = max(float(x.square().sum(1).mean()) for x in INPUTS) * (size - batch) / (size - 1) / batch
            gap, delta = loss_at_start(experiment), 4 * L_1
            limits = (4 * gap / (4 * L_1 * noise * T)) ** 0.5, (4 * gap / (128 * L_1**2 * delta * T)) ** (1 / 3)
            assert eta == pytest.approx(min(limits), rel=5e-3), where


def test_constants_bound_derivatives_at_any_point(short) -> None:
    study, runs, _ = short
    experiment, run = study.cases[1].experiments["noisy c"], runs["theorem-2"]["noisy c"][0]
    found = constants(experiment, run)
    final = RunFolder(run.folder).read_result()[0]["server.shared.classifier.weight"].double()[:, 0]
    R = float(final.norm(dim=1).max())
    assert math.isclose(found.L_1, L_1)
    exact = study.cases[0].experiments["E=1"], runs["corollary-o1"]["E=1"][0]
    assert constants(*exact).gap == pytest.approx(loss_at_start(exact[0]), rel=1e-5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        theta = torch.randn(2, 2, generator=generator).double()
        theta *= R / theta.norm(dim=1).max()
        first, both = torch.rand(1, generator=generator).double(), []
        c = torch.cat([first, 1 - first])
        for own in CLIENTS:
            x, y = own.x.double(), own.y.double().flatten()
            assert float(torch.linalg.matrix_norm(jacrev(grad(loss))(theta, c, x, y).reshape(4, 4), 2)) <= found.L_1
            assert 0.5 * float(jacrev(grad(loss, argnums=1), argnums=1)(theta, c, x, y).abs().max()) <= found.L_2
            for at, limit in ((0, found.sigma_1), (1, found.sigma_2)):
                one_by_one = vmap(grad(loss, argnums=at), in_dims=(None, None, 0, 0))
                each = one_by_one(theta, c, x[:, None], y[:, None]).flatten(1)
                spread = (each - each.mean(0)).square().sum(1).mean()
                assert float(spread) * (60 - 10) / 59 / 10 <= limit
            both.append(grad(loss)(theta, c, x, y))
        together = sum(both) / 2
        assert float(sum((g - together).square().sum() / 2 for g in both)) <= 4 * found.L_1


def test_the_bound_falls_as_one_over_t_without_noise_and_else_to_a_floor() -> None:
    method = EXPERIMENTS["corollary-o1", "E=1"].algorithm
    exact = Constants(L_1=0.3, L_2=0.1, sigma_1=0, sigma_2=0, delta=0, gap=0.5, clients=2)
    noisy = exact._replace(sigma_1=0.2, delta=0.1)
    for own in (method, method.model_copy(update={"order": "alternating"})):
        assert theorem_bound(own, exact, 200) == pytest.approx(theorem_bound(own, exact, 100) / 2)
        floor = theorem_bound(own, noisy, 10**12)
        assert theorem_bound(own, noisy, 100) == pytest.approx(floor + theorem_bound(own, exact, 100))
        assert floor > 0


def test_means_are_those_of_the_recorded_measure_and_stay_below_the_bound(short) -> None:
    study, runs, _ = short
    found = all_series(study, runs)
    assert len(found) == sum(len(case.experiments) for case in study.cases)
    for own in found:
        case = next(case.name for case in study.cases if PROMISES[case.name.split("-T")[0]] == own.promise)
        measured = [row["stationarity"] for row in runs[case][own.label][0].metrics]
        assert own.means == pytest.approx({T: fmean(measured[:T]) for T in own.means})
        assert set(own.means) == ({16} if "-T" in case else {4, 8, 16})
        assert all(mean < own.bounds[T] for T, mean in own.means.items())


def test_slopes_are_powers_of_t_and_the_chart_has_the_promised_one(short) -> None:
    assert fitted_slope({T: 3 * T**-0.5 for T in (10, 30, 700)}) == pytest.approx(-0.5)
    assert math.isnan(fitted_slope({10: 1.0}))
    study, runs, _ = short
    lines = chart_lines(all_series(study, runs), full_gradients=True)
    (first, start), (last, end) = lines["T^-1"]
    assert math.log(end / start) / math.log(last / first) == pytest.approx(-1)
    assert "Cor. O1, E=1" in lines and "Cor. 1, E=1" not in lines


def test_tables_and_page_have_one_row_per_series_one_sentence_per_theorem_and_both_charts(short) -> None:
    study, runs, page = short
    measured, bounds = study_tables(study, runs)
    assert len(measured.rows) == len(bounds.rows) == 8
    assert [line.count("promises") for line in measured.note.splitlines()] == [1, 1, 1, 1]
    by_horizon = [row for row in measured.rows if row[0].startswith("Corollary 1,")]
    assert {dict(zip(measured.columns, row, strict=True))["slope"] for row in by_horizon} == {"–"}, "one T, no slope"
    text = page.read_text()
    assert "Accuracies" not in text and text.count(" promises ") == 4
    for name, label in (("full-gradients", "Thm. 3, E=2"), ("batches", "Thm. 2, noisy c")):
        assert f"(convergence-{name}.svg)" in text
        texts = [element.text for element in ET.parse(page.with_name(f"convergence-{name}.svg")).iter()]
        assert label in texts and "T" in texts
