"""What torchrun starts for test_torchrun.py: every process compares runs on all processes with runs in its own."""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from ppfl.algorithms import FedAvg
from ppfl.core import affinity
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import Federation
from ppfl.runs import Experiment
from ppfl.runs import run as run_experiment
from ppfl.server import TorchRanks, TorchRun, begin, client_states, evaluate, make_problem, train
from ppfl.sites import Site, Stacked
from ppfl.sites.engines import balanced
from server.test_contract import CASES, SIZES
from support import make_federation, make_net
from training import connect, tensors

ROUNDS, SEED, DROPOUT = 3, 1, 0.4


class Counted:
    """The bytes that all processes give to dist.all_reduce."""

    def __init__(self) -> None:
        self.bytes, self.all_reduce = 0, dist.all_reduce
        dist.all_reduce = self

    def __call__(self, tensor: torch.Tensor) -> None:
        self.bytes += dist.get_world_size() * tensor.numel() * tensor.element_size()
        self.all_reduce(tensor)


def population_of(k: int, mix: str) -> Population:
    return Population(make_net(dtype=torch.float64), k=k, mix=mix)


def on_all_ranks(federation: Federation, population: Population, ranks: TorchRanks) -> TorchRun:
    mine = sorted(balanced(federation.train.sizes.tolist(), ranks.size)[ranks.rank])
    part = federation.select([federation.ids[at] for at in mine])
    site = Site(part, population, Stacked(), importance=federation.importance[mine])
    return TorchRun(site, ranks, order=federation.ids)


def trained(method, problem, transport) -> dict:
    """Everything a run ends with, and its reports without what differs from transport to transport."""
    states = list(train(method, problem, transport, begin(method, problem, transport, dropout=DROPOUT)))
    state = states[-1][0]
    scores = evaluate(method, problem, transport, state.server, ("train",)).splits["train"]
    return {
        "tensors": [leaf.clone() for leaf in tensors((state.server, client_states(transport, state).values, scores))],
        "reports": [report._replace(bytes_carried=0, seconds=0) for _, report in states],
        "carried": sum(report.bytes_carried for _, report in states),
    }


def compare(name: str, method, k: int, mix: str, federation: Federation, ranks: TorchRanks) -> str | None:
    """What differs between a run on all processes and a run in this one."""
    likeness = affinity.from_labels(federation.label_counts().double(), federation.ids)
    likeness = likeness if getattr(method, "share_memberships", True) else None
    found = []
    for connected in (on_all_ranks(federation, population := population_of(k, mix), ranks), None):
        transport = connected or connect(federation, population := population_of(k, mix), Stacked())
        problem = make_problem(population, transport, likeness, rounds=ROUNDS, seed=SEED)
        found.append(trained(method, problem, transport))
    many, alone = found
    try:
        for one, other in zip(many["tensors"], alone["tensors"], strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)
        for one, other in zip(many["reports"], alone["reports"], strict=True):
            losses = torch.tensor([one.loss, other.loss], dtype=torch.float64)
            torch.testing.assert_close(losses[0], losses[1], equal_nan=True)
            assert one._replace(loss=0) == other._replace(loss=0), (one, other)
        assert many["carried"] > 0
    except AssertionError as error:
        return f"{name}: {error}"
    return None


def weighted(federation: Federation) -> Federation:
    weights = {client: 1.0 + at for at, client in enumerate(federation.ids)}
    owners = [federation.ids[at] for at in federation.train.client_of().tolist()]
    return Federation.from_arrays(
        federation.train.x.float(), federation.train.y, owners, test_fraction=0, weights=weights
    ).to(dtype=torch.float64)


def too_many_processes() -> str | None:
    """One client for two processes."""
    settings = {
        "name": "one", "rounds": 1, "model": {"name": "linear"}, "algorithm": {"name": "local", "lr": 0.1},
        "data": {"name": "synthetic_groups"},
    }  # fmt: skip
    try:
        run_experiment(Experiment.model_validate(settings), "/nowhere", read=lambda *_: make_federation((9,)))
    except SettingError as error:
        return str(error)
    return None


def refused_by_the_first() -> str:
    """How a process learns that the first one refuses to go on."""

    def refuse() -> None:
        raise SettingError("not like this")

    try:
        TorchRanks().decide_on_first(refuse)
    except (SettingError, SystemExit) as end:
        return repr(end)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    counted, ranks = Counted(), TorchRanks()
    federation = make_federation(SIZES, dtype=torch.float64)
    differences = [compare(name, *case, federation, ranks) for name, case in CASES.items()]
    small = {"lr": 0.3, "batch_size": 4}
    differences.append(compare("weights of clients", FedAvg(**small), 1, "outputs", weighted(federation), ranks))
    said = {
        "rank": ranks.rank,
        "differences": [difference for difference in differences if difference],
        "bytes": [ranks.bytes_carried, counted.bytes],
        "too_many": too_many_processes(),
        "answer": ranks.decide_on_first(lambda: ["the first's", None] if ranks.first else "another"),
        "refused": refused_by_the_first(),
    }
    for rank in range(ranks.size):
        if rank == ranks.rank:
            print(json.dumps(said), flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
