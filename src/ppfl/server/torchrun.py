"""Sites in the processes that torchrun started, one site per process. Every process runs the same server.

The texts of all replies are gathered, so that every process knows what the others have; then one all-reduce for each
type of number adds the sums, and rows are put together.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithms.contract import Rows
from ..core.population import Population
from ..core.trees import named_leaves, with_leaves
from ..data import Federation
from ..errors import PPFLError, RankError, SettingError
from ..io.codec import join, specs_of, split
from ..parent_process import end_with_parent
from ..sites import Describe, Engine, PredictionMetric, Reply, Request, Site, Train
from ..sites.engines import balanced
from ..sites.messages import combine, part_for
from .transports import InProcess, Transport, make_roster, named_rows

Answer = TypeVar("Answer")


class Ranks:
    """The processes that work on one run; here one process alone."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def from_first(self, question: Callable[[], Answer]) -> Answer:
        """What the first process answers, whatever the codec can write; where it raises an error, all of them stop."""
        return question()


ALONE = Ranks()


class TorchRanks(Ranks):
    """The processes that torchrun started."""

    def __init__(self, device: str = "cpu", timeout: timedelta = timedelta(minutes=30)) -> None:
        if not dist.is_initialized():
            end_with_parent()
            # Its functions have the group as a default value: imported later (torch does so on its own), it would keep
            # the group's threads alive, and these can abort the process as it ends.
            import_module("torch.distributed.nn.functional")
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timeout)
            atexit.register(_leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device)
        self.bytes_carried = 0
        signal.signal(signal.SIGTERM, self._stop)  # what torchrun sends when another process has died

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        self.bytes_carried += self.size * tensor.numel() * tensor.element_size()
        try:
            dist.all_reduce(tensor)
        except (RuntimeError, ValueError) as error:  # the latter after the group broke down
            reason = str(error).splitlines()[0]
            raise RankError(
                f"another of the {self.size} processes stopped answering process {self.rank} ({reason})"
            ) from None
        return tensor

    def gather_texts(self, text: bytes) -> list[bytes]:
        """The texts of all processes."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(text)
        sizes = self.add(lengths).tolist()
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        start = sum(sizes[: self.rank])
        buffer[start : start + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        together = bytes(self.add(buffer).cpu().numpy())
        ends = [sum(sizes[: at + 1]) for at in range(self.size)]
        return [together[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def from_first(self, question: Callable[[], Answer]) -> Answer:
        answer: Any = None
        refusal: PPFLError | None = None
        if self.first:
            try:
                answer = question()
            except PPFLError as error:
                refusal = error
        text, tensors = split((answer, refusal is not None)) if self.first else (b"{}", [])
        text = self.gather_texts(text)[0]
        if not self.first:
            tensors = [torch.zeros(shape, dtype=dtype) for dtype, shape in specs_of(text)]
        heard, refused = join(text, [self.add(tensor.to(self.device, copy=True)) for tensor in tensors])
        if refusal is not None:
            raise refusal
        if refused:
            raise SystemExit(2)  # the first process says why
        result: Answer = answer if self.first else heard
        return result

    def _stop(self, signum: int, frame: FrameType | None) -> NoReturn:
        raise RankError(f"process {self.rank} of {self.size} was told to stop: most likely another one has died")


class TorchRun:
    """One site per process."""

    def __init__(self, site: Site, ranks: TorchRanks, order: Sequence[str] | None = None) -> None:
        """order: of the clients in the roster; by default site after site."""
        self.site, self.ranks = site, ranks
        text, _ = split(site.answer(Describe()).rows.ids)
        self._ids = [join(other, []) for other in ranks.gather_texts(text)]
        self.roster = make_roster(self._ids, order)
        self.device = ranks.device

    @property
    def bytes_carried(self) -> int:
        return self.ranks.bytes_carried

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        return [self._ask(request) for request in requests]

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        pass

    def _ask(self, request: Request) -> Reply:
        ids, device = self._ids[self.ranks.rank], self.ranks.device
        answer = self.site.answer(part_for(request, ids, self.roster, self.site.name))
        text, tensors = split(named_rows(answer, ids, self.roster))
        replies = []
        for rank, other in enumerate(self.ranks.gather_texts(text)):
            here = [tensor.to(device) for tensor in tensors] if rank == self.ranks.rank else None
            zeros = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in specs_of(other)]
            replies.append(join(other, here or zeros))
        # every process has zeros for what others hold: their sum is the reply of all sites together
        return self._added(combine(replies, [f"rank {rank}" for rank in range(self.ranks.size)]))

    def _added(self, reply: Reply) -> Reply:
        tree = {"totals": reply.totals, "metrics": reply.metrics, "rows": reply.rows.values}
        named = named_leaves(tree)
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, leaf in named.items():
            by_dtype.setdefault(leaf.dtype, []).append(name)
        found: dict[str, Tensor] = {}
        for names in by_dtype.values():
            flat = self.ranks.add(torch.cat([named[name].flatten() for name in names]))
            parts = torch.split(flat, [named[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                found[name] = part.reshape(named[name].shape)
        tree = with_leaves(tree, found)
        return reply._replace(totals=tree["totals"], metrics=tree["metrics"], rows=Rows(reply.rows.ids, tree["rows"]))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_first_process() -> bool:
    """Whether this is an ordinary run, or the first of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def launched_ranks(device: str) -> Ranks:
    """The processes of this run: several where torchrun started this one."""
    return TorchRanks(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 or dist.is_initialized() else ALONE


def connect(
    federation: Federation,
    population: Population,
    engine: Engine,
    *,
    metrics: Mapping[str, PredictionMetric] | None = None,
    states_on_disk: bool | None = None,
    ranks: Ranks = ALONE,
) -> Transport:
    """A transport to the clients of a federation: one site in this process, or one in each process."""
    settings: dict[str, Any] = {"metrics": dict(metrics or {}), "states_on_disk": states_on_disk}
    if not isinstance(ranks, TorchRanks):
        return InProcess(Site(federation, population, engine, **settings))
    if ranks.size > federation.n_clients:
        raise SettingError(
            f"there are {ranks.size} processes but {federation.n_clients} clients; start at most "
            f"{federation.n_clients} processes"
        )
    mine = sorted(balanced(federation.train.sizes.tolist(), ranks.size)[ranks.rank])
    part = federation.select([federation.ids[at] for at in mine])
    settings |= {"name": f"rank {ranks.rank}", "importance": federation.importance[mine]}
    return TorchRun(Site(part, population, engine, **settings), ranks, order=federation.ids)
