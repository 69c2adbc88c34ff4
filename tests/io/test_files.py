"""Files are written whole or not at all and found where they were changed; names of folders work on every system."""

import json
import os
import tomllib
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import CheckpointError, SettingError, WriteError, assert_refused
from ppfl.io.files import (
    MOST_BYTES,
    Log,
    atomic_write,
    checked_name,
    folder_name,
    read_json,
    same_folder_key,
    write_json,
    write_toml,
)


def test_a_file_is_as_open_as_its_folder_and_nothing_is_left_beside_it(tmp_path):
    tmp_path.chmod(0o750)
    with atomic_write(tmp_path / "a") as file:
        file.write(b"a")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    path.with_name(f"{path.name}.partial").write_bytes(b"left by a kill")

    def stop_half_way():
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    def fail(_handle):
        raise OSError(28, "No space left on device")

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    monkeypatch.setattr(os, "fsync", fail)
    assert_refused(lambda: write_json(path, {"a": 2}), WriteError, "cannot be written (No space")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_is_as_it_was_at_a_mark_or_is_refused(tmp_path):
    path = tmp_path / "a.log"
    assert_refused(lambda: Log(path).append(b"x"), WriteError, "a.log cannot be written (No such file")
    path.touch()
    first = Log(path)
    first.append(b"one ")
    first.append(b"two ")
    mark = first.mark()
    Log(path).append(b"thr")  # by another process, which was killed
    assert Log(path).read(mark) == Log(path).read() == b"one two thr"
    assert_refused(lambda: Log(path).read(mark, whole=True), CheckpointError, "a.log has 11 bytes where it had 8")
    second = Log(path)
    second.cut(mark)
    second.append(b"three")
    assert Log(path).read(second.mark(), whole=True) == b"one two three"
    for content in (b"one twO three", b"one two", b""):
        path.write_bytes(content)
        assert_refused(lambda: Log(path).read(mark), CheckpointError, "a.log", "nothing was changed")
    path.unlink()
    assert_refused(lambda: Log(path).read(mark), CheckpointError, "a.log cannot be read")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5).filter(lambda key: key != "sha256"), JSON, max_size=4), st.data())
def test_json_comes_back_and_a_changed_byte_is_noticed_or_changes_nothing(tmp_path_factory, content, data):
    path = tmp_path_factory.getbasetemp() / "a.json"
    write_json(path, content)
    assert read_json(path) == content
    assert [*json.loads(path.read_bytes())][-1] == "sha256"
    whole = path.read_bytes()
    at, flip = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
    try:
        assert json.dumps(read_json(path)) == json.dumps(content), "as where a space became a tab"
    except CheckpointError as error:
        assert "a.json" in str(error)  # noqa: PT017


def test_json_that_is_no_object_or_missing_or_too_deep_is_refused(tmp_path):
    path = tmp_path / "a.json"
    assert_refused(lambda: read_json(path), CheckpointError, "there is no")
    for text in ("", "[1]", "3", "{}", '{"a": 1}', "[" * 10**5, '{"a": 1, "sha256": 5}'):
        path.write_text(text)
        assert_refused(lambda: read_json(path), CheckpointError, "a.json", "nothing was changed")


FLAT = st.dictionaries(
    st.text(min_size=1, max_size=5), st.integers(-9, 9) | st.booleans() | st.text(max_size=5), max_size=3
)


@given(FLAT | st.dictionaries(st.text(min_size=1, max_size=5), FLAT, max_size=3))
def test_settings_survive_a_round_trip_through_toml(tmp_path_factory, settings):
    """Infinity and lists of tables too; what is None is left out."""
    file = tmp_path_factory.getbasetemp() / "settings.toml"
    kept = {"settings": settings, "limit": float("inf"), "methods": [{"lr": 0.1}, {"lr": 1.0, "seeds": [0, 1]}]}
    write_toml(file, {**kept, "path": None})
    assert tomllib.loads(file.read_text(encoding="utf-8")) == kept


BAD = ["", ".", "..", "../../x", "/etc", "a/b", "a\\b", "a\0b", "a\nb", "a\x1b[31m", "x.", "CON", "nul.txt", "-rf"]
BAD += ["report.html", "Memberships.SVG", "a.partial", "é" * MOST_BYTES, "\ud800", "a:b", "a b", 5, None, ["x"]]
GOOD = ["table1", "k-sweep", "a.b+c_d", "7", "_x", "ünïcode", "हिन्दी", "x" * MOST_BYTES]


def test_names_that_file_systems_refuse_or_misread_are_refused():
    for name in BAD:
        assert_refused(lambda: checked_name(name, "here"), SettingError, "here: name is ")
    assert [checked_name(name, "here") for name in GOOD] == GOOD


@given(st.text() | st.text("./\\ -+\0\n\x1baé", max_size=8))
def test_a_folder_of_a_label_is_one_good_name_or_is_refused_with_the_label(label):
    """And case and the encoding of accents make no other folder."""
    composed, decomposed = (unicodedata.normalize(form, label) for form in ("NFC", "NFD"))
    assert same_folder_key(composed) == same_folder_key(decomposed)
    assert same_folder_key(label.casefold()) == same_folder_key(label)
    try:
        folder = folder_name(label)
    except SettingError as error:
        refused = str(error)
        assert repr(label)[:40] in refused
        return
    assert checked_name(folder, "here") == folder
    assert (Path("runs") / folder).parent == Path("runs")
    assert len(f"{folder}.partial".encode()) < 255
