"""The rounds that are timed move the blocks they are named for, and sizes give the exponents they should."""

import math

import pytest
import torch
from cases import comparisons, growths, many_clients
from convolution_limit import LAYOUTS, convolution_inputs, one_batch
from growth import exponent
from methods import ROUNDS, passes, ppfl
from torch.utils.flop_counter import FlopCounterMode
from workloads import WORKLOADS, Workload, flops

from kit.problems import make_federation, make_net
from ppfl import PPFL

WORKLOAD = Workload(make_net(), make_federation(), batch_size=4)


def moved(theta: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool]:
    """Whether five timed rounds ask clients to move theta, and whether they ask them to move memberships."""
    tasks = []
    plan = PPFL.plan

    def watched(self, *arguments):
        tasks.append(plan(self, *arguments).task)
        return plan(self, *arguments)

    monkeypatch.setattr(PPFL, "plan", watched)
    one_round = ppfl(WORKLOAD, k=2, mix="outputs", theta=theta, steps=steps)
    for _ in range(5):
        assert math.isfinite(one_round().loss)
    ((theta, memberships),) = {(task.theta, task.memberships) for task in tasks}
    return theta, memberships


@pytest.mark.parametrize(("theta", "steps"), [(True, 0), (False, 1), (True, 1)])
def test_a_round_moves_the_blocks_it_is_named_for(theta: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved(theta, steps, monkeypatch) == (theta, steps > 0)


def test_products_are_counted_as_by_hand() -> None:
    d, h, c, n = 4, 5, 3, len(WORKLOAD.federation.train)
    assert flops(WORKLOAD) == (n * 2 * (d * h + h * c), n * 2 * (2 * d * h + 3 * h * c))
    assert passes(k=4, mix="weights", theta=True, steps=0).both == 1
    assert passes(k=4, mix="outputs", theta=True, steps=20) == (4, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_convolution_limit_does_all_convolutions_of_a_step_and_nothing_else(layout: torch.memory_format) -> None:
    net, x = WORKLOADS["convolutions"](clients=1).net, torch.randn(3, 3, 32, 32)
    with FlopCounterMode(display=False) as step:
        net(x).sum().backward()
    run = one_batch(convolution_inputs(net, x), layout)
    with FlopCounterMode(display=False) as alone, torch.no_grad():
        run()
    counts = step.get_flop_counts()["Global"]
    convolutions = {name: count for name, count in counts.items() if "convolution" in str(name)}
    assert len(convolutions) == 2  # forward and backward
    assert alone.get_flop_counts()["Global"] == convolutions


def test_the_exponent_of_a_power_is_its_own() -> None:
    sizes = [10, 40, 90, 500]
    assert exponent([(size, 3 * size**1.3) for size in sizes]) == pytest.approx(1.3)


def test_every_case_names_a_workload_a_method_and_its_plain_loop() -> None:
    for comparison in comparisons():
        labels = [case.label for case in comparison.cases]
        assert len(set(labels)) == len(labels)
    every = [case for one in comparisons() for case in one.cases]
    every += [case for growth in (*growths(), many_clients(10**6)) for curve in growth.cases.values() for case in curve]
    for case in every:
        assert case.workload in WORKLOADS and case.method in ROUNDS
