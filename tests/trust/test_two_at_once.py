from random import Random

import two_at_once


def test_of_several_processes_on_one_folder_one_runs(tmp_path):
    trials = list(two_at_once.attack(2, Random("two"), tmp_path))
    assert [trial.failure for trial in trials] == [None, None]
