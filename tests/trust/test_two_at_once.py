from random import Random

import two_at_once


def test_of_several_processes_on_one_folder_one_runs(tmp_path):
    (trial,) = two_at_once.attack(1, Random("two"), tmp_path)
    assert trial.failure is None
