"""Worker processes: results, a worker that is lost, and an end with the block that uses them."""

import math
import multiprocessing
import operator
import os
import signal
import time

import pytest

from ppfl.core.errors import LostWorkerError
from ppfl.runs.processes import ProcessPool


def test_every_task_gets_its_result():
    with ProcessPool(2, operator.neg, threads=1) as pool:
        assert dict(pool.run([1, 2, 3])) == {1: -1, 2: -2, 3: -3}
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_an_error_of_its_task_alone():
    with ProcessPool(1, time.sleep, threads=1) as pool:
        found = pool.run([0.0, 1000.0, 0.1])
        assert next(found) == (0.0, None)
        (worker,) = multiprocessing.active_children()
        signal.signal(signal.SIGALRM, lambda *_: os.kill(worker.pid, signal.SIGKILL))
        signal.alarm(1)
        task, error = next(found)
        assert task == 1000.0
        assert isinstance(error, LostWorkerError)
        assert "was killed by SIGKILL" in str(error) and "again to go on" in str(error)
        assert next(found) == (0.1, None)


def test_workers_end_with_the_block_in_which_an_error_happens():
    def fails_after_the_first():
        with ProcessPool(2, time.sleep, threads=1) as pool:
            next(pool.run([0.0, 1000.0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_after_the_first()
    assert multiprocessing.active_children() == []


def test_an_error_in_a_task_is_reported_with_its_exit_code(capfd):
    with ProcessPool(1, math.sqrt, threads=1) as pool:
        (_, good), (_, bad) = pool.run([4.0, -1.0])
    assert good == 2.0
    assert "exit code 1" in str(bad)
    assert "ValueError" in capfd.readouterr().err
