"""Starts commands of ppfl without the seconds that imports take: as forks of a process that has imported everything.

A command runs as if it had been typed, with the signals of a program, in a session of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    code: int  # negative: the signal that ended it
    said: str  # on standard error


class ForkServer:
    """Use it in a `with` block."""

    def __enter__(self) -> ForkServer:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, arguments: Sequence[str], said: Path, marker: str) -> int:
        """The process number of `ppfl arguments`, whose standard error goes to the file `said`."""
        return int(self._ask({"arguments": list(arguments), "said": str(said), "marker": marker}))

    def wait(self, pid: int, said: Path) -> Ended:
        """Until that command has ended."""
        return Ended(int(self._ask({"wait": pid})), said.read_text(encoding="utf-8"))

    def run(self, arguments: Sequence[str], said: Path, marker: str = "") -> Ended:
        return self.wait(self.start(arguments, said, marker), said)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def _serve() -> None:
    import torch

    import ppfl.cli.app
    import ppfl.exports
    import ppfl.glm.table
    import ppfl.report.page
    import ppfl.runs.tuning  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            ready, tell = os.pipe()
            answer = os.fork()
            if answer == 0:
                _become(asked, tell)
            os.close(tell)
            os.read(ready, 1)  # signals are handled from here on; what is before belongs to Python alone
            os.close(ready)
        print(json.dumps(answer), flush=True)


def _become(asked: dict[str, Any], ready: int) -> None:
    """Run the command in this fork, and end."""
    import signal

    import ppfl.cli
    from ppfl.cli.stop_signals import leave_on_signals

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PPFL_TRUST"] = asked["marker"]
    for number, file in ((0, os.devnull), (1, os.devnull), (2, asked["said"])):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    sys.argv = ["ppfl", *asked["arguments"]]
    leave_on_signals()
    os.close(ready)
    code = 0
    try:
        ppfl.cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
