"""Where data files are, how large data may become, and reading files that may be compressed, damaged or hostile.

A small file can describe more than any memory holds, so sizes are checked before, and every failure is an error of
ours. The limits protect a machine, not an experiment, so they are set where the program runs: the environment variable
PPFL_LIMITS, such as "bytes=8e9,classes=1e6", holds for every reader and every command.
"""

import bz2
import gzip
import io
import lzma
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ppfl.errors import DataError, PPFLError, SettingError

LIMITS = {
    "bytes": 2**31,  # of one file after decompression, of drawn data, of K copies of a network
    "classes": 100_000,  # of a target
    "features": 1_000_000,  # of a sample, and columns of a table
    "clients": 10_000_000,  # of a federation
}

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zip")
_ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar")
_QUOTED = 300  # characters of another library's message
_PIECE = 1 << 20  # bytes read at a time


def check_limit(
    name: str, found: int, what: str, remedy: str = "", error: Callable[[str], PPFLError] = DataError
) -> None:
    """Refuse a size above the limit of that name; `what` says whose size it is, `remedy` what may be wrong.

    >>> check_limit("classes", 10, "y has 10 classes")
    """
    most = _limits(os.environ.get("PPFL_LIMITS", ""))[name]
    if found > most:
        raise error(f"{what}, more than the limit of {most:,}; {remedy}set PPFL_LIMITS={name}={_rounded_up(found)}")


@lru_cache(maxsize=1)  # asked for in every round
def _limits(text: str) -> Mapping[str, int]:
    limits = dict(LIMITS)
    for pair in filter(str.strip, text.split(",")):
        name, _, value = map(str.strip, pair.partition("="))
        try:
            limits[name] = int(float(value))
        except (ValueError, OverflowError):
            limits[name] = 0
        if name not in LIMITS or limits[name] < 1:
            raise SettingError(
                f"the limit {pair.strip()!r} in PPFL_LIMITS is none; write whole numbers for some of "
                f"{', '.join(LIMITS)}, such as PPFL_LIMITS=bytes=8e9,classes=1e6"
            )
    return limits


def _rounded_up(size: int) -> str:
    """A number to set a limit to, at least `size` and short.

    >>> _rounded_up(4_000_000_001)
    '5e9'
    """
    zeros = len(str(size)) - 1 if size < 10**100 else 100
    return f"{size // 10**zeros + 1}e{zeros}" if zeros else str(size)


def data_folder(name: str) -> Path:
    """The folder of a data set in PPFL_DATA, where none is given."""
    data = os.environ.get("PPFL_DATA")
    if not data:
        raise DataError(
            f'no folder for {name}; set folder = "..." under [data], or PPFL_DATA to a folder with {name}/ in it'
        )
    return Path(data) / name


def existing_file(path: str | Path, what: str) -> Path:
    """The path, if there is a file; otherwise an error that says what was expected."""
    if not os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises for names that no file can have)
        raise DataError(f"no file {path}; expected {what}: check the path, or set PPFL_DATA to your data folder")
    return Path(path)


def one_line(error: BaseException) -> str:
    """The message of an error in one line, to be quoted in one of our messages.

    >>> one_line(ValueError("first\\nsecond")), one_line(MemoryError())
    ('first second', 'MemoryError')
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


@contextmanager
def reading(path: str | Path, complaint: str, remedy: str) -> Iterator[None]:
    """Whatever a library raises for the content of a file becomes a DataError: damaged files may raise anything."""
    try:
        yield
    except PPFLError:
        raise
    except (Exception, RecursionError) as error:
        raise DataError(f"{path} {complaint} ({one_line(error)}); {remedy}") from error


@contextmanager
def open_bounded(path: Path, text: bool = False) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed as its suffix says; reading more than the limit is an error.

    In a text NUL characters are errors too: pandas drops what follows one in a cell, so that two ids could become one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "a.txt.gz"
    ...     _ = file.write_bytes(gzip.compress(b"text"))
    ...     with open_bounded(file) as stream:
    ...         stream.read()
    b'text'
    """
    if archive := [part for part in path.suffixes if part.lower() in _ARCHIVES]:
        raise DataError(
            f"{path} is an archive ({archive[0]}); extract it first, and compress single files as "
            f"{', '.join(COMPRESSIONS)}"
        )
    with _decompressed(path) as stream, io.BufferedReader(_Bounded(stream, path, text), _PIECE) as bounded:
        yield bounded


def _decompressed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".zip":
        return _only_member(path)
    if suffix == ".zst":
        return _zstandard(path)
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix, io.open)
    return opener(path, "rb")


def _zstandard(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


@contextmanager
def _only_member(path: Path) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        if len(members) != 1:
            raise DataError(f"{path} has {len(members)} files in it; expected one: extract the one you want")
        check_members(archive, path)
        with archive.open(members[0]) as stream:
            yield stream


def check_members(archive: zipfile.ZipFile, path: Path) -> None:
    """The members of a zip file are neither encrypted, nor packed in a way that cannot be bounded, nor too large."""
    members = archive.infolist()
    if locked := [info.filename for info in members if info.flag_bits & 1]:
        raise DataError(f"{path} is encrypted ({locked[0]!r}); decrypt it first")
    if odd := [info for info in members if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]:
        raise DataError(
            f"{path} has {odd[0].filename!r} in compression {odd[0].compress_type}; expected deflate: pack it again"
        )
    check_size(path, sum(info.file_size for info in members))


def check_size(path: Path, size: int) -> None:
    """The content of a file is not too large."""
    check_limit("bytes", size, f"{path} has at least {size:,} bytes when read", "read a part of it, or ")


class _Bounded(io.RawIOBase):
    """A stream that may not be longer than the limit, whatever its headers say."""

    def __init__(self, stream: IO[bytes], path: Path, text: bool) -> None:
        self._stream, self._path, self._text, self._count = stream, path, text, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        content = self._stream.read(len(buffer))
        self._count += len(content)
        check_size(self._path, self._count)
        if self._text and b"\0" in content:
            raise DataError(f"{self._path} contains NUL bytes, so it is not text in UTF-8; save it as csv again")
        buffer[: len(content)] = content
        return len(content)
