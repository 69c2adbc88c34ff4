"""Small experiments, and folders compared byte by byte."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.experiments import file_bytes, small_experiment
from ppfl.runs import Experiment


@pytest.fixture
def make_experiment() -> Callable[..., Experiment]:
    return small_experiment


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    return file_bytes
