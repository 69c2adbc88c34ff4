"""Names that become folders stay inside the folder they belong in, on every file system."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.errors import SettingError
from ppfl.runs.names import MOST_BYTES, checked_name, folder_name, same_folder_key

BAD = ["", ".", "..", "../../x", "/etc", "a/b", "a\\b", "a\0b", "a\nb", "a\x1b[31m", "x.", "CON", "nul.txt", "-rf"]
BAD += ["report.html", "Memberships.SVG", "a.partial", "é" * MOST_BYTES, "\ud800", "a:b", "a b"]


@pytest.mark.parametrize("name", [*BAD, 5, None, ["x"], {"a": 1}])
def test_names_that_file_systems_refuse_or_misread(name: object) -> None:
    with pytest.raises(SettingError, match=r"here: name is .*; it"):
        checked_name(name, "here")


@pytest.mark.parametrize("name", ["table1", "k-sweep", "a.b+c_d", "7", "_x", "ünïcode", "हिन्दी", "x" * MOST_BYTES])
def test_names_that_are_kept(name: str) -> None:
    assert checked_name(name, "here") == name


@given(st.text() | st.text("./\\ -+\0\n\x1baé", max_size=8))
def test_a_folder_of_a_label_is_one_good_name_or_is_refused_with_the_label(label: str) -> None:
    try:
        folder = folder_name(label)
    except SettingError as error:
        refused = str(error)
        assert repr(label)[:40] in refused
        return
    assert checked_name(folder, "here") == folder
    assert (Path("runs") / folder).parent == Path("runs")
    assert len(f"{folder}.partial".encode()) < 255


@given(st.text(max_size=20))
def test_case_and_encoding_of_accents_make_no_other_folder(text: str) -> None:
    assert same_folder_key(unicodedata.normalize("NFD", text)) == same_folder_key(unicodedata.normalize("NFC", text))
    assert same_folder_key(text.casefold()) == same_folder_key(text)
