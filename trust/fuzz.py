"""Hostile data files and settings: each ends in a valid object or in an error of ours, in bounded time and memory.

Inputs are valid files that were changed (bits, cuts, splices, header fields) and values that were made up. They are
tried in batches, each in a process of its own with little memory, so that even a crash is only a failed trial.

    python trust/fuzz.py files|settings SEED FIRST COUNT FOLDER   # what a batch runs
    python trust/fuzz.py guided SECONDS FOLDER                    # coverage-guided, where atheris is installed
"""

import contextlib
import faulthandler
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

from hostile_files import FORMATS, files, read
from hostile_settings import settings
from trial import Trial

GUIDED_SECONDS = 60  # of one process; five of them beside 10,000 inputs, each with what those before it found
BATCH = 1000  # inputs per process
SECONDS = 10  # for one input
MEMORY = 3 << 30  # bytes of address space beyond what the imports take
SMALL = "bytes=3e8,classes=1e4,features=1e5,clients=1e4"  # limits, so that MEMORY is never needed


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    """Half of the trials are files, half are settings; then a while with a fuzzer that is guided by coverage."""
    for kind, share in (("files", count - count // 2), ("settings", count // 2)):
        seed = random.randrange(2**32)
        for first in range(0, share, BATCH):
            yield from _batch(kind, seed, first, min(BATCH, share - first), folder)
    if find_spec("atheris") is not None:
        for _ in range(max(1, count // 2000)):
            yield _guided_trial(min(GUIDED_SECONDS, 5 + count // 100), folder)


def _batch(kind: str, seed: int, first: int, count: int, folder: Path) -> Iterator[Trial]:
    """Run inputs in a process; if it dies at one, that one has failed, and another process continues behind it."""
    end = first + count
    while first < end:
        command = [sys.executable, __file__, kind, str(seed), str(first), str(end - first), str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 + count * SECONDS, check=False)
            output, end_of_it = done.stdout, f"exit code {done.returncode}, {done.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            output, end_of_it = (error.stdout or b"").decode(), "no end"
        reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        for report in reports:
            yield Trial(report["attack"], report["failure"], {"peak MB": report["peak"], "seconds": report["seconds"]})
        first += len(reports)
        if first < end:
            yield Trial(f"{kind}: crash", f"fuzz.py {kind} {seed} {first} 1 {folder}: {end_of_it}")
            first += 1


def _run(kind: str, seed: int, first: int, count: int, folder: Path) -> None:
    """Try the inputs one by one, and print a line about each."""
    import os

    from ppfl.server.loop import RefusedUpdateWarning

    os.environ["PPFL_LIMITS"] = SMALL
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", RefusedUpdateWarning)  # of clients that diverge
    faulthandler.enable()
    make = {"files": files, "settings": settings}[kind]
    load_all()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    signal.signal(signal.SIGALRM, _too_slow)
    for number in range(first, first + count):
        name, use, content = make(Random(f"{kind} {seed} {number}"), folder)
        start = time.perf_counter()
        failure = survives(use)
        if failure is not None:
            saved = folder / f"failed-{kind}-{seed}-{number}"
            saved.write_bytes(content)
            failure = f"fuzz.py {kind} {seed} {number} 1 {folder} (saved as {saved.name}): {failure}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {"attack": f"{kind}: {name}", "failure": failure, "peak": peak, "seconds": time.perf_counter() - start}
        print(json.dumps(line), flush=True)


def survives(use: Callable[[], object]) -> str | None:
    """None if `use` ends in a value or in an error of ours, else what happened."""
    from ppfl.errors import PPFLError

    signal.alarm(SECONDS)
    try:
        use()
    except PPFLError as error:
        return None if "\n" not in str(error) else f"a message of several lines: {error}"
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        signal.alarm(0)
    return None


@contextlib.contextmanager
def alarms() -> Iterator[None]:
    """Inputs that take too long are failures."""
    before = signal.signal(signal.SIGALRM, _too_slow)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class TooSlowError(BaseException):
    """Not an Exception, so that nobody takes it for a damaged file."""


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"no answer after {SECONDS} seconds")


def load_all() -> None:
    """Import what readers import late, before memory is limited."""
    import h5py  # noqa: F401
    import pandas  # noqa: F401
    import sklearn.datasets  # noqa: F401

    import ppfl.glm.table
    import ppfl.runs  # noqa: F401


def _guided_trial(seconds: int, folder: Path) -> Trial:
    command = [sys.executable, __file__, "guided", str(seconds), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * seconds + 300, check=False)
    tried = re.search(r"Done (\d+) runs", done.stderr)
    failure = None if done.returncode == 0 and tried else f"{shlex.join(command)}: {done.stderr[-3000:]}"
    return Trial("guided by coverage", failure, {"inputs": float(tried[1])} if tried else {})


def guided(seconds: int, folder: Path) -> None:
    """Readers and settings on bytes that atheris chooses by the code they reach; a failure ends the run."""
    import atheris

    with atheris.instrument_imports(include=["ppfl.data", "ppfl.runs"]):
        load_all()

    formats = [(suffix, make) for _, suffix, make in FORMATS]

    def one(content: bytes) -> None:
        at = content[0] % (len(formats) + 1) if content else 0
        if at == len(formats):
            (folder / "input.toml").write_bytes(content[1:])
            from ppfl.runs import load_experiment

            failure = survives(lambda: load_experiment(folder / "input.toml"))
        else:
            path = folder / f"input{formats[at][0]}"
            path.write_bytes(content[1:])
            failure = survives(lambda: read(path, Random(0)))
        if failure is not None:
            raise RuntimeError(failure)

    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(40 * len(formats)):
        at = i % len(formats)
        (corpus / str(i)).write_bytes(bytes([at]) + formats[at][1](Random(i))[:4000])
    signal.signal(signal.SIGALRM, _too_slow)
    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-artifact_prefix={folder}/failed-"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "guided":
        guided(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        kind, *numbers, folder = sys.argv[1:]
        _run(kind, *map(int, numbers), Path(folder))
