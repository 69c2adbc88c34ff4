"""Several processes on one run folder: one runs, the others are told who it is, and nothing is written twice."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from trial import Trial
from victim import SETTINGS, difference, victim

from ppfl.runs import run

PROCESSES = 3
ROUNDS = 40

# forks processes after the imports, as those take longer than the runs
PROGRAM = """
import json, os, pathlib, sys, time, torch
from ppfl.errors import PPFLError
from ppfl.runs import Experiment, run
torch.set_num_threads(1)
settings, outs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for out, waits in outs.items():
    said = {}
    for wait in waits:
        pid = os.fork()
        if pid == 0:
            try:
                time.sleep(wait)
                slowly = lambda seed, end: time.sleep(0.01)
                run(Experiment.model_validate(settings), out, resume=True, on_round_end=slowly)
                message = ""
            except PPFLError as error:
                message = str(error)
            except BaseException as error:
                message = f"Traceback {error!r}"
            pathlib.Path(f"{out}-{os.getpid()}").write_text(message)
            os._exit(0)
        said[pid] = None
    for pid in said:
        os.waitpid(pid, 0)
        said[pid] = pathlib.Path(f"{out}-{pid}").read_text()
    print(json.dumps(said), flush=True)
"""


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    whole = run(victim(rounds=ROUNDS), folder / "whole")[0].folder
    outs = {str(folder / f"shared-{at}"): [random.uniform(0, 0.3) for _ in range(PROCESSES)] for at in range(count)}
    settings: dict[str, Any] = SETTINGS | {"rounds": ROUNDS}
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings), json.dumps(outs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for out, line in zip(outs, process.stdout, strict=True):
            yield Trial(f"{PROCESSES} processes on one folder", _failure(Path(out), whole, json.loads(line)))


def _failure(out: Path, whole: Path, said: dict[str, str]) -> str | None:
    """`said` has the message of every process by its number; that of one which finished is empty."""
    if all(said.values()):
        return f"nobody finished: {said}"
    for message in filter(None, said.values()):
        if not any(f"is in use by process {pid} on" in message for pid in said):
            return f"refused without the owner's name: {message}"
    if leftover := [item.name for item in out.iterdir() if item.name != "seed-0"]:
        return f"left behind: {leftover}"
    return difference(out / "seed-0", whole)
