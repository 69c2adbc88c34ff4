"""Sites in the processes that torchrun starts: the same states as in one process, and as many bytes as reported."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppfl.server import ALONE, is_first_process, launched_ranks

SCRIPT = Path(__file__).with_name("two_ranks.py")
EXPERIMENT = SCRIPT.parents[2] / "experiments" / "synthetic.toml"
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.mark.processes
def test_two_processes_do_what_one_does_and_report_what_they_carry() -> None:
    """All in one start; what fails stands in the errors of the script."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, *launch], capture_output=True, text=True, check=False, timeout=300, env=os.environ | QUIET
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]


def test_without_torchrun_there_is_one_process_that_asks_itself(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert launched_ranks("cpu") is ALONE and is_first_process()
    assert ALONE.first and (ALONE.rank, ALONE.size) == (0, 1)
    assert ALONE.from_first(lambda: [1, None]) == [1, None]
    with pytest.raises(KeyError):
        ALONE.from_first(lambda: {}["nothing"])
    monkeypatch.setenv("RANK", "1")
    assert not is_first_process()


PARENT = """
import subprocess, sys, time
command = [sys.executable, "-m", "ppfl", "run", sys.argv[1], "--out", sys.argv[2]]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.processes
def test_a_process_whose_torchrun_died_does_not_wait_for_it(tmp_path) -> None:
    """Neither where it died before the process starts nor while it starts."""
    with socket.socket() as nobody:  # bound, but it does not listen: the store of a torchrun that is gone
        nobody.bind(("127.0.0.1", 0))
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(nobody.getsockname()[1])}
        ranks = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        parents = [
            subprocess.Popen(
                [sys.executable, "-c", PARENT, str(EXPERIMENT), str(tmp_path / seconds), seconds],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | QUIET | store | ranks,
                stdin=subprocess.DEVNULL,
            )
            for seconds in ("0.0", "1.0")
        ]  # fmt: skip
        started = [int(parent.communicate(timeout=60)[0]) for parent in parents]
        until = time.monotonic() + 60
        left = started
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = [process for process in started if Path(f"/proc/{process}").exists()]
        for process in left:
            os.kill(process, signal.SIGKILL)
        assert not left
