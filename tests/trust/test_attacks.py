"""A small trial of each attack; the scripts in trust/ are the campaigns."""

import contextlib
import signal
from random import Random

import browser
import corruption
import disk
import extreme_numbers
import fuzz
import hostile_text
import kills
import numpy as np
import pytest
import soak
import two_at_once
from hostile_client_files import CLIENT_FORMATS
from hostile_files import read
from safetensors.numpy import save_file

from kit.refusals import PPFLError

SLOW = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("script", "trials"),
    [(corruption, 30), (disk, 3), (extreme_numbers, 7), (hostile_text, 8)]
    + [pytest.param(soak, 400, marks=SLOW), pytest.param(two_at_once, 2, marks=[SLOW, pytest.mark.processes])],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_few_trials_survive(script, trials: int, tmp_path) -> None:
    found = list(script.attack(trials, Random(1), tmp_path))
    if script is disk and not found:
        pytest.skip("a tmpfs cannot be mounted here, which takes root")
    assert [trial.failure for trial in found if trial.failure] == []
    assert len(found) == (1 if script is soak else trials)


@SLOW
@pytest.mark.processes
def test_killed_commands_go_on_with_nothing_lost_and_nobody_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kills, "ROUNDS", 40)
    stops = "run KILL, run TERM, run INT, resume KILL, report TERM, start INT, comparison KILL, comparison INT"
    asked = [tuple(stop.split()) for stop in f"{stops}, worker KILL, torchrun KILL".split(", ")]
    assert {f"kill_{kind}" for kind, _ in asked} == {name for name in vars(kills.Place) if name.startswith("kill_")}
    with kills.ForkServer() as server:
        place = kills.Place(server, tmp_path, Random("kills"))
        for kind, stop in asked:
            trial = getattr(place, f"kill_{kind}")(signal.Signals[f"SIG{stop}"])
            assert trial.failure is None, f"{trial.attack}: {trial.failure}"


@pytest.mark.parametrize("make", [fuzz.files, fuzz.settings])
def test_hostile_inputs_end_in_a_valid_object_or_an_error_of_ours(tmp_path, monkeypatch, make) -> None:
    monkeypatch.setenv("PPFL_LIMITS", fuzz.SMALL)
    with fuzz.alarms():
        for number in range(120):
            name, use, content = make(Random(number), tmp_path)
            failure = fuzz.survives(use)
            assert failure is None, f"{name} from {number}, {content[:200]!r}: {failure}"


def test_the_attacks_would_see_a_failure(tmp_path) -> None:
    for name, suffix, make in CLIENT_FORMATS:
        path, valid = tmp_path / f"input{suffix}", 0
        for number in range(20):
            path.write_bytes(make(Random(number)))
            with contextlib.suppress(PPFLError):  # most files are valid until the fuzzer changes them
                valid += bool(read(path, Random(number)))
        path.unlink()
        assert valid >= 5, name
    assert "ZeroDivisionError" in fuzz.survives(lambda: 1 / 0) and fuzz.survives(dict) is None
    texts = [hostile_text.hostile_text(Random(at), at) for at in range(300)]
    for piece in (*hostile_text.MARKUP, *hostile_text.TERMINAL, *hostile_text.BROKEN):
        assert any(piece in text for text in texts)
    page = f"<title>t</title><p>safe<img src=http://{browser.HOST}/a>{hostile_text.MARKUP[0]}"
    (tmp_path / "a.html").write_text(page)
    shown = browser.show(tmp_path / "a.html")
    assert {"script", "img", "img[src]"} <= shown.kinds and shown.title == "t" and "safe" in shown.text
    assert not browser.CHROMIUM or "html[data-ran]" in shown.kinds
    numbers = {"a.json": '{"x": [1.0, 1e999]}', "a.jsonl": '{"x": 1.0}\n{"x": NaN}\n', "a.csv": "x\n1.0\ninf\n"}
    for name, content in numbers.items():
        (tmp_path / name).write_text(content)
    save_file({"x": np.array([1.0, np.nan])}, tmp_path / "a.safetensors")
    assert not any(extreme_numbers._is_finite(tmp_path / name) for name in (*numbers, "a.safetensors"))
