"""Threads, profiles of hypothesis, and the way to real data."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(int(os.environ.get("PPFL_TEST_THREADS", "1")))  # in small tests threads only wait for each other
for name, examples in {"quick": 10, "test": 30, "nightly": 300}.items():
    # no deadline: a busy machine is no error; only the nightly run draws examples anew
    hypothesis.settings.register_profile(name, max_examples=examples, deadline=None, derandomize=name != "nightly")
hypothesis.settings.load_profile(os.environ.get("PPFL_TEST_PROFILE", "test"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of public data sets: PPFL_DATA, or ../shared/data beside the project."""
    folder = Path(os.environ.get("PPFL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set PPFL_DATA to the folder that holds mnist/ and others")
    return folder


@pytest.fixture(autouse=True)
def _same_umask():
    """Commands for sites make what they write private, for the rest of their process."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
