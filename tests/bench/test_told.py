"""What the bench tells of a run: made-up measurements, so that what must be said is known."""

from xml.etree import ElementTree

import pytest
from cases import FEDAVG, comparisons, growths, label, million
from growth import Grown
from plot import picture
from results import Compared, Results
from tables import compared_table, grown_table, targets_table
from targets import targets
from turns import Measured

MODEL = 1000
LIMIT = 1e9


def measured(case, seconds: float) -> Measured:
    k = case.settings.get("k", 1)
    prepared = {"building_bytes": 2**30, "data_bytes": 2**29, "flops": 0.5 * LIMIT, "model_bytes": MODEL}
    last = {"peak_bytes": 2**28 + 2**29, "up": MODEL + 4 * k, "down": MODEL}
    return Measured(case, prepared, first_seconds=9.0, turns=[seconds / 2, seconds, seconds * 3], last=last)


def seconds_of(case) -> float:
    """As if every target were met."""
    if case.label.startswith("plain"):
        return 30.0
    return 1.0 if case.settings.get("theta", True) else 0.2


def made_up(fail: str = "") -> Results:
    compared = {}
    for one in comparisons():
        found = {case.label: measured(case, seconds_of(case)) for case in one.cases}
        if fail:
            found[fail].failed = "its process ended with code -9"
        compared[one.part] = Compared(one.part, one.title, found, LIMIT)
    return Results(compared, [grown(growth) for growth in (*growths(), million(10**6))], {1: 2.0, 2: 1.0})


def grown(growth) -> Grown:
    curves = {
        method: [(size, measured(case, size * 1e-3)) for size, case in zip(growth.sizes, cases, strict=True)]
        for method, cases in growth.cases.items()
    }
    return Grown(growth.part, growth.title, growth.along, curves)


def test_a_measurement_is_its_median_and_its_memory_is_above_the_data() -> None:
    one = made_up().compared["a"].found[FEDAVG]
    assert (one.seconds, one.peak, one.above_data) == (1.0, 2**30, 2**28)


def test_ratios_are_to_the_loop_of_the_same_work() -> None:
    a = made_up().compared["a"]
    assert a.times_faster(FEDAVG) == 30
    assert a.times_faster(label(4, "outputs", True, 1)) == 30
    assert a.times_faster(label(4, "outputs", True, 0)) is None
    assert a.of_limit(FEDAVG) == pytest.approx(0.5)


def test_targets_are_met_where_all_is_well_and_only_there() -> None:
    assert {one.part for one in targets(made_up())} == set("abcde")
    assert all(one.met for one in targets(made_up()))
    worse = made_up()
    worse.compared["c"].found[FEDAVG].turns[:] = [31.0]
    worse.grown[0].curves["PPFL weights"][2][1].last["up"] += 4
    worse.ranks[2] = 1.9
    assert [one.what.split()[0] for one in targets(worse) if not one.met] == ["upload", "FedAvg", "two"]


def test_what_failed_is_not_measured_and_the_rest_is_told() -> None:
    results = made_up(fail=FEDAVG)
    assert {one.met for one in targets(results)} == {None, True}
    assert "code -9" in compared_table(results.compared["b"])
    results.grown[-1].curves["PPFL predictions"][2][1].failed = "its process ended with code -9"
    assert "exponent 1.00" in grown_table(results.grown[-1])
    assert "not measured" in targets_table(targets(results))
    assert ElementTree.fromstring(picture(results)).tag.endswith("svg")


def test_the_picture_has_a_bar_a_case_and_a_dot_a_size() -> None:
    drawn = list(ElementTree.fromstring(picture(made_up())).iter())
    bars = sum(len(one.cases) for one in comparisons())
    dots = sum(len(curve) for growth in (*growths(), million(10**6)) for curve in growth.cases.values())
    assert [sum(node.tag.endswith(tag) for node in drawn) for tag in ("rect", "circle")] == [bars, dots]


def test_parts_that_were_not_asked_for_are_not_told() -> None:
    nothing = Results({}, [], {})
    assert targets(nothing) == []
    assert ElementTree.fromstring(picture(nothing)).tag.endswith("svg")
