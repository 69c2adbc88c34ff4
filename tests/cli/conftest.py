"""The command line in this process, as a shell would see it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ppfl.cli import main

TEXT = """
rounds = 4

[data]
name = "synthetic_groups"
n_clients = 6
groups = 2
dim = 3
samples = 9
test_points = 4

[model]
name = "linear"

[population]
k = 2

[algorithm]
name = "ppfl"
lr = 0.3
"""


class Finished(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def ppfl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Call `ppfl` with these arguments."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        return Finished(int(exit.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment that runs."""
    file = tmp_path / "groups.toml"
    file.write_text(TEXT)
    return file


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    def take(folder: Path) -> dict[str, bytes]:
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}

    return take
