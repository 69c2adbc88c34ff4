"""The command line in this process, and an experiment that runs."""

import pytest

from kit.experiments import ppfl_command, write_experiment


@pytest.fixture
def ppfl(capsys):
    """Call `ppfl` with these arguments."""
    return ppfl_command(capsys)


@pytest.fixture
def experiment(tmp_path):
    return write_experiment(tmp_path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which commands are called."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
