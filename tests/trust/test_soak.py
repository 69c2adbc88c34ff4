from random import Random

import soak


def test_a_long_run_takes_no_more_than_a_short_one(tmp_path):
    (trial,) = soak.attack(400, Random("soak"), tmp_path)
    assert trial.failure is None
