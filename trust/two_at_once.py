"""Several processes on one run folder: one runs, the others are told who it is, and nothing is written twice."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from trial import Trial
from victim import SETTINGS, difference, victim

from ppfl.runs import run

PROGRAM = """
import json, sys, time, torch
from ppfl.core import PPFLError
from ppfl.runs import Experiment, run
torch.set_num_threads(1)
experiment = Experiment.model_validate(json.loads(sys.argv[1]))
print("ready", flush=True)
time.sleep(float(sys.stdin.readline()))
try:
    run(experiment, sys.argv[2], resume=True, on_round_end=lambda seed, end: time.sleep(0.01))
except PPFLError as error:
    sys.exit(f"error: {error}")
"""
PROCESSES = 3
ROUNDS = 40


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    settings = SETTINGS | {"rounds": ROUNDS}
    whole = run(victim(rounds=ROUNDS), folder / "whole")[0].folder
    for number in range(count):
        out = folder / f"shared-{number}"
        command = [sys.executable, "-c", PROGRAM, json.dumps(settings), str(out)]
        pipe = subprocess.PIPE
        started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(PROCESSES)]
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        waits = [f"{random.uniform(0, 0.3)}\n" for _ in started]
        for process, wait in zip(started, waits, strict=True):  # all of them before any is waited for
            assert process.stdin is not None
            process.stdin.write(wait)
            process.stdin.flush()
        said = [process.communicate(timeout=120)[1] for process in started]
        yield Trial(f"{PROCESSES} processes on one folder", _failure(out, whole, started, said))


def _failure(out: Path, whole: Path, ended: list["subprocess.Popen[str]"], said: list[str]) -> str | None:
    if not any(process.returncode == 0 for process in ended):
        return f"nobody finished: {said}"
    for process, text in zip(ended, said, strict=True):
        if process.returncode and not any(f"is in use by process {other.pid} on" in text for other in ended):
            return f"exit code {process.returncode} without the owner's name: {text}"
    if leftover := [item.name for item in out.iterdir() if item.name != "seed-0"]:
        return f"left behind: {leftover}"
    return difference(out / "seed-0", whole)
