"""Federations of real processes take turns: two of them at once on one machine are slow, and may want the same port."""

import pytest
from filelock import FileLock


@pytest.fixture(scope="module")
def our_turn(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    with FileLock((base.parent if base.name.startswith("popen-") else base) / "flower.lock"):
        yield
