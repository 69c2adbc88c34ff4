"""Random kills: nothing is lost beyond the last checkpoint, what goes on ends with the same bits, no process is left.

SIGKILL, SIGTERM and SIGINT, to runs, to runs that resume, to comparisons and their workers, to torchrun, while a report
is written, and while Python starts.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

from fork_server import Ended, ForkServer
from trial import Trial
from victim import SETTINGS, contents, difference

from ppfl.io.files import write_toml
from ppfl.runs import RunFolder

ROUNDS = 100
EVERY = 7  # rounds between checkpoints
STOPS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LINGER = 20.0  # seconds in which the processes of a killed command must have ended, also on a busy machine
METHODS: dict[str, Any] = {"one": {}, "two": {"population": {"mix": "weights"}}, "three": {"population": {"k": 3}}}


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    """Most trials are on single runs; every tenth or so takes whole families of processes."""
    with ForkServer() as server:
        place = Place(server, folder, random)
        shares = {
            place.kill_run: 0.55,
            place.kill_resume: 0.15,
            place.kill_report: 0.1,
            place.kill_start: 0.05,
            place.kill_comparison: 0.06,
            place.kill_worker: 0.04,
            place.kill_torchrun: 0.05,
        }
        for kill, share in shares.items():
            for number in range(max(1, round(count * share))):
                yield kill(STOPS[number % len(STOPS)])


class Place:
    """Where the attacks happen, with runs that were never stopped to compare with."""

    def __init__(self, server: ForkServer, folder: Path, random: Random) -> None:
        self.server, self.folder, self.random = server, folder, random
        self.said, self.out = folder / "said", folder / "out"
        self.file, self.methods = folder / "victim.toml", folder / "methods.toml"
        settings = SETTINGS | {"rounds": ROUNDS}
        write_toml(self.file, settings)
        write_toml(self.methods, settings | {"methods": METHODS})
        self.lost: int | None = None  # rounds, in the trial that is running
        self.whole: dict[str, Path] = {}
        self.seconds: dict[str, float] = {}
        server.run(["--version"], self.said)  # so that no command has to wait for imports

    # ------------------------------------------------------------------ one process

    def kill_run(self, stop: signal.Signals) -> Trial:
        """A run is stopped, and goes on."""
        self._make_whole("run", self.run())
        ended = self._stopped(self.run(), stop)
        return self._trial(
            self._name("run", stop, ended), self._judge_run(ended, stop) or self._finish("run", self.run())
        )

    def kill_resume(self, stop: signal.Signals) -> Trial:
        """A run is killed, stopped again while it goes on, and goes on again."""
        self._make_whole("run", self.run())
        self._stopped(self.run(), signal.SIGKILL)
        ended = self._stopped([*self.run(), "--resume"], stop)
        failure = self._judge_run(ended, stop) or self._finish("run", self.run())
        return self._trial(self._name("resume", stop, ended), failure)

    def kill_report(self, stop: signal.Signals) -> Trial:
        """All runs of a comparison are finished; it is stopped while it writes the report, and called again."""
        self._make_whole("report", self.compare())
        shutil.copytree(self.whole["report"], self.out)
        ended = self._stopped(self.compare(), stop, self.seconds["again"])
        failure = _unclean(ended, stop) or self._finish("report", self.compare(), resume=False)
        if failure is None and contents(self.out) != contents(self.whole["report"]):
            failure = "the folder differs from that of a command that was never stopped"
        return self._trial(self._name("report", stop, ended), failure)

    def kill_start(self, stop: signal.Signals) -> Trial:
        """A new process is stopped while it imports, or soon after."""
        self._make_whole("run", self.run())
        moment = self.random.uniform(0.1, 4)  # what is before belongs to Python alone
        ended = self._stopped_program([sys.executable, "-m", "ppfl", *self.run()], stop, moment)
        failure = _unclean(ended, stop) or self._finish("run", self.run())
        return self._trial(self._name("start", stop, ended), failure and f"after {moment:.3f} s: {failure}")

    # ------------------------------------------------------------------ families of processes

    def kill_comparison(self, stop: signal.Signals) -> Trial:
        """Only the parent gets the signal."""
        self._make_whole("compare", self.compare())
        command = [*self.compare(), "--jobs", "2"]
        ended = self._stopped(command, stop)
        failure = self._left_alone() or _unclean(ended, stop) or self._finish("compare", command, resume=False)
        return self._trial(self._name("comparison", stop, ended), failure)

    def kill_worker(self, stop: signal.Signals) -> Trial:
        """One of the workers is killed, as it is when memory runs out: an error names its run."""
        self._make_whole("compare", self.compare())
        command = [*self.compare(), "--jobs", "2"]
        victims: list[int] = []

        def kill_one(_pid: int, marker: str) -> None:
            while not (workers := _processes(marker, "spawn_main")) and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(self.random.uniform(0, 6))
            if workers := _processes(marker, "spawn_main"):
                victims.append(self.random.choice(workers))
                os.kill(victims[0], signal.SIGKILL)

        until = time.monotonic() + 60
        ended = self._attacked(command, kill_one)
        failure = self._left_alone()
        if failure is None and ended.code == 2:
            expected = ("was killed by SIGKILL", "seed 0", "again to go on")
            failure = None if all(part in ended.said for part in expected) else f"exit code 2, said {ended.said!r}"
        elif failure is None and ended.code != 0:
            failure = f"exit code {ended.code}: {ended.said}"
        return self._trial("worker of a comparison, SIGKILL", failure or self._finish("compare", command, resume=False))

    def kill_torchrun(self, stop: signal.Signals) -> Trial:
        """torchrun itself gets the signal; its own messages are not ours."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ppfl"]
        if "torchrun" not in self.whole:
            began = time.monotonic()
            self._call([*launch, *self.run()])
            self.seconds["torchrun"] = time.monotonic() - began
            self.whole["torchrun"] = self.out.rename(self.folder / "whole-torchrun")
        moment = self.random.uniform(0.4, 1) * self.seconds["torchrun"]
        ended = self._stopped_program([*launch, *self.run()], stop, moment)
        failure = self._left_alone()
        if failure is None:
            code = self._call([*launch, *self.run(), "--resume"])
            failure = (
                difference(self.out / "seed-0", self.whole["torchrun"] / "seed-0") if code == 0 else "cannot go on"
            )
        return self._trial(self._name("torchrun", stop, ended), failure and f"after {moment:.2f} s: {failure}")

    # ------------------------------------------------------------------ commands

    def run(self) -> list[str]:
        return ["run", str(self.file), "--out", str(self.out), "--checkpoint-every", str(EVERY)]

    def compare(self) -> list[str]:
        return ["compare", str(self.methods), "--out", str(self.out)]

    def _make_whole(self, name: str, command: list[str]) -> None:
        """Run the command once without an attack, and note how long it takes."""
        if name in self.whole:
            return
        command = [*command, "--jobs", "1"] if command[0] == "compare" else command
        for times in ("first", "again") if name == "report" else ("first",):
            began = time.monotonic()
            ended = self.server.run(command, self.said)
            assert ended.code == 0, ended
            self.seconds[name if times == "first" else times] = time.monotonic() - began
        shutil.copytree(self.out, self.folder / f"whole-{name}")
        self.whole[name] = self.folder / f"whole-{name}"
        shutil.rmtree(self.out)

    def _name(self, what: str, stop: signal.Signals, ended: Ended) -> str:
        return f"{what}, {stop.name}" if ended.code else f"{what}: it had finished"

    def _attacked(self, command: Sequence[str], attack: Callable[[int, str], None]) -> Ended:
        self.marker = uuid4().hex
        pid = self.server.start(command, self.said, self.marker)
        attack(pid, self.marker)
        return self.server.wait(pid, self.said)

    def _stopped(self, command: Sequence[str], stop: signal.Signals, seconds: float | None = None) -> Ended:
        """Send the signal at a random moment of so many seconds, or at a random round."""

        def send(pid: int, _marker: str) -> None:
            if seconds is not None:
                time.sleep(self.random.uniform(0, seconds))
            else:
                self._wait_for_a_round(pid, ROUNDS * (len(METHODS) if command[0] == "compare" else 1))
            os.kill(pid, stop)  # it is there until it is waited for

        return self._attacked(command, send)

    def _wait_for_a_round(self, pid: int, rounds: int) -> None:
        done = _rounds_written(self.out)
        target = self.random.randint(done - 10, rounds)  # before the first round too
        while _rounds_written(self.out) < target and _is_running(pid):
            time.sleep(0.002)
        time.sleep(self.random.uniform(0, 0.03))

    def _stopped_program(self, command: Sequence[str], stop: signal.Signals, moment: float) -> Ended:
        self.marker = uuid4().hex
        with self.said.open("wb") as said:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=os.environ | {"PPFL_TRUST": self.marker, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        time.sleep(moment)
        process.send_signal(stop)
        return Ended(process.wait(), self.said.read_text(encoding="utf-8"))

    def _call(self, command: Sequence[str]) -> int:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, env=environment, check=False).returncode

    # ------------------------------------------------------------------ judgement

    def _judge_run(self, ended: Ended, stop: signal.Signals) -> str | None:
        if fault := _unclean(ended, stop):
            return fault
        folder = RunFolder(self.out / "seed-0")
        if not folder.started:
            return None
        done, saved = len(folder.read().metrics), (folder.saved_at() or {"round": 0})["round"]
        self.lost = done - saved
        if self.lost > EVERY:
            return f"{self.lost} rounds are lost, with a checkpoint every {EVERY}"
        if stop != signal.SIGKILL and "after round" in ended.said and f"after round {saved} of" not in ended.said:
            return f"round {saved} is safe, but it said {ended.said!r}"
        return None

    def _finish(self, name: str, command: list[str], *, resume: bool = True) -> str | None:
        """Go on to the end, and compare with what was never stopped."""
        ended = self.server.run([*command, "--resume"] if resume else command, self.said)
        if ended.code != 0:
            return f"cannot go on: {ended.said}"
        if odd := [str(file) for file in self.out.rglob("*") if file.suffix in (".partial", ".lock")]:
            return f"left behind: {odd}"
        for file in sorted(self.whole[name].rglob("result.safetensors")):
            part = file.parent.relative_to(self.whole[name])
            if fault := difference(self.out / part, self.whole[name] / part):
                return f"{part}: {fault}"
        return None

    def _left_alone(self) -> str | None:
        """Processes that outlive the command they belong to."""
        until = time.monotonic() + LINGER
        while (left := _processes(self.marker)) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # ours: they carry this trial's marker
        return f"processes {left} are still there after {LINGER} s" if left else None

    def _trial(self, attack: str, failure: str | None) -> Trial:
        figures = {} if self.lost is None else {"rounds lost": float(self.lost)}
        self.lost = None
        if failure:
            kept = self.folder / f"failed-{uuid4().hex[:8]}"
            if self.out.exists():
                self.out.rename(kept)
            failure = f"{failure} (folder {kept})"
        shutil.rmtree(self.out, ignore_errors=True)
        for lock in self.folder.glob("out*.lock"):
            lock.unlink()
        return Trial(attack, failure, figures)


def _unclean(ended: Ended, stop: signal.Signals) -> str | None:
    """How a stopped command may end: killed, or with one line and the exit code of its signal, or just finished."""
    if "Traceback" in ended.said:
        return ended.said
    codes = (-stop,) if stop == signal.SIGKILL else (128 + stop,)
    if ended.code not in (0, *codes):
        return f"exit code {ended.code}, said {ended.said!r}"
    stopped = [line for line in ended.said.splitlines() if line.startswith("stopped")]
    if ended.code > 0 and len(stopped) != 1:
        return f"exit code {ended.code}, said {ended.said!r}"
    return None


def _rounds_written(out: Path) -> int:
    """Of all runs in a folder."""
    try:
        return sum(file.read_bytes().count(b"\n") for file in out.rglob("metrics.jsonl"))
    except FileNotFoundError:  # a folder got its final name just now
        return _rounds_written(out)


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"


def _processes(marker: str, command: str = "") -> list[int]:
    """Running processes that were started with this marker in their environment, and with this in their command."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
                typed = (folder / "cmdline").read_bytes()
                state = (folder / "stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            if f"PPFL_TRUST={marker}".encode() in environment and command.encode() in typed and state != "Z":
                found.append(int(folder.name))
    return found
