from random import Random

import corruption


def test_damage_is_refused_or_makes_no_difference(tmp_path):
    trials = list(corruption.attack(60, Random("damage"), tmp_path))
    assert [trial.failure for trial in trials if trial.failure] == []
    assert len(trials) == 60
