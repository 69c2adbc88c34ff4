"""What torchrun starts for test_torchrun.py: every process compares runs on all processes with runs in its own."""

import hashlib
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist

from kit.cases import CASES, SIZES, affinity_for
from kit.networks import make_net
from kit.problems import make_federation
from kit.refusals import SettingError, assert_refused
from kit.training import Trained, assert_same, run, tensors
from ppfl.core import Population
from ppfl.data import Federation
from ppfl.runs import Experiment
from ppfl.runs import run as run_experiment
from ppfl.server import InProcess, TorchRanks, TorchRun, evaluate


class Counted:
    """The bytes that all processes give to dist.all_reduce."""

    def __init__(self) -> None:
        self.bytes, self.all_reduce = 0, dist.all_reduce
        dist.all_reduce = self

    def __call__(self, tensor: torch.Tensor) -> None:
        self.bytes += dist.get_world_size() * tensor.numel() * tensor.element_size()
        self.all_reduce(tensor)


def trained(case, federation: Federation, ranks: TorchRanks | None) -> tuple[Trained, list[torch.Tensor]]:
    """A run on all processes, or in this one alone, and everything it ends with."""
    (method, k, mix), part, kind = case, federation, InProcess
    if ranks is not None:
        mine = list(range(ranks.rank, federation.n_clients, ranks.size))
        part = federation.select([federation.ids[at] for at in mine])

        def kind(site) -> TorchRun:
            site.importance = federation.importance[mine]
            return TorchRun(site, ranks, order=federation.ids)

    population = Population(make_net(dtype=torch.float64), k=k, mix=mix)
    settings = {"affinity": affinity_for(method, federation), "rounds": 3, "dropout": 0.4}
    found = run(method, population, part, engine="stacked", kind=kind, **settings)
    scores = evaluate(method, found.problem, found.transport, found.server, ("train",)).splits["train"]
    return found, [leaf.clone() for leaf in tensors((found.everything(), scores))]


def check(case, federation: Federation, ranks: TorchRanks, compares: bool) -> None:
    """Processes have the same bits; one of them compares them with a run of its own."""
    many, ended = trained(case, federation, ranks)
    bits = hashlib.sha256(b"".join(leaf.numpy().tobytes() for leaf in ended)).digest()
    assert len(set(ranks.gather_texts(bits))) == 1
    if not compares:
        return
    alone, expected = trained(case, federation, None)
    assert_same(ended, expected, atol=1e-10, rtol=1e-9)
    for one, other in zip(many.reports, alone.reports, strict=True):
        assert one.bytes_carried > 0 and one.loss == pytest.approx(other.loss, nan_ok=True)
        one, other = (report._replace(loss=0, bytes_carried=0, seconds=0) for report in (one, other))
        assert one == other


def with_weights(federation: Federation) -> Federation:
    weights = {client: 1.0 + at for at, client in enumerate(federation.ids)}
    owners = [federation.ids[at] for at in federation.train.client_of().tolist()]
    samples = federation.train.x.float(), federation.train.y, owners
    return Federation.from_arrays(*samples, test_fraction=0, weights=weights).to(dtype=torch.float64)


def one_client_for_two_processes() -> None:
    linear, local = {"name": "linear"}, {"name": "local", "lr": 0.1}
    settings = {"name": "one", "rounds": 1, "model": linear, "method": local, "data": {"name": "synthetic_groups"}}
    run_experiment(Experiment.model_validate(settings), "/nowhere", read=lambda *_: make_federation((9,)))


def refuse() -> None:
    raise SettingError("not like this")


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    counted, ranks, federation = Counted(), TorchRanks(), make_federation(SIZES, dtype=torch.float64)
    for at, case in enumerate(CASES.values()):
        check(case, federation, ranks, at % ranks.size == ranks.rank)
    for name in ("fedavg", "ppfl-outputs"):
        check(CASES[name], with_weights(federation), ranks, ranks.first)
    assert ranks.bytes_carried == counted.bytes > 0
    assert_refused(one_client_for_two_processes, SettingError, "start at most 1 processes")
    text, nothing, numbers = ranks.from_first(
        lambda: ["the first's", None, torch.arange(3)] if ranks.first else "other"
    )
    assert (text, nothing, numbers.tolist()) == ("the first's", None, [0, 1, 2])  # what the first says holds for all
    with pytest.raises(SettingError if ranks.first else SystemExit):  # and what it refuses, of which it alone says why
        TorchRanks().from_first(refuse)
    dist.destroy_process_group()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    assert not [name for name in threads if "gloo" in name]  # they could abort the process as it ends
    os.write(1, f"rank {ranks.rank} is done\n".encode())  # in one piece, because both processes write here


if __name__ == "__main__":
    main()
