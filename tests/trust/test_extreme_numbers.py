"""The attack with extreme numbers: a small one survives, and what is not finite would be seen."""

from pathlib import Path
from random import Random

import extreme_numbers
import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.mark.filterwarnings("ignore")
def test_a_few_trials_survive(tmp_path: Path) -> None:
    trials = list(extreme_numbers.attack(7, Random(3), tmp_path))
    assert len({trial.attack for trial in trials}) == 7
    assert [trial.failure for trial in trials if trial.failure] == []


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_is_not_finite_is_seen(tmp_path: Path, number: float) -> None:
    (tmp_path / "a.json").write_text('{"x": [1.0, 1e999]}')
    (tmp_path / "a.jsonl").write_text('{"x": 1.0}\n{"x": NaN}\n')
    (tmp_path / "a.csv").write_text(f"x\n1.0\n{number}\n")
    save_file({"x": np.array([1.0, number])}, tmp_path / "a.safetensors")
    for file in tmp_path.iterdir():
        assert not extreme_numbers._is_finite(file), file
