"""What was changed, mixed up, cut off or taken away in a run folder is noticed, named and never made worse."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kit.experiments import StopError, file_bytes, small_experiment, stop_after
from kit.refusals import CheckpointError, WriteError, assert_refused
from ppfl.report import write_report
from ppfl.runs import RunFolder, folder, load_run, run
from ppfl.runs.lock import locked
from ppfl.runs.storage import read_tensors, save_tree


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Copies of a run of 6 rounds with a checkpoint after 4, stopped after 5."""
    out = tmp_path_factory.mktemp("stopped")
    with pytest.raises(StopError):
        run(small_experiment(seeds=[0]), out, checkpoint_every=4, on_round_end=stop_after(5))
    return lambda to: Path(shutil.copytree(out / "seed-0", to / "out" / "seed-0"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Copies of a finished run."""
    (record,) = run(small_experiment(), tmp_path_factory.mktemp("finished"))
    return lambda to: Path(shutil.copytree(record.folder, to / "out" / "seed-0"))


def assert_not_used(folder: Path, *words: str) -> None:
    """Neither a reader nor a resumed run uses it, and nothing is touched."""
    before = file_bytes(folder)
    assert_refused(lambda: load_run(folder), CheckpointError, *words)
    assert_refused(lambda: run(small_experiment(), folder.parent, resume=True), CheckpointError, *words)
    assert file_bytes(folder) == before


FILES = ("experiment.json", "chosen.json", "clients.json", "versions.json", "metrics.jsonl", "memberships.log")


@pytest.mark.parametrize("name", [*FILES, "result.safetensors", "checkpoint.safetensors"])
def test_a_changed_bit_or_half_a_file_is_noticed(finished, stopped, tmp_path, name):
    """Other files may be named first, where a file says whose they are. Readers do not need a checkpoint."""
    in_checkpoint = name == "checkpoint.safetensors"
    folder = (stopped if in_checkpoint else finished)(tmp_path)
    content = (folder / name).read_bytes()
    places = range(0, len(content), max(1, len(content) // 30))
    changed = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in places]
    halves = [content[: int(share * len(content))] for share in (0.0, 0.5, 0.99)]
    for spoilt in changed + halves:
        (folder / name).write_bytes(spoilt)
        before = file_bytes(folder)
        if not in_checkpoint:
            with pytest.raises(CheckpointError, match=f"{name}|another experiment|another run"):
                load_run(folder)
        with pytest.raises(CheckpointError):
            run(small_experiment(), folder.parent, resume=True)
        assert file_bytes(folder) == before


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "metrics.jsonl", "memberships.log", "result.safetensors"])
def test_a_file_of_another_seed_is_refused(finished, stopped, tmp_path, name):
    if name == "result.safetensors":
        folder, (other,) = finished(tmp_path), run(small_experiment(seeds=[1]), tmp_path / "other")
    else:
        folder = stopped(tmp_path)
        with pytest.raises(StopError):
            run(small_experiment(seeds=[1]), tmp_path / "other", checkpoint_every=4, on_round_end=stop_after(5))
        other = load_run(tmp_path / "other" / "seed-1")
    shutil.copy(other.folder / name, folder / name)
    words = ["is of another run: seed is 1, in this run 0"] if name.endswith("safetensors") else []
    assert_not_used(folder, name, *words)


def test_a_checkpoint_of_other_settings_or_of_another_version_is_refused(stopped, tmp_path, monkeypatch):
    for change, found in (({"settings": "0"}, "settings is '0'"), ({"version": "9.9"}, "version is '9.9'")):
        changed = stopped(tmp_path / found)
        tensors, about = read_tensors(changed / "checkpoint.safetensors")
        save_tree(changed / "checkpoint.safetensors", tensors, about | {"run": about["run"] | change})
        assert_not_used(changed, "checkpoint.safetensors is of another run", found)
    older = stopped(tmp_path)
    monkeypatch.setattr(folder, "package_version", lambda _name: "9.9")
    resume = small_experiment(), older.parent
    assert_refused(lambda: run(*resume, resume=True), CheckpointError, "this is 9.9", "install the older version")


@pytest.mark.parametrize("rows", [10, 12])
def test_changed_data_are_noticed(tmp_path, rows):
    """More rows, or as many with another value."""
    table = tmp_path / "table.csv"

    def write(first: float, rows: int) -> None:
        lines = [f"{client},{first if i == 0 else i % 5},{i % 2}" for client in "abc" for i in range(rows)]
        table.write_text("\n".join(["who,x,y", *lines]))

    data = {"name": "csv", "file": str(table), "client": "who", "target": "y"}
    write(0.0, 10)
    with pytest.raises(StopError):
        run(small_experiment(data=data), tmp_path / "out", checkpoint_every=1, on_round_end=stop_after(3))
    write(0.5, rows)
    before = file_bytes(tmp_path)
    resume = small_experiment(data=data), tmp_path / "out"
    assert_refused(lambda: run(*resume, resume=True), CheckpointError, "clients.json", "bring the old data back")
    assert file_bytes(tmp_path) == before
    write(0.0, 10)
    assert run(*resume, resume=True)[0].finished


ROUNDS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "twice": lambda lines: [*lines, lines[-1]],
    "missing": lambda lines: lines[:2] + lines[3:],
    "swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "cut": lambda lines: lines[:-1],
}


@pytest.mark.parametrize("change", ROUNDS)
def test_rounds_are_1_to_n(finished, tmp_path, change):
    folder = finished(tmp_path)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(ROUNDS[change](lines)))
    assert_not_used(folder, "metrics.jsonl")


def test_fewer_rounds_than_the_checkpoint_has_are_noticed(stopped, tmp_path):
    folder = stopped(tmp_path)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(lines[0])
    resume = small_experiment(), folder.parent
    assert_refused(lambda: run(*resume, resume=True), CheckpointError, "1 rounds, fewer than the checkpoint's 4")


def test_what_a_kill_left_of_a_folder_is_not_taken_over(finished, tmp_path):
    """A folder that was being made when the process was killed, with files of another run in it."""
    stale = finished(tmp_path).rename(tmp_path / "out" / "seed-0.partial")
    (record,) = run(small_experiment(rounds=3), tmp_path / "out")
    assert record.rounds_done == 3
    assert not stale.exists()
    stale.mkdir()
    (stale / "thesis.txt").write_text("three years")
    shutil.rmtree(record.folder)
    assert_refused(lambda: run(small_experiment(), tmp_path / "out"), CheckpointError, "thesis.txt", "move it")


@pytest.mark.parametrize("name", [".", "metrics.jsonl", "memberships.log"])
def test_what_vanishes_on_the_way_ends_the_run(tmp_path, name):
    path = tmp_path / "seed-0" / name

    def take_away(_seed, end) -> None:
        if end.state.round == 3:
            path.unlink() if path.is_file() else shutil.rmtree(path)

    with pytest.raises(WriteError, match=r"(metrics\.jsonl|memberships\.log) cannot be written \(No such file"):
        run(small_experiment(rounds=12), tmp_path, on_round_end=take_away)
    assert not path.exists() or name == "."
    assert not RunFolder(tmp_path / "seed-0").finished


def test_a_name_too_long_for_the_disk_is_refused(tmp_path):
    assert_refused(lambda: run(small_experiment(), tmp_path / ("x" * 300)), CheckpointError, "name too long", "--out")


# ---------------------------------------------------------------------- one process at a time


def test_a_run_in_use_is_refused_and_a_lock_leaves_nothing(finished, tmp_path):
    with locked(tmp_path / "new" / "seed-0"):
        owner = f"process {os.getpid()} on {platform.node()}"
        assert_refused(lambda: run(small_experiment(), tmp_path / "new"), CheckpointError, "in use", owner, "wait")
    assert list(tmp_path.iterdir()) == [], "the lock, and the folders made for it, are removed"
    old = finished(tmp_path)
    with locked(old):  # as on an archive where nothing can be written: to read a finished run needs no lock
        assert run(small_experiment(), old.parent, resume=True)[0].finished
    lock = old.with_name("seed-0.lock")
    lock.write_text("{}")  # as a process that was killed leaves it
    assert run(small_experiment(), old.parent, resume=True)[0].finished
    assert not lock.exists()


HOLD = """
import json, os, sys, filelock
held = filelock.FileLock(sys.argv[1])
held.acquire()
open(sys.argv[1], "w").write(json.dumps({"pid": os.getpid(), "host": "here"}))
print(flush=True)
input()
"""


@pytest.mark.processes
def test_the_lock_of_a_process_that_died_is_gone(tmp_path):
    command = [sys.executable, "-c", HOLD, tmp_path / "seed-0.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        owner.stdout.readline()
        in_use = f"in use by process {owner.pid} on here"
        assert_refused(lambda: run(small_experiment(), tmp_path), CheckpointError, in_use)
        owner.kill()
    assert run(small_experiment(), tmp_path)[0].finished


# ---------------------------------------------------------------------- a full disk


@contextmanager
def no_file_beyond(size: int) -> Iterator[Callable[..., None]]:
    """What is called in there to make every longer write fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [100, 1500])
def test_a_full_disk_costs_nothing(finished, tmp_path, size):
    """From round 1 on: the metrics fail first, or the checkpoint does."""
    out = tmp_path / "full"
    with no_file_beyond(size) as fill, pytest.raises(WriteError, match=r"cannot be written \(.*\); free some space"):
        run(small_experiment(), out, checkpoint_every=2, on_round_end=fill)
    assert not list(out.rglob("*.partial"))
    with no_file_beyond(300) as fill:
        fill()
        assert_refused(lambda: run(small_experiment(), tmp_path / "never"), WriteError, "cannot be written")
    assert not (tmp_path / "never").exists(), "a disk that is full from the start leaves nothing"
    (resumed,) = run(small_experiment(), out, resume=True)
    a, b = (read_tensors(folder / "result.safetensors")[0] for folder in (finished(tmp_path), resumed.folder))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_report_that_cannot_be_written_leaves_the_old_one(finished, tmp_path):
    record, out = finished(tmp_path), tmp_path / "report"
    page = write_report([record], out)
    before = page.read_bytes()
    with no_file_beyond(len(before) // 2) as fill:
        fill()
        assert_refused(lambda: write_report([record], out, "Another title"), WriteError, page.name)
    assert page.read_bytes() == before
    assert {file.suffix for file in out.iterdir()} <= {".html", ".svg"}, "nothing half written is left"
