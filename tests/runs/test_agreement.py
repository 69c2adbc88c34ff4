"""Agreement with the truth does not depend on the order of canonical models, and no matching does better."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from ppfl.core.simplex import harden, total_variation
from ppfl.runs import group_agreement
from ppfl.runs.agreement import told_apart

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))


def draw(clients: int, k: int, true: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(clients, n, generator=generator, dtype=torch.float64) + 0.01 for n in (k, true))
    found, truth = (c / c.sum(1, keepdim=True) for c in rows)
    return found, truth


@given(SHAPES)
def test_no_matching_does_better(shape):
    found, truth = draw(*shape)
    k = max(found.shape[1], truth.shape[1])
    a, b = (pad(c, (0, k - c.shape[1])) for c in (found, truth))
    orders = [list(order) for order in permutations(range(k))]
    agreement = group_agreement(found, truth)
    best_share = max(float((harden(a) * harden(b)[:, order]).sum(1).mean()) for order in orders)
    assert agreement.share == pytest.approx(best_share)
    assert agreement.distance == pytest.approx(min(float(total_variation(a, b[:, order]).mean()) for order in orders))


@given(SHAPES)
def test_canonical_models_have_no_order(shape):
    found, truth = draw(*shape)
    shuffled = found[:, torch.randperm(found.shape[1], generator=torch.Generator().manual_seed(1))]
    assert group_agreement(shuffled, truth) == pytest.approx(group_agreement(found, truth))


@given(SHAPES)
def test_the_truth_agrees_with_itself(shape):
    _, truth = draw(*shape)
    assert group_agreement(truth, truth) == pytest.approx((1.0, 0.0))


@given(SHAPES)
def test_told_apart_is_the_nearest_mean_of_the_others(shape):
    found, truth = draw(*shape)
    group = truth.argmax(1).tolist()
    right = 0
    for i, mine in enumerate(found):
        members = {g: [found[j] for j in range(len(group)) if group[j] == g and j != i] for g in set(group)}
        distances = {g: float((torch.stack(rows).mean(0) - mine).norm()) for g, rows in members.items() if rows}
        right += bool(distances) and min(distances, key=distances.__getitem__) == group[i]
    assert told_apart(found, truth) == pytest.approx(right / len(group))
