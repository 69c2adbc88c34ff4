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


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """What two processes found: all cases in one start, which takes longer than the cases."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT)],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | QUIET,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in found) == [0, 1]
    return found


def test_every_method_ends_on_two_ranks_as_in_one_process(ranks) -> None:
    for one in ranks:
        assert one["differences"] == []


def test_the_bytes_reported_are_those_that_were_reduced(ranks) -> None:
    for one in ranks:
        reported, counted = one["bytes"]
        assert reported == counted > 0


def test_more_processes_than_clients_are_refused_on_every_rank(ranks) -> None:
    for one in ranks:
        assert "2 processes but 1 clients; start at most 1 processes" in one["too_many"]


def test_what_the_first_process_decides_or_refuses_holds_for_all_and_the_first_alone_says_why(ranks) -> None:
    by_rank = {one["rank"]: one for one in ranks}
    assert by_rank[0]["answer"] == by_rank[1]["answer"] == ["the first's", None]
    assert by_rank[0]["refused"] == "SettingError('not like this')"
    assert by_rank[1]["refused"] == "SystemExit(2)"


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
