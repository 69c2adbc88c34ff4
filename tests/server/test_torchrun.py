"""Sites in the processes that torchrun starts: the same states as in one process, and as many bytes as reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppfl.server import ALONE, is_first_process, launched_ranks

SCRIPT = Path(__file__).with_name("two_ranks.py")
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
