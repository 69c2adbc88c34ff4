"""The results, targets, tables and picture of the bench, from invented measurements with a known summary."""

from xml.etree import ElementTree

import pytest
from cases import CONVOLUTIONS, FEDAVG, PLAIN_FEDAVG, comparisons, growths, label, many_clients
from growth import Grown
from plot import picture
from results import Compared, Results
from tables import compared_table, grown_table, targets_table
from targets import targets
from turns import Measured

MODEL = 1000
LIMIT = 1e9


def make_measured(case, seconds: float) -> Measured:
    k = case.settings.get("k", 1)
    prepared = {"building_bytes": 2**30, "data_bytes": 2**29, "flops": 0.5 * LIMIT, "model_bytes": MODEL}
    last = {"peak_bytes": 2**28 + 2**29, "up": MODEL + 4 * k, "down": MODEL}
    return Measured(case, prepared, first_seconds=9.0, turns=[seconds / 2, seconds, seconds * 3], last=last)


def made_up_seconds(case) -> float:
    """Seconds per round that meet every target."""
    if case.label.startswith("plain"):
        return 30.0
    return 1.0 if case.settings.get("theta", True) else 0.2


def make_results(fail: str = "") -> Results:
    compared = {}
    for one in comparisons():
        found = {case.label: make_measured(case, made_up_seconds(case)) for case in one.cases}
        if fail:
            found[fail].failed = "its process ended with code -9"
        compared[one.part] = Compared(one.part, one.title, found, LIMIT)
    return Results(compared, [make_grown(growth) for growth in (*growths(), many_clients(10**6))], {1: 2.0, 2: 1.0})


def make_grown(growth) -> Grown:
    curves = {
        method: [(size, make_measured(case, size * 1e-3)) for size, case in zip(growth.sizes, cases, strict=True)]
        for method, cases in growth.cases.items()
    }
    return Grown(growth.part, growth.title, growth.along, curves)


def test_a_measurement_is_the_median_time_and_the_memory_above_the_data() -> None:
    one = make_results().compared["a"].found[FEDAVG]
    assert (one.seconds, one.peak, one.above_data) == (1.0, 2**30, 2**28)


def test_speedups_are_against_the_plain_loop_that_does_the_same_work() -> None:
    a = make_results().compared["a"]
    assert a.times_faster(FEDAVG) == 30
    assert a.times_faster(label(4, "outputs", True, 1)) == 30
    assert a.times_faster(label(4, "outputs", True, 0)) is None
    assert a.of_limit(FEDAVG) == pytest.approx(0.5)


def test_targets_are_met_by_good_measurements_only() -> None:
    assert {one.part for one in targets(make_results())} == set("abcdef")
    assert all(one.met for one in targets(make_results()))
    worse = make_results()
    worse.compared["c"].found[FEDAVG].turns[:] = [31.0]
    worse.grown[0].curves["PPFL weights"][2][1].last["up"] += 4
    worse.ranks[2] = 1.9
    assert [one.what.split()[0] for one in targets(worse) if not one.met] == ["upload", "FedAvg", "two"]


def test_failed_cases_are_marked_and_the_rest_is_reported() -> None:
    results = make_results(fail=FEDAVG)
    assert {one.met for one in targets(results)} == {None, True}
    assert "code -9" in compared_table(results.compared["b"])
    results.grown[-1].curves["PPFL predictions"][2][1].failed = "its process ended with code -9"
    assert "exponent 1.00" in grown_table(results.grown[-1])
    assert "not measured" in targets_table(targets(results))
    assert ElementTree.fromstring(picture(results)).tag.endswith("svg")


def test_rounds_are_compared_with_their_convolutions_alone() -> None:
    c = make_results().compared["c"]
    c.found[CONVOLUTIONS].turns[:] = [0.4]
    assert f"of the convolution limit: {PLAIN_FEDAVG} 1%, {FEDAVG} 40%" in compared_table(c)
    c.found[CONVOLUTIONS].failed = "its process ended with code -9"
    assert "convolution limit" not in compared_table(c)


def test_the_picture_has_one_bar_per_case_and_one_dot_per_size() -> None:
    drawn = list(ElementTree.fromstring(picture(make_results())).iter())
    bars = sum(len(one.cases) for one in comparisons())
    dots = sum(len(curve) for growth in (*growths(), many_clients(10**6)) for curve in growth.cases.values())
    assert [sum(node.tag.endswith(tag) for node in drawn) for tag in ("rect", "circle")] == [bars, dots]


def test_parts_that_were_not_run_are_left_out() -> None:
    nothing = Results({}, [], {})
    assert targets(nothing) == []
    assert ElementTree.fromstring(picture(nothing)).tag.endswith("svg")
