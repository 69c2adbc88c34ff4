"""Sites in the processes that torchrun starts: the same states as in one process, and as many bytes as reported."""

import json
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


def found_by_two_processes() -> list[dict]:
    """What each of two processes found: all cases in one start, which takes longer than the cases."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT)],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | QUIET,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda one: one["rank"])


def test_two_processes_do_what_one_does_and_report_what_they_carry() -> None:
    first, second = found_by_two_processes()
    for one in (first, second):
        assert one["differences"] == []  # every method ends in the same states as in one process
        reported, counted = one["bytes"]
        assert reported == counted > 0
        assert "2 processes but 1 clients; start at most 1 processes" in one["too_many"]
        assert one["answer"] == ["the first's", None]  # what the first decides holds for all
        assert not [name for name in one["threads"] if "gloo" in name]  # they could abort the process as it ends
    assert first["refused"] == "SettingError('not like this')"  # and what it refuses, of which it alone says why
    assert second["refused"] == "SystemExit(2)"


def test_one_process_alone_asks_itself_and_passes_errors_on() -> None:
    assert ALONE.first and (ALONE.rank, ALONE.size) == (0, 1)
    assert ALONE.decide_on_first(lambda: [1, None]) == [1, None]
    with pytest.raises(KeyError):
        ALONE.decide_on_first(lambda: {}["nothing"])


def test_without_torchrun_there_is_one_process(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert launched_ranks("cpu") is ALONE and is_first_process()
    monkeypatch.setenv("RANK", "1")
    assert not is_first_process()


PARENT = """
import subprocess, sys, time
command = [sys.executable, "-m", "ppfl", "run", sys.argv[1], "--out", sys.argv[2]]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["before it starts", "while it starts"])
def test_a_process_whose_torchrun_died_does_not_wait_for_it(tmp_path, seconds) -> None:
    with socket.socket() as nobody:  # bound, but it does not listen: the store of a torchrun that is gone
        nobody.bind(("127.0.0.1", 0))
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(nobody.getsockname()[1])}
        ranks = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PARENT, str(EXPERIMENT), str(tmp_path / "out"), str(seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=60,
            env=os.environ | QUIET | store | ranks, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        process = Path(f"/proc/{int(done.stdout)}")
        until = time.monotonic() + 30
        while process.exists() and time.monotonic() < until:
            time.sleep(0.1)
        is_left = process.exists()
        if is_left:
            os.kill(int(done.stdout), signal.SIGKILL)
        assert not is_left
