"""What every rank of (e) runs: FedAvg on the perceptron; the first one prints the median of its rounds."""

import json
import statistics
import sys
import time

import torch.distributed as dist
from methods import SEED, settings_of
from ppfl.engines import Distributed, begin, pose, train
from workloads import perceptron

from ppfl import FedAvg, Population


def main(turns: int) -> None:
    workload, engine = perceptron(), Distributed()
    method = FedAvg(**settings_of(workload))
    problem = pose(Population(workload.net, k=1), workload.federation, None, rounds=turns + 1, seed=SEED)
    seconds = []
    rounds = train(method, problem, workload.federation, engine, begin(method, problem))
    next(rounds)
    for _ in range(turns):
        dist.barrier()
        clock = time.perf_counter()
        next(rounds)
        seconds.append(time.perf_counter() - clock)
    if engine.ranks.first:
        print(json.dumps({"seconds": statistics.median(seconds)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
