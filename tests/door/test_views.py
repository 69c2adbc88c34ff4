"""What a fit and a comparison show in Python: DataFrames by client id, charts, and one page."""

import numpy as np
import pytest
import torch

from kit.problems import make_federation, make_net
from kit.refusals import SettingError, assert_refused
from ppfl import PPFL, FedAvg, Population, Watch, compare, fit
from ppfl.runs import metric_name

FEDERATION = make_federation((17, 12, 30, 9, 20), test_fraction=0.3)


@pytest.fixture(scope="module")
def fitted():
    return fit(Population(make_net(), k=3), FEDERATION, PPFL(lr=0.3), rounds=6, watch=Watch(every=2))


def test_frames_have_the_numbers_of_the_fit_by_client_and_by_round(fitted):
    frame = fitted.membership_frame()
    assert list(frame.index) == list(fitted.ids) and list(frame.columns) == ["A", "B", "C"]
    assert frame.mean().is_monotonic_decreasing, "A has the largest share"
    for client in fitted.ids:
        assert sorted(frame.loc[client]) == pytest.approx(sorted(fitted.membership(client).tolist()))
    history = fitted.history_frame()
    assert list(history.index) == [1, 2, 3, 4, 5, 6]
    assert history["loss"].tolist() == [record["loss"] for record in fitted.history]
    scores, record = fitted.score_frame(), fitted.history[-1]
    assert {*scores.index} == {*fitted.ids}
    measured = scores[metric_name(record)].loc[list(fitted.ids)].to_numpy()
    np.testing.assert_allclose(measured, np.array(record["per_client"], dtype=float))


def test_charts_and_the_page_are_those_of_the_fit(fitted, tmp_path):
    for chart in (fitted.plot_memberships(), fitted.plot_simplex(), fitted.plot_history("loss"), fitted.plot_clients()):
        chart.save(tmp_path / "chart.svg")
        assert (tmp_path / "chart.svg").read_text().startswith("<svg")
    page = fitted.report(tmp_path / "page").read_text()
    assert "Population fitted by PPFL" in page and all(client in page for client in fitted.ids)
    assert "How the memberships moved" in page, "memberships of evaluated rounds are kept"
    assert [*fitted.memberships_by_round] == [2, 4, 6]


def test_clients_that_came_later_are_shown_without_a_score(fitted, tmp_path):
    more = fitted.onboard(make_federation((14, 16), test_fraction=0.3).rename(["later-0", "later-1"]))
    scores = more.score_frame()
    assert {*scores.index} == {*more.ids} and scores.iloc[:, -1].isna().sum() == 2
    assert "later-1" in more.report(tmp_path).read_text()


def test_methods_are_compared_on_the_same_data_seed_by_seed(tmp_path):
    population, seeds = Population(make_net(), k=2), (0, 1)
    found = compare(population, FEDERATION, {"ours": PPFL(lr=0.3), "one": FedAvg(lr=0.3)}, rounds=2, seeds=seeds)
    assert {m.label: len(m.runs) for m in found.methods} == {"ours": 2, "one": 2}
    alone = [fit(population, FEDERATION, PPFL(lr=0.3), rounds=2, seed=seed) for seed in seeds]
    expected = [one.history[-1][metric_name(one.history[-1])] for one in alone]
    frame = found.frame.set_index("method")
    assert frame.iloc[:, 0]["ours"] == pytest.approx(np.mean(expected))
    assert {*found.clients["client"]} == {*FEDERATION.ids}
    assert all(name in repr(found) for name in ("ours", "one")) and "<table>" in found._repr_html_()
    assert found.report(tmp_path).is_file()
    for same in ([PPFL(lr=0.1), PPFL(lr=0.2)], []):
        assert_refused(lambda: compare(population, FEDERATION, same), SettingError, "name each")


def test_memberships_that_are_kept_for_charts_are_bounded(monkeypatch):
    monkeypatch.setattr("ppfl.fitting.KEPT_MEMBERSHIPS", 100)
    fitted = fit(Population(make_net(), k=3), FEDERATION, PPFL(lr=0.3), rounds=30)
    kept = fitted.memberships_by_round
    assert sum(c.numel() for c in kept.values()) <= 100 and {1, 30} <= {*kept}
    torch.testing.assert_close(kept[30], fitted.memberships)
