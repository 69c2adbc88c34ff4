"""(e): the perceptron's round on several processes, one thread each.

`rank_round.py` is what every rank runs; its rank 0 prints a last line of JSON with `seconds`, a round's median. Without
that file nothing is measured here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("rank_round.py")


def seconds_by_ranks(turns: int, ranks: tuple[int, ...] = (1, 2)) -> dict[int, float]:
    """Seconds a round for each number of ranks."""
    return {n: _seconds(n, turns) for n in ranks} if SCRIPT.exists() else {}


def _seconds(ranks: int, turns: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(SCRIPT), str(turns)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])
