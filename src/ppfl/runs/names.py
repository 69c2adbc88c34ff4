"""Names that become files and folders, the same on every file system."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from ..errors import SettingError
from .storage import PARTIAL

_LONGEST = 255  # bytes of a name, on all usual file systems
MOST_BYTES = 200  # as endings are added
_ALLOWED = "._+-"
_EXPECTED = f"it names a folder: use letters, digits and {' '.join(_ALLOWED)}, with a letter or digit first"
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # in any folder of Windows
_FILES = {"report.html", "memberships.svg"}  # are written beside the folders of methods


def check_folder_name(name: str) -> str:
    """The name, if it can be one folder inside another; else a ValueError that says what to write."""
    if not name or not all(letter in _ALLOWED or unicodedata.category(letter)[0] in "LNM" for letter in name):
        raise ValueError(_EXPECTED)
    if not (name[0].isalnum() or name[0] == "_") or name.endswith("."):
        raise ValueError(f"{_EXPECTED}, and no dot at the end")
    if (size := len(name.encode())) > MOST_BYTES:
        raise ValueError(f"it has {size} bytes and names a folder: use at most {MOST_BYTES}")
    if _DEVICES.fullmatch(name) or name.lower() in _FILES or name.lower().endswith(PARTIAL):
        raise ValueError("it is reserved for a file or device: use another")
    return name


FolderName = Annotated[str, AfterValidator(check_folder_name)]


def checked_name(name: object, where: object) -> str:
    """A name that was read and not yet checked; errors say `where`."""
    try:
        if not isinstance(name, str):
            raise ValueError('it names a folder: write text in quotes, such as name = "first"')
        return check_folder_name(name)
    except ValueError as error:
        raise SettingError(f"{where}: name is {_short(name)}; {error}") from None


def folder_name(label: str, what: str = "method") -> str:
    """A label as a folder: what no file system objects to is kept.

    >>> folder_name("PPFL, mixed weights")
    'PPFL-mixed-weights'
    """
    composed = unicodedata.normalize("NFC", label)
    words = "".join(letter if letter.isalnum() or letter in "._+" else " " for letter in composed).split()
    folder = "-".join(words).strip(".")
    try:
        return check_folder_name(folder.lstrip("+.-"))
    except ValueError as error:
        raise SettingError(f"{what} {_short(label)} would be written to folder {_short(folder)}; {error}") from None


def beside(file: Path, ending: str) -> Path:
    """A file with the name of another and this ending, in the same folder."""
    name = f"{file.stem}{ending}"
    if (size := len(os.fsencode(name))) > _LONGEST:
        raise SettingError(f"{_short(name)} has {size} bytes, file names at most {_LONGEST}; choose another with --out")
    return file.with_name(name)


def same_folder_key(name: str) -> str:
    """Equal for names that some file system takes for the same, whatever their case and how accents are encoded."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _short(name: object) -> str:
    shown = repr(name)
    return shown if len(shown) <= 80 else f"{shown[:76]}...{shown[0]}"
