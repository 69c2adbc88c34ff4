"""A disk that is full or read-only: one line, exit code 2, and nothing lost or half-written.

The disk is a small tmpfs. Mounting one takes root on Linux; elsewhere there are no trials.
"""

import io
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random

from trial import Trial
from victim import SETTINGS, contents, difference, run_until, victim

from ppfl.cli import main
from ppfl.io.files import write_toml
from ppfl.runs import run

PAGE = 4096
ENOUGH = 64 << 20


class MountError(Exception):
    """A disk of our own cannot be had here."""


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    file = folder / "victim.toml"
    write_toml(file, SETTINGS)
    whole = run(victim(), folder / "whole")[0].folder
    trials = (_full_in_a_run, _full_in_a_report, _read_only)
    for number in range(count):
        try:
            with small_disk(folder / "disk") as disk:
                yield trials[number % len(trials)](disk, file, whole, random)
        except MountError:
            return


class Disk:
    """A tmpfs whose size can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def change(self, options: str) -> None:
        _mount("-o", f"remount,{options}", str(self.path))

    def fill(self) -> Path:
        """Leave no room, by a file that can be removed."""
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError:
                return filler


@contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    path.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={ENOUGH}", "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MountError from error


def _full_in_a_run(disk: Disk, file: Path, whole: Path, random: Random) -> Trial:
    attack = "the disk is full in a run"
    size = PAGE * random.randint(1, 24)
    disk.change(f"size={size}")
    command = ["run", str(file), "--out", str(disk.path / "out"), "--checkpoint-every", "2"]
    failure = _refused(command, may_succeed=True)
    if failure is None and (left := [str(item) for item in disk.path.rglob("*.partial*")]):
        failure = f"left behind: {left}"
    disk.change(f"size={ENOUGH}")
    code, said = _call([*command, "--resume"])
    if failure is None:
        failure = difference(disk.path / "out" / "seed-0", whole) if code == 0 else f"cannot go on: {said}"
    return Trial(attack, failure and f"size {size}: {failure}")


def _full_in_a_report(disk: Disk, file: Path, whole: Path, random: Random) -> Trial:
    attack = "the disk is full in a report"
    command = ["compare", str(file), "--out", str(disk.path / "out"), "--jobs", "1"]
    _call(command)
    before = contents(disk.path)
    filler = disk.fill()
    with filler.open("r+b") as opened:
        opened.truncate(max(0, filler.stat().st_size - PAGE * random.randint(0, 8)))
    failure = _refused(command, may_succeed=True)
    filler.unlink()
    if failure is None and contents(disk.path) != before:
        changed = [name for name, content in contents(disk.path).items() if before.get(name) != content]
        failure = f"changed: {changed}"
    code, said = _call(command)
    return Trial(attack, failure if failure or code == 0 else f"cannot go on: {said}")


def _read_only(disk: Disk, file: Path, whole: Path, random: Random) -> Trial:
    attack = "the disk is read-only"
    run_until(disk.path / "out", round=random.randint(1, 7), checkpoint_every=2)
    before = contents(disk.path)
    disk.change("ro")
    command = ["run", str(file), "--out", str(disk.path / "out"), "--resume"]
    failure = _refused(command) or _refused(["run", str(file), "--out", str(disk.path / "new" / "run")])
    code, said = _call(["show", str(disk.path / "out")])
    if failure is None and (code != 0 or contents(disk.path) != before):
        failure = f"cannot be shown: {said}"
    disk.change("rw")
    code, said = _call(command)
    if failure is None:
        failure = difference(disk.path / "out" / "seed-0", whole) if code == 0 else f"cannot go on: {said}"
    return Trial(attack, failure)


def _refused(command: Sequence[str], *, may_succeed: bool = False) -> str | None:
    """What is wrong with how the command ended, which should be one line and exit code 2."""
    code, said = _call(command)
    if code == 0 and may_succeed:
        return None
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if code != 2 or len(errors) != 1 or "Traceback" in said or "cannot be" not in said:
        return f"exit code {code}: {said}"
    return None


def _call(command: Sequence[str]) -> tuple[int, str]:
    """The exit code, and what was said on standard error."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        try:
            main(list(command))
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()
