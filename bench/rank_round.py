"""What every process of (e) runs: FedAvg on the perceptron. The first process prints the median time of its rounds."""

import json
import statistics
import sys
import time

import torch.distributed as dist
from methods import SEED, settings_of
from workloads import perceptron

from ppfl import FedAvg, Population
from ppfl.server import TorchRanks, TorchRun, begin, make_problem, train
from ppfl.sites import Site, Stacked
from ppfl.sites.engines import balanced


def main(turns: int) -> None:
    workload, ranks = perceptron(), TorchRanks()
    federation, population = workload.federation, Population(workload.net, k=1)
    mine = sorted(balanced(federation.train.sizes.tolist(), ranks.size)[ranks.rank])
    part = federation.select([federation.ids[at] for at in mine])
    transport = TorchRun(Site(part, population, Stacked()), ranks, order=federation.ids)
    problem = make_problem(population, transport, rounds=turns + 1, seed=SEED)
    method = FedAvg(**settings_of(workload))
    rounds = train(method, problem, transport, begin(method, problem, transport))
    next(rounds)
    seconds = []
    for _ in range(turns):
        dist.barrier()
        clock = time.perf_counter()
        next(rounds)
        seconds.append(time.perf_counter() - clock)
    if ranks.first:
        print(json.dumps({"seconds": statistics.median(seconds)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
