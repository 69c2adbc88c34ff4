"""One case in a process of its own: its peak of memory is its own, and it rests while others have their turn.

Started by turns.py with the case as JSON. Every line that comes in asks for a turn of at least so many seconds, and is
answered by a line of JSON.
"""

import gc
import json
import sys
import time
from typing import Any

import memory
from cases import Case
from methods import ROUNDS, Round, passes, products
from workloads import WORKLOADS, flops


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def prepare(case: Case) -> Round:
    """Build the data and the method, and say what they took."""
    clock = time.perf_counter()
    workload = WORKLOADS[case.workload](**case.sizes)
    gc.collect()
    to_build, data = memory.most_resident(), memory.resident()
    memory.forget_most()
    one_round = ROUNDS[case.method](workload, **case.settings)
    forward, both = passes(**case.settings)
    work = flops(workload)
    say(
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
    """Rounds for so many seconds. The first is left out where there are more: the process comes from a rest."""
    seconds: list[float] = []
    while not seconds or sum(seconds) < at_least:
        clock = time.perf_counter()
        cost = one_round()
        seconds.append(time.perf_counter() - clock)
    answer = {"seconds": seconds[1:] or seconds, "peak_bytes": memory.most_resident()}
    return answer if cost is None else answer | cost._asdict()


def main() -> None:
    if sys.argv[1] == "products":
        say({})
        for _ in sys.stdin:
            say({"flops_a_second": products()})
        return
    one_round = prepare(Case(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        say(take_turn(one_round, float(line)))


if __name__ == "__main__":
    main()
