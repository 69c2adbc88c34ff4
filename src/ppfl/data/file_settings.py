"""What the settings of data sets have in common: how much is held out, and where files are looked for."""

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from ppfl.core.settings import Seed, Settings
from ppfl.errors import DataError, SettingError


class HoldoutSettings(Settings):
    """How much of each client's samples is held out."""

    test_fraction: float = Field(0.2, ge=0, lt=1)
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    seed: Seed = 0

    def split(self, **named: Any) -> dict[str, Any]:
        """These settings as keywords of Federation.from_arrays, with others."""
        return {key: getattr(self, key) for key in HoldoutSettings.model_fields} | named


def resolved(path: Path, base: Path | None) -> Path:
    """A path relative to the experiment file (or the working directory); if it does not exist there, in PPFL_DATA."""
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise SettingError(f"{path} cannot be found ({error}); write the whole path") from None
    near = path if base is None else base / path
    far = Path(os.environ.get("PPFL_DATA") or near) / path
    # os.path, because the methods of Path raise for names that no file can have
    return far if os.path.exists(far) and not os.path.exists(near) else near  # noqa: PTH110


def dataset_folder(folder: Path | None, base: Path | None, name: str) -> Path:
    return data_folder(name, f"{name}/") / name if folder is None else resolved(folder, base)


def data_folder(name: str, held: str) -> Path:
    data = os.environ.get("PPFL_DATA")
    if not data:
        raise DataError(f'no folder for {name}; set folder = "..." under [data], or PPFL_DATA to a folder with {held}')
    return Path(data)
