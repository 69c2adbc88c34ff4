from random import Random

import disk
import pytest


def test_a_full_or_read_only_disk_costs_nothing(tmp_path):
    trials = list(disk.attack(6, Random("disk"), tmp_path))
    if not trials:
        pytest.skip("a tmpfs cannot be mounted here, which takes root")
    assert [trial.failure for trial in trials if trial.failure] == []
