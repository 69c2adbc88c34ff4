"""What was changed, mixed up, cut off or taken away in a run folder is noticed, named and never made worse."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kit.experiments import (
    StopError,
    file_bytes,
    locked,
    read_json,
    small_experiment,
    stop_after,
    tensors_of,
    write_json,
)
from kit.refusals import CheckpointError, WriteError, assert_refused
from ppfl.runs import RunFolder, folder, load_run, run


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory) -> Callable[..., Path]:
    """Copies of runs of 6 rounds: finished ones, or with a checkpoint after 4 and stopped after 5."""
    runs = tmp_path_factory.mktemp("runs")
    run(small_experiment(seeds=[0, 1]), runs / "finished")
    for seed in (0, 1):
        with pytest.raises(StopError):
            run(small_experiment(seeds=[seed]), runs / "stopped", checkpoint_every=4, on_round_end=stop_after(5))
    return lambda kind, to, seed=0: Path(shutil.copytree(runs / kind / f"seed-{seed}", to / f"seed-{seed}"))


def resume(folder: Path) -> object:
    return run(small_experiment(), folder.parent, resume=True)


def assert_not_used(folder: Path, *words: str) -> None:
    """Neither a reader nor a resumed run uses it, and nothing is touched."""
    before = file_bytes(folder)
    assert_refused(lambda: load_run(folder), CheckpointError, *words)
    assert_refused(lambda: resume(folder), CheckpointError, *words)
    assert file_bytes(folder) == before


FILES = ("run.json", "clients.json", "metrics.jsonl", "memberships.log")


@pytest.mark.parametrize("name", [*FILES, "result.safetensors", "checkpoint.safetensors"])
def test_a_changed_bit_or_half_a_file_is_noticed(copy_of, tmp_path, name):
    """A changed run.json may be taken for one of another experiment. Readers do not need a checkpoint."""
    in_checkpoint = name == "checkpoint.safetensors"
    folder = copy_of("stopped" if in_checkpoint else "finished", tmp_path)
    content = (folder / name).read_bytes()
    places = range(0, len(content), max(1, len(content) // 30))
    changed = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in places]
    halves = [content[: int(share * len(content))] for share in (0.0, 0.5, 0.99)]
    for spoilt in changed + halves:
        (folder / name).write_bytes(spoilt)
        before = file_bytes(folder)
        if not in_checkpoint:
            with pytest.raises(CheckpointError, match=f"{name}|another run"):
                load_run(folder)
        with pytest.raises(CheckpointError):
            resume(folder)
        assert file_bytes(folder) == before


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "metrics.jsonl", "memberships.log", "result.safetensors"])
def test_a_file_of_another_seed_is_refused(copy_of, tmp_path, name):
    kind = "finished" if name == "result.safetensors" else "stopped"
    folder, other = copy_of(kind, tmp_path), copy_of(kind, tmp_path, seed=1)
    shutil.copy(other / name, folder / name)
    words = ["is of another run than run.json"] if name.endswith("safetensors") else []
    assert_not_used(folder, name, *words)


def test_a_checkpoint_with_another_beginning_or_of_another_version_is_refused(copy_of, tmp_path, monkeypatch):
    changed, older = copy_of("stopped", tmp_path / "changed"), copy_of("stopped", tmp_path / "older")
    about = read_json(changed / "run.json")
    write_json(changed / "run.json", about | {"method": about["method"] | {"momentum": 0.5}})
    assert_not_used(changed, "checkpoint.safetensors is of another run than run.json")
    monkeypatch.setattr(folder, "package_version", lambda _name: "9.9")
    assert_refused(lambda: resume(older), CheckpointError, "this is 9.9", "install the older version")


def test_changed_data_are_noticed(tmp_path):
    """More rows, as many with another value, or another client: the first difference is said, not all ids."""
    table, out = tmp_path / "table.csv", tmp_path / "out"

    def write(first: float, rows: int, clients: str = "abc") -> None:
        lines = [f"{client},{first if i == 0 else i % 5},{i % 2}" for client in clients for i in range(rows)]
        table.write_text("\n".join(["who,x,y", *lines]))

    experiment = small_experiment(data={"name": "csv", "file": str(table), "client": "who", "target": "y"})
    write(0.0, 10)
    with pytest.raises(StopError):
        run(experiment, out, checkpoint_every=1, on_round_end=stop_after(3))
    before, refused = file_bytes(out), (CheckpointError, "clients.json", "bring the old data back")
    for changed, said in (
        ((0.5, 10), "data is"),
        ((0.0, 12), "[0] is"),
        ((0.0, 10, "abd"), "(ids[2] is 'c' there and 'd' here)"),
    ):
        write(*changed)
        assert_refused(lambda: run(experiment, out, resume=True), *refused, said)
    assert file_bytes(out) == before
    write(0.0, 10)
    assert run(experiment, out, resume=True)[0].finished


def test_rounds_are_1_to_n_and_not_fewer_than_a_checkpoint_has(copy_of, tmp_path):
    finished, stopped = copy_of("finished", tmp_path / "finished"), copy_of("stopped", tmp_path / "stopped")
    lines = (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    first, second, *others = lines
    for wrong in ([*lines, lines[-1]], [first, *others], [second, first, *others], lines[:-1]):
        (finished / "metrics.jsonl").write_bytes(b"".join(wrong))
        assert_not_used(finished, "metrics.jsonl")
    content = (stopped / "metrics.jsonl").read_bytes()
    stopped_at = len(b"".join(content.splitlines(keepends=True)[:4]))
    (stopped / "metrics.jsonl").write_bytes(content[: content.index(b"\n") + 1])
    assert_not_used(stopped, "metrics.jsonl", f"bytes where it had {stopped_at:,}")


def test_what_a_kill_left_of_a_folder_is_not_taken_over(copy_of, tmp_path):
    """A folder that was being made when the process was killed, with files of another run in it."""
    stale = copy_of("finished", tmp_path).rename(tmp_path / "seed-0.partial")
    (record,) = run(small_experiment(rounds=3), tmp_path)
    assert record.rounds_done == 3
    assert not stale.exists()
    stale.mkdir()
    (stale / "thesis.txt").write_text("three years")
    shutil.rmtree(record.folder)
    assert_refused(lambda: run(small_experiment(), tmp_path), CheckpointError, "thesis.txt", "move it")


def test_a_folder_that_cannot_be_made_whole_is_not_left_behind(tmp_path, monkeypatch):
    def full(_file, _content) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr(folder, "write_json", full)
    with pytest.raises(WriteError):
        run(small_experiment(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".", "metrics.jsonl", "memberships.log"])
def test_what_vanishes_on_the_way_ends_the_run(tmp_path, name):
    path = tmp_path / "seed-0" / name

    def take_away(_seed, end) -> None:
        if end.state.round == 3:
            path.unlink() if path.is_file() else shutil.rmtree(path)

    with pytest.raises(WriteError, match=r"(metrics\.jsonl|memberships\.log) cannot be written \(No such file"):
        run(small_experiment(rounds=12), tmp_path, on_round_end=take_away)
    assert not RunFolder(tmp_path / "seed-0").finished


HOLD = """
import json, os, sys, filelock
held = filelock.FileLock(sys.argv[1])
held.acquire()
open(sys.argv[1], "w").write(json.dumps({"pid": os.getpid(), "host": "here"}))
print(flush=True)
input()
"""


@pytest.mark.processes
def test_a_run_in_use_is_refused_and_a_lock_ends_with_its_owner(copy_of, tmp_path):
    with locked(tmp_path / "new" / "seed-0"):
        assert_refused(lambda: run(small_experiment(), tmp_path / "new"), CheckpointError, "in use", "wait")
    assert list(tmp_path.iterdir()) == [], "the lock, and the folders made for it, are removed"
    old, lock = copy_of("finished", tmp_path / "old"), tmp_path / "seed-0.lock"
    with locked(old):  # as on an archive where nothing can be written: to read a finished run needs no lock
        assert resume(old)[0].finished
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        owner.stdout.readline()
        in_use = f"in use by process {owner.pid} on here"
        assert_refused(lambda: run(small_experiment(), tmp_path), CheckpointError, in_use)
        owner.kill()
    assert run(small_experiment(), tmp_path)[0].finished
    assert not lock.exists()


@pytest.mark.parametrize("size", [100, 1500])
def test_a_full_disk_costs_nothing(copy_of, tmp_path, size):
    """From round 1 on no longer file can be written: the metrics fail first, or the checkpoint does."""
    out, limits = tmp_path / "full", resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # noqa: E731
    try:
        full = WriteError, "cannot be written (", "free some space"
        assert_refused(lambda: run(small_experiment(), out, checkpoint_every=2, on_round_end=fill), *full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(out.rglob("*.partial"))
    (resumed,) = run(small_experiment(), out, resume=True)
    folders = copy_of("finished", tmp_path), resumed.folder
    a, b = (tensors_of(folder / "result.safetensors") for folder in folders)
    torch.testing.assert_close(a, b, atol=0, rtol=0)
