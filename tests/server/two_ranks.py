"""What torchrun starts for test_torchrun.py: every process compares runs on all processes with runs in its own."""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from kit.cases import CASES, SIZES
from kit.problems import make_federation, make_net
from kit.training import connect, tensors
from ppfl.algorithms import Method, Problem
from ppfl.core import affinity
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import Federation
from ppfl.runs import Experiment
from ppfl.runs import run as run_experiment
from ppfl.server import TorchRanks, TorchRun, Transport, begin, client_states, evaluate, make_problem, train
from ppfl.sites import Site, Stacked
from ppfl.sites.engines import balanced

ROUNDS, SEED, DROPOUT = 3, 1, 0.4


class Counted:
    """The bytes that all processes give to dist.all_reduce."""

    def __init__(self) -> None:
        self.bytes, self.all_reduce = 0, dist.all_reduce
        dist.all_reduce = self

    def __call__(self, tensor: torch.Tensor) -> None:
        self.bytes += dist.get_world_size() * tensor.numel() * tensor.element_size()
        self.all_reduce(tensor)


class Case(NamedTuple):
    name: str
    method: Method
    k: int
    mix: str
    federation: Federation

    def run(self, ranks: TorchRanks | None) -> dict:
        """On all processes, or in this one alone."""
        federation, population = self.federation, Population(make_net(dtype=torch.float64), k=self.k, mix=self.mix)
        transport = on_all(ranks, federation, population) if ranks else connect(federation, population, Stacked())
        likeness = affinity.from_labels(federation.label_counts().double(), federation.ids)
        pulls = getattr(self.method, "share_memberships", True)
        problem = make_problem(population, transport, likeness if pulls else None, rounds=ROUNDS, seed=SEED)
        return trained(self.method, problem, transport)


def on_all(ranks: TorchRanks, federation: Federation, population: Population) -> TorchRun:
    mine = sorted(balanced(federation.train.sizes.tolist(), ranks.size)[ranks.rank])
    part = federation.select([federation.ids[at] for at in mine])
    site = Site(part, population, Stacked(), importance=federation.importance[mine])
    return TorchRun(site, ranks, order=federation.ids)


def trained(method: Method, problem: Problem, transport: Transport) -> dict:
    """Everything a run ends with, and its reports without what differs from transport to transport."""
    rounds = list(train(method, problem, transport, begin(method, problem, transport, dropout=DROPOUT)))
    state = rounds[-1][0]
    scores = evaluate(method, problem, transport, state.server, ("train",)).splits["train"]
    assert all(report.bytes_carried > 0 for _, report in rounds)
    return {
        "tensors": [leaf.clone() for leaf in tensors((state.server, client_states(transport, state).values, scores))],
        "reports": [report._replace(bytes_carried=0, seconds=0) for _, report in rounds],
    }


def difference(name: str, many: dict, alone: dict) -> str | None:
    """What differs between a run on all processes and a run in this one."""
    try:
        for one, other in zip(many["tensors"], alone["tensors"], strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)
        for one, other in zip(many["reports"], alone["reports"], strict=True):
            losses = torch.tensor([one.loss, other.loss], dtype=torch.float64)
            torch.testing.assert_close(losses[0], losses[1], equal_nan=True)
            assert one._replace(loss=0) == other._replace(loss=0), (one, other)
    except AssertionError as error:
        return f"{name}: {error}"
    return None


def digest(run: dict) -> bytes:
    """Of all bits of a run's tensors."""
    return hashlib.sha256(b"".join(leaf.numpy().tobytes() for leaf in run["tensors"])).digest()


def differences(cases: Sequence[Case], ranks: TorchRanks) -> list[str]:
    """Processes compare their bits in every case; each compares a share of the cases with runs of its own."""
    many = [case.run(ranks) for case in cases]
    digests = [set(ranks.gather_texts(digest(run))) for run in many]
    found = [
        f"{case.name}: other bits on other ranks" for case, one in zip(cases, digests, strict=True) if len(one) > 1
    ]
    for case, run in list(zip(cases, many, strict=True))[ranks.rank :: ranks.size]:
        if said := difference(case.name, run, case.run(None)):
            found.append(said)
    return found


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
    cases = [Case(name, *case, federation) for name, case in CASES.items()]
    cases += [
        Case(f"{name} with weights of clients", *CASES[name], weighted(federation))
        for name in ("fedavg", "ppfl-outputs")
    ]
    said = {
        "rank": ranks.rank,
        "differences": differences(cases, ranks),
        "bytes": [ranks.bytes_carried, counted.bytes],
        "too_many": too_many_processes(),
        "answer": ranks.decide_on_first(lambda: ["the first's", None] if ranks.first else "another"),
        "refused": refused_by_the_first(),
    }
    dist.destroy_process_group()
    said["threads"] = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    os.write(1, f"{json.dumps(said)}\n".encode())  # in one piece, because both processes write here


if __name__ == "__main__":
    main()
