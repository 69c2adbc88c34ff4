"""Memory that is used again: never for two buffers at the same time, and again after a frame."""

import itertools
import resource
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.workspace import Workspace, keep_freed_memory

LIKE = {dtype: torch.zeros((), dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)}
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
STEPS = st.lists(st.one_of(st.sampled_from(["enter", "leave"]), st.tuples(SHAPES, st.sampled_from(list(LIKE)))))


@given(STEPS)
def test_buffers_that_are_in_use_keep_their_values_whatever_is_taken_and_freed(steps: list) -> None:
    """Frames in any order of entering and leaving, buffers of any shape and type."""
    space, number = Workspace(), 0
    frames: list[tuple[ExitStack, list]] = [(ExitStack(), [])]
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
        assert no_overlap([buffer for buffer, _ in in_use])


def no_overlap(buffers: list[torch.Tensor]) -> bool:
    """Whether no two of them have memory in common."""
    spans = sorted((b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in buffers if b.numel())
    return all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@given(st.lists(SHAPES, min_size=1), st.randoms())
def test_after_a_frame_the_same_memory_is_used_again(shapes: list, random) -> None:
    space, like = Workspace(), LIKE[torch.float32]
    with space.frame():
        first = {space.empty((64,), like).data_ptr() for _ in shapes}
    with space.frame():
        again = {space.empty(shape, like).data_ptr() for shape in random.sample(shapes, len(shapes))}
    assert again <= first | {0}  # an empty tensor has no memory


def test_a_buffer_that_is_too_small_is_replaced_and_the_larger_one_kept() -> None:
    space, like = Workspace(), LIKE[torch.float32]
    pointers = []
    for size in (3, 10, 7):
        with space.frame():
            pointers.append(space.empty((size,), like).data_ptr())
    assert pointers[1] == pointers[2]


def test_an_error_inside_a_frame_frees_what_it_took() -> None:
    space, like = Workspace(), LIKE[torch.float32]
    taken = []

    def fail() -> None:
        with space.frame():
            taken.append(space.empty((5,), like).data_ptr())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [space.empty((5,), like).data_ptr()] == taken


def test_copies_are_of_the_same_values_and_can_be_written_to() -> None:
    space = Workspace()
    params = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5)}
    copies = space.copies(params, 4)
    assert {name: tuple(leaf.shape) for name, leaf in copies.items()} == {"a": (4, 2, 3), "b": (4,)}
    for name, leaf in copies.items():
        assert leaf.equal(params[name].expand_as(leaf))
        leaf[0] += 1
        assert leaf[1].equal(params[name])
    assert params["a"].equal(torch.arange(6.0).reshape(2, 3))
    assert {name: leaf.shape for name, leaf in space.empty_like(copies).items()} == {
        n: v.shape for n, v in copies.items()
    }


def new_pages_of_a_step() -> int:
    """How many pages the system has to give for a step that takes 96 MB and frees them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [torch.zeros(2**21) for _ in range(12)]
    del taken
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_that_was_freed_is_used_again_in_the_next_step() -> None:
    if not keep_freed_memory():
        pytest.skip("without glibc, or with settings of its own in the environment")
    new_pages_of_a_step()
    assert new_pages_of_a_step() < 12 * 2**23 // resource.getpagesize() // 10


def test_settings_of_the_environment_are_left_alone(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
