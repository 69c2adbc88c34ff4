"""One case in a process of its own, so that its peak of memory is its own. It waits while other cases have their turn.

Started by turns.py with the case as JSON. Every line on standard input asks for a turn of at least so many seconds, and
is answered by one line of JSON.
"""

import gc
import json
import sys
import time
from typing import Any

import memory
from cases import Case
from methods import ROUNDS, Round, matmul_speed, passes
from workloads import WORKLOADS, flops


def write_answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def prepare(case: Case) -> Round:
    """Build the data and the method, and report the time and memory that took."""
    clock = time.perf_counter()
    workload = WORKLOADS[case.workload](**case.sizes)
    gc.collect()
    to_build, data = memory.most_resident(), memory.resident()
    memory.forget_most()
    one_round = ROUNDS[case.method](workload, **case.settings)
    forward, both = passes(**case.settings)
    work = flops(workload)
    write_answer(
        {
            "prepare_seconds": time.perf_counter() - clock,
            "building_bytes": to_build,
            "data_bytes": data,
            "flops": forward * work.forward + both * work.both,
            "model_bytes": sum(p.numel() * p.element_size() for p in workload.net.parameters()),
        }
    )
    return one_round


def take_turn(one_round: Round, at_least: float) -> dict[str, Any]:
    """Rounds for so many seconds. The first is left out where there are others: the process has been waiting."""
    seconds: list[float] = []
    while not seconds or sum(seconds) < at_least:
        clock = time.perf_counter()
        cost = one_round()
        seconds.append(time.perf_counter() - clock)
    answer = {"seconds": seconds[1:] or seconds, "peak_bytes": memory.most_resident()}
    return answer if cost is None else answer | cost._asdict()


def main() -> None:
    if sys.argv[1] == "matmul":
        write_answer({})
        for _ in sys.stdin:
            write_answer({"flops_per_second": matmul_speed()})
        return
    one_round = prepare(Case(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        write_answer(take_turn(one_round, float(line)))


if __name__ == "__main__":
    main()
