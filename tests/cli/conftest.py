"""The command line in this process, and an experiment that runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.experiments import Finished, ppfl_command, write_experiment


@pytest.fixture
def ppfl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Call `ppfl` with these arguments."""
    return ppfl_command(capsys)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return write_experiment(tmp_path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands are called."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
