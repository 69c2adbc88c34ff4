"""(e): the perceptron's FedAvg round on several processes, one thread each."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("rank_round.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def seconds_by_ranks(turns: int, ranks: tuple[int, ...] = (1, 2)) -> dict[int, float]:
    """Seconds per round for each number of processes; each number is started several times, in turns."""
    found: dict[int, list[float]] = {n: [] for n in ranks}
    for _ in range(3):
        for n in ranks:
            found[n].append(_seconds(n, turns))
    return {n: statistics.median(seconds) for n, seconds in found.items()}


def _seconds(ranks: int, turns: int) -> float:
    command = [*LAUNCH, f"--nproc-per-node={ranks}", str(SCRIPT), str(turns)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])
