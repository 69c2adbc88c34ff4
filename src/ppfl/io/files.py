"""Files that are written whole or not at all, JSON with its digest, logs that only grow, and names of folders.

A file is written beside its place, flushed and renamed, so a kill at any instant leaves the old file or the new one.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import tomli_w
from pydantic import AfterValidator

from ..errors import CheckpointError, SettingError, WriteError

PARTIAL = ".partial"
_DIGEST = "sha256"  # the last key of JSON files


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of writing a file into one that names it."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({error.strerror or error}); free some space or choose another place: "
            f"what was there before is unchanged"
        ) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` at the end, or is removed after an error."""
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            # a folder that others cannot read keeps its files from them
            partial.chmod(partial.stat().st_mode & path.parent.stat().st_mode & 0o777)
            partial.replace(path)
            flush(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # where folders cannot be opened, renaming is durable by itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where it is not there."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write to `path`, whole or not at all."""
    with atomic_write(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write text to `path`, whole or not at all."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_toml(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as TOML to `path`, whole or not at all; TOML has no null, so None values are left out."""
    write_text(path, toml_text(settings))


def toml_text(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, without None values."""
    return tomli_w.dumps(_without_none(settings))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON to `path`, whole or not at all, with the SHA-256 of the rest under the last key."""
    whole = {**content, _DIGEST: digest_of(content)}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # a lone surrogate becomes a backslash and its number, which is how JSON writes it
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        content = json.loads(path.read_bytes())
        said = content.pop(_DIGEST)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; check the folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"cannot be read ({' '.join(str(error).split())})") from None
    except (KeyError, TypeError, AttributeError):
        raise damaged(path, f"has no {_DIGEST}") from None
    if said != digest_of(content):
        raise damaged(path, f"has changed since it was written: its content does not have its {_DIGEST}")
    return dict(content)


def digest_of(content: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON, however it is laid out in a file.

    >>> digest_of({"round": 3}) == sha256(b'{"round":3}').hexdigest()
    True
    """
    return sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


class Log:
    """A file that only grows. Its mark, the length and the SHA-256 so far, lets a reader see what has changed since.

    What stands behind the last mark may have been cut short by a kill; it is cut off before the work goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._length = 0
        self._hash: Any = None  # of what is in the file, once it is written to

    def append(self, content: bytes) -> None:
        """Add bytes at the end of the file, which must be there still."""
        with writing(self.path), self.path.open("r+b") as file:
            digest = self._begun()
            file.seek(0, os.SEEK_END)
            file.write(content)
            digest.update(content)
            self._length += len(content)

    def mark(self) -> dict[str, Any]:
        """The length and the SHA-256 of the file, which is safe against a crash of the system then."""
        with writing(self.path):
            flush(self.path)
            digest = self._begun().hexdigest()
            return {"bytes": self._length, _DIGEST: digest}

    def read(self, mark: Mapping[str, Any] | None = None, *, whole: bool = False) -> bytes:
        """The content, whose beginning must be as it was at this mark; `whole`: and nothing may follow it."""
        try:
            content = self.path.read_bytes() if mark is not None or self.path.is_file() else b""
        except OSError as error:
            raise damaged(self.path, f"cannot be read ({error.strerror})") from None
        if mark is not None:
            length = mark["bytes"]
            if len(content) < length or (whole and len(content) > length):
                raise damaged(self.path, f"has {len(content):,} bytes where it had {length:,}")
            if sha256(memoryview(content)[:length]).hexdigest() != mark[_DIGEST]:
                raise damaged(self.path, f"has changed since it was written: its content does not have its {_DIGEST}")
        return content

    def cut(self, mark: Mapping[str, Any] | None) -> None:
        """Cut off what came after this mark; None: everything."""
        with writing(self.path):
            os.truncate(self.path, 0 if mark is None else mark["bytes"])
        self._hash = None

    def _begun(self) -> Any:
        if self._hash is None:
            content = self.path.read_bytes()
            self._length, self._hash = len(content), sha256(content)
        return self._hash


def damaged(path: Path, fault: str) -> CheckpointError:
    """The error for a file that cannot be trusted."""
    return CheckpointError(
        f"{path} {fault}; it is damaged or of another version: nothing was changed, start again in another folder"
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------- names, the same on every file system

_LONGEST = 255  # bytes of a name, on all usual file systems
MOST_BYTES = 200  # of a folder, as endings are added
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


def sibling_path(file: Path, ending: str) -> Path:
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
