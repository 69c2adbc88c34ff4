"""Text from outside that a terminal would obey is spelled out; memory is used again, never for two at a time."""

import ast
import itertools
import unicodedata
from contextlib import ExitStack, suppress

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.text import visible
from ppfl.core.workspace import Workspace, keep_freed_memory

OBEYED = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\ud800", "\udfff", "\u2028", "\u2029", "\u200b"]
OBEYED += [*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]


def test_what_terminals_obey_is_spelled_as_in_python() -> None:
    for character in OBEYED:
        shown = visible(f"a{character}b")
        assert shown.isascii() and shown.isprintable(), ascii(character)
        assert ast.literal_eval(f"'{shown}'") == f"a{character}b"


@given(st.text(st.characters(categories=["L", "N", "P", "S", "M", "Zs"])))
def test_all_other_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@given(st.text(st.characters()))
def test_one_line_without_controls_that_can_be_written(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert visible(shown) == shown


# ---------------------------------------------------------------------- memory

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
        spans = sorted((b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b, _ in in_use if b.numel())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@given(st.lists(SHAPES, min_size=1), st.randoms())
def test_after_a_frame_the_same_memory_is_used_again(shapes: list, random) -> None:
    space, like = Workspace(), LIKE[torch.float32]
    with suppress(ZeroDivisionError), space.frame():  # also after an error
        first = {space.empty((64,), like).data_ptr() for _ in shapes}
        raise ZeroDivisionError
    with space.frame():
        again = {space.empty(shape, like).data_ptr() for shape in random.sample(shapes, len(shapes))}
    assert again <= first | {0}  # an empty tensor has no memory
    pointers = []
    for size in (3, 1000, 700):  # one that is too small is replaced, and the larger one kept
        with space.frame():
            pointers.append(space.empty((size,), like).data_ptr())
    assert pointers[1] == pointers[2]


def test_copies_are_of_the_same_values_and_can_be_written_to() -> None:
    space, params = Workspace(), {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5)}
    copies = space.copies(params, 4)
    assert {name: tuple(leaf.shape) for name, leaf in copies.items()} == {"a": (4, 2, 3), "b": (4,)}
    for name, leaf in copies.items():
        assert leaf.equal(params[name].expand_as(leaf))
        leaf[0] += 1
        assert leaf[1].equal(params[name])
    assert params["a"].equal(torch.arange(6.0).reshape(2, 3))
    assert all(leaf.shape == copies[name].shape for name, leaf in space.empty_like(copies).items())


def test_memory_settings_of_the_environment_are_left_alone(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
