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

from kit.experiments import file_bytes, small_experiment
from ppfl.core import CheckpointError, WriteError
from ppfl.report import write_report
from ppfl.runs import RunFolder, load_run, run
from ppfl.runs.lock import locked
from ppfl.runs.storage import read_tensors, save_tree


class StopError(Exception):
    pass


def stop_after(round: int):
    def stop(_seed, end) -> None:
        if end.state.round == round:
            raise StopError

    return stop


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of 6 rounds with a checkpoint after 4, stopped after 5."""
    out = tmp_path_factory.mktemp("stopped")
    with pytest.raises(StopError):
        run(small_experiment(), out, checkpoint_every=4, on_round_end=stop_after(5))
    return out / "seed-0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    (record,) = run(small_experiment(), tmp_path_factory.mktemp("finished"))
    return record.folder


def assert_refused(folder: Path, match: str) -> None:
    """By a reader and by a resumed run, and nothing is touched."""
    before = file_bytes(folder)
    with pytest.raises(CheckpointError, match=match):
        load_run(folder)
    with pytest.raises(CheckpointError, match=match):
        run(small_experiment(), folder.parent, resume=True)
    assert file_bytes(folder) == before


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "out" / folder.name))


FILES = ("experiment.json", "chosen.json", "clients.json", "versions.json", "metrics.jsonl", "memberships.log")


@pytest.mark.parametrize("name", [*FILES, "result.safetensors"])
def test_a_changed_bit_is_noticed_in_every_file(finished, tmp_path, name):
    folder = copy(finished, tmp_path)
    content = (folder / name).read_bytes()
    for at in range(0, len(content), max(1, len(content) // 40)):
        (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match=f"{name}|another experiment|another run"):
            load_run(folder)
        with pytest.raises(CheckpointError):
            run(small_experiment(), folder.parent, resume=True)


def test_a_changed_bit_in_a_checkpoint_is_noticed(stopped, tmp_path):
    folder = copy(stopped, tmp_path)
    file = folder / "checkpoint.safetensors"
    content = file.read_bytes()
    for at in range(0, len(content), max(1, len(content) // 80)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        before = file_bytes(folder)
        with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors"):
            run(small_experiment(), folder.parent, resume=True)
        assert file_bytes(folder) == before


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "metrics.jsonl", "memberships.log"])
def test_a_file_of_another_seed_is_refused(stopped, tmp_path, name):
    with pytest.raises(StopError):
        run(small_experiment(seeds=[1]), tmp_path / "other", checkpoint_every=4, on_round_end=stop_after(5))
    folder = copy(stopped, tmp_path)
    shutil.copy(tmp_path / "other" / "seed-1" / name, folder / name)
    assert_refused(folder, f"{name} .*(is of another run: seed is 1, in this run 0|checksum)")


def test_a_result_of_another_seed_is_refused(finished, tmp_path):
    (other,) = run(small_experiment(seeds=[1]), tmp_path / "other")
    folder = copy(finished, tmp_path)
    shutil.copy(other.folder / "result.safetensors", folder)
    assert_refused(folder, r"result\.safetensors is of another run: seed is 1, in this run 0")


def test_a_checkpoint_of_other_settings_or_of_another_version_is_refused(stopped, tmp_path, monkeypatch):
    for change, found in (({"settings": "0"}, "settings is '0'"), ({"version": "9.9"}, "version is '9.9'")):
        folder = copy(stopped, tmp_path / found)
        file = folder / "checkpoint.safetensors"
        tensors, about = read_tensors(file)
        save_tree(file, tensors, about | {"run": about["run"] | change})
        assert_refused(folder, f"checkpoint.safetensors is of another run: {found}")
    folder = copy(stopped, tmp_path)
    monkeypatch.setattr(sys.modules["ppfl.runs.folder"], "package_version", lambda _name: "9.9")
    with pytest.raises(CheckpointError, match="was begun with ppfl .*, this is 9.9.*install the older version"):
        run(small_experiment(), folder.parent, resume=True)


def test_changed_data_of_equal_sizes_are_noticed(tmp_path, snapshot):
    table = tmp_path / "table.csv"

    def write(first: float) -> None:
        lines = [f"{client},{first if i == 0 else i % 5},{i % 2}" for client in "abc" for i in range(10)]
        table.write_text("\n".join(["who,x,y", *lines]))

    data = {"name": "csv", "file": str(table), "client": "who", "target": "y"}
    write(0.0)
    with pytest.raises(StopError):
        run(small_experiment(data=data), tmp_path / "out", checkpoint_every=1, on_round_end=stop_after(3))
    write(0.5)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"clients.json differs from the data.*bring the old data back"):
        run(small_experiment(data=data), tmp_path / "out", resume=True)
    assert snapshot(tmp_path) == before
    write(0.0)
    assert run(small_experiment(data=data), tmp_path / "out", resume=True)[0].finished


@pytest.mark.parametrize("change", ["twice", "missing", "swapped", "cut"])
def test_rounds_are_1_to_n(finished, tmp_path, change):
    folder = copy(finished, tmp_path)
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    changed = {
        "twice": [*lines, lines[-1]],
        "missing": lines[:2] + lines[3:],
        "swapped": [lines[1], lines[0], *lines[2:]],
        "cut": lines[:-1],
    }
    file.write_bytes(b"".join(changed[change]))
    assert_refused(folder, r"metrics\.jsonl has")


def test_what_a_kill_left_of_a_folder_is_not_taken_over(finished, tmp_path):
    """A folder that was being made when the process was killed, with files of another run in it."""
    stale = tmp_path / "out" / "seed-0.partial"
    shutil.copytree(finished, stale)
    (record,) = run(small_experiment(rounds=3), tmp_path / "out")
    assert record.rounds_done == 3
    assert not stale.exists()
    (tmp_path / "again" / "seed-0.partial").mkdir(parents=True)
    (tmp_path / "again" / "seed-0.partial" / "thesis.txt").write_text("three years")
    with pytest.raises(CheckpointError, match=r"thesis\.txt is in the way of a new run; move it"):
        run(small_experiment(), tmp_path / "again")


def take_away(path: Path):
    def at_round_3(_seed, end) -> None:
        if end.state.round == 3:
            path.unlink() if path.is_file() else shutil.rmtree(path)

    return at_round_3


@pytest.mark.parametrize("name", [".", "metrics.jsonl", "memberships.log"])
def test_what_vanishes_on_the_way_ends_the_run(tmp_path, name):
    folder = tmp_path / "seed-0"
    with pytest.raises(WriteError, match=r"(metrics\.jsonl|memberships\.log) cannot be written \(No such file"):
        run(small_experiment(rounds=12), tmp_path, on_round_end=take_away(folder / name))
    assert not (folder / name).exists() or name == "."
    assert not RunFolder(folder).finished


def test_one_process_at_a_time(tmp_path):
    with locked(tmp_path / "out" / "seed-0"):
        owner = f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(CheckpointError, match=rf"seed-0 is in use by {owner}; wait until it ends"):
            run(small_experiment(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [], "the lock, and the folders made for it, are removed"
    run(small_experiment(), tmp_path / "out")


HOLD = """
import json, os, sys, filelock
held = filelock.FileLock(sys.argv[1])
held.acquire()
open(sys.argv[1], "w").write(json.dumps({"pid": os.getpid(), "host": "here"}))
print(flush=True)
input()
"""


def test_the_lock_of_a_process_that_died_is_gone(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "seed-0.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        owner.stdout.readline()
        with pytest.raises(CheckpointError, match=f"in use by process {owner.pid} on here"):
            run(small_experiment(), tmp_path)
        owner.kill()
    assert run(small_experiment(), tmp_path)[0].finished


def test_a_finished_run_can_be_read_where_nothing_can_be_written(finished, tmp_path):
    """As on a mounted archive: no lock is needed."""
    with locked(finished):
        assert run(small_experiment(), finished.parent, resume=True)[0].finished


def test_the_lock_that_a_killed_process_left_beside_a_finished_run_is_removed(finished):
    lock = finished.with_name("seed-0.lock")
    lock.write_text("{}")
    assert run(small_experiment(), finished.parent, resume=True)[0].finished
    assert not lock.exists()


def test_a_name_too_long_for_the_disk_is_an_error_of_ours(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be used \(File name too long\); choose another --out"):
        run(small_experiment(), tmp_path / ("x" * 300))


@contextmanager
def no_file_beyond(size: int) -> Iterator[Callable[..., None]]:
    """What is called in there to make every longer write fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [100, 1500])
def test_a_full_disk_costs_nothing(tmp_path, size):
    """From round 1 on: the metrics fail first, or the checkpoint does."""
    with no_file_beyond(size) as fill, pytest.raises(WriteError, match=r"cannot be written \(.*\); free some space"):
        run(small_experiment(), tmp_path / "out", checkpoint_every=2, on_round_end=fill)
    assert not list((tmp_path / "out").rglob("*.partial"))
    (whole,) = run(small_experiment(), tmp_path / "whole")
    (resumed,) = run(small_experiment(), tmp_path / "out", resume=True)
    a, b = (read_tensors(record.folder / "result.safetensors")[0] for record in (whole, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_disk_that_is_full_from_the_start_leaves_nothing(tmp_path):
    with no_file_beyond(300) as fill:
        fill()
        with pytest.raises(WriteError, match="cannot be written"):
            run(small_experiment(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_leaves_the_old_one(finished, tmp_path):
    page = write_report([finished], tmp_path)
    before = file_bytes(tmp_path)
    with no_file_beyond(page.stat().st_size // 2) as fill:
        fill()
        with pytest.raises(WriteError, match=r"report\.html cannot be written"):
            write_report([finished], tmp_path, "Another title")
    pictures = {name for name in before if name != page.name}
    assert {name: content for name, content in file_bytes(tmp_path).items() if name not in pictures} == {
        page.name: before[page.name]
    }
