"""A small part of the fuzzing campaign: hostile files and settings end in a valid object or in an error of ours."""

import contextlib
from random import Random

import fuzz
import hostile_settings
import pytest
from hostile_client_files import CLIENT_FORMATS
from hostile_files import read
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfl.core.errors import PPFLError

pytest.importorskip("h5py")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


@pytest.mark.parametrize("make", [fuzz.files, fuzz.settings])
def test_hostile_inputs_end_in_a_valid_object_or_an_error_of_ours(tmp_path, monkeypatch, make):
    monkeypatch.setenv("PPFL_LIMITS", fuzz.SMALL)
    with fuzz.alarms():
        for number in range(120):
            name, use, content = make(Random(number), tmp_path)
            failure = fuzz.survives(use)
            assert failure is None, f"{name} from {number}, {content[:200]!r}: {failure}"


@pytest.mark.parametrize("at", range(len(CLIENT_FORMATS)))
def test_files_by_client_are_valid_until_they_are_changed(tmp_path, at):
    """Most of them are: a fuzzer whose files are all refused at once reaches nothing."""
    name, suffix, make = CLIENT_FORMATS[at]
    valid = 0
    for number in range(20):
        path = tmp_path / f"input{suffix}"
        path.write_bytes(make(Random(number)))
        with contextlib.suppress(PPFLError):
            valid += bool(read(path, Random(number)))
    assert valid >= 5, name


def test_a_batch_reports_every_input_and_its_figures(tmp_path):
    trials = list(fuzz.attack(1, Random(0), tmp_path))
    assert len([trial for trial in trials if trial.attack.startswith("files: ")]) == 1
    assert all(trial.failure is None and max(trial.figures.values()) > 0 for trial in trials)


def test_a_traceback_and_a_message_of_several_lines_are_failures():
    def fails():
        raise KeyError("x")

    assert "KeyError" in fuzz.survives(fails)
    assert fuzz.survives(dict) is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(hostile_settings.NUMBERS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(hostile_settings.KEYS), inner, max_size=3)
    ),
    max_leaves=8,
)
TABLES = ["data", "model", "population", "algorithm", "affinity", "watch"]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*TABLES, "name", "rounds", "seeds"]), VALUES), st.integers(0, 2**32))
def test_tables_of_any_values_are_checked_or_explained(changes, seed):
    changes |= {"data": {"name": "nowhere"}} if "data" not in changes else {}
    assert (
        fuzz.survives(lambda: hostile_settings.check_and_build(hostile_settings.experiment(Random(seed)) | changes))
        is None
    )


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_text_after_set_is_a_setting_or_an_error_of_ours(text):
    from ppfl.runs.load import set_by_text

    assert fuzz.survives(lambda: set_by_text({"data": {}, "rounds": 1}, text)) is None
