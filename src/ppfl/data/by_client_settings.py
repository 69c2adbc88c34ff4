"""`[data]` of data sets whose files have clients of their own: writers, roles and users."""

from pathlib import Path
from typing import Literal

from ppfl.core.settings import Count
from ppfl.data.federation import Federation
from ppfl.data.femnist import read_femnist
from ppfl.data.file_settings import HoldoutSettings, dataset_folder, resolved
from ppfl.data.shakespeare import read_shakespeare
from ppfl.data.stackexchange import read_stackexchange
from ppfl.errors import SettingError


class _ByClientSettings(HoldoutSettings):
    folder: Path | None = None
    file: Path | None = None  # one file, instead of what is found in the folder
    clients: Count | None = None  # so many at random; all if not given

    def _path(self, base: Path | None, name: str) -> Path:
        if self.file is None:
            return dataset_folder(self.folder, base, name)
        if self.folder is not None:
            raise SettingError(f"data set {name} has both folder and file; set one of them under [data]")
        return resolved(self.file, base)


class Femnist(_ByClientSettings):
    """Handwritten characters; clients are writers."""

    name: Literal["femnist"] = "femnist"
    min_samples: Count = 30
    image: bool = True  # with a channel axis; 784 numbers if false

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative path starts at `base`."""
        path = self._path(base, "femnist")
        return read_femnist(path, self.min_samples, self.clients, self.image, **self.split())


class Shakespeare(_ByClientSettings):
    """Next character in Shakespeare's plays; clients are roles."""

    name: Literal["shakespeare"] = "shakespeare"
    length: Count = 80
    min_samples: Count = 1

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative path starts at `base`."""
        path = self._path(base, "shakespeare")
        return read_shakespeare(path, self.length, self.min_samples, self.clients, **self.split())


class StackExchange(_ByClientSettings):
    """Next word in questions and answers; clients are users."""

    name: Literal["stackexchange"] = "stackexchange"
    length: Count = 20
    words: Count = 10_000
    min_words: Count = 500

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative path starts at `base`."""
        path = self._path(base, "stackexchange")
        return read_stackexchange(path, self.length, self.words, self.min_words, self.clients, **self.split())
