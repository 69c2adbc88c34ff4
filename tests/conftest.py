"""One thread for the many small tests, and the way to real data."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # threads would only wait for each other
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no error
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of public data sets: PPFL_DATA, or ../shared/data beside the project."""
    folder = Path(os.environ.get("PPFL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set PPFL_DATA to the folder that holds mnist/ and others")
    return folder
