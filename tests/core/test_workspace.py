"""Memory is never used for two at a time."""

import itertools
from contextlib import ExitStack

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.workspace import Workspace

LIKE = {dtype: torch.zeros((), dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)}
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
STEPS = st.lists(st.one_of(st.sampled_from(["enter", "leave"]), st.tuples(SHAPES, st.sampled_from(list(LIKE)))))


@given(STEPS)
def test_buffers_that_are_in_use_keep_their_values_whatever_is_taken_and_freed(steps):
    space, number, frames = Workspace(), 0, [(ExitStack(), [])]
    for step in steps:
        if step == "enter":
            frames.append((ExitStack(), []))
            frames[-1][0].enter_context(space.frame())
        elif step == "leave":
            if len(frames) > 1:
                frames.pop()[0].close()
        else:
            shape, dtype = step
            number += 1
            buffer = space.empty(shape, LIKE[dtype])
            assert buffer.shape == shape and buffer.dtype == dtype
            frames[-1][1].append((buffer.fill_(number), number))
        in_use = [entry for _, taken in frames for entry in taken]
        assert all(bool((buffer == value).all()) for buffer, value in in_use)
        spans = sorted((b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b, _ in in_use if b.numel())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
