"""The processes that work on one run: who this one is, and what they do together.

Everything is written for any number of them; `ALONE` is the one process of an ordinary run.
"""

from __future__ import annotations

import atexit
import heapq
import json
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import PPFLError, RankError

Answer = TypeVar("Answer")


class Ranks:
    """One process alone."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def mine(self, work: Tensor) -> Tensor:
        """Which clients are this process's own, (M,) bool, balanced by their work (M,)."""
        return torch.ones(len(work), dtype=torch.bool)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return tensor

    def gather(self, rows: Tensor, work: Tensor) -> Tensor:
        """(M, ...), each client's row as its own process has it."""
        return rows

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first process's."""
        return tensor

    def ask_first(self, question: Callable[[], Answer]) -> Answer:
        """What the first process answers (as JSON has it); where it refuses, all of them stop."""
        return question()


ALONE = Ranks()


class TorchRanks(Ranks):
    """The processes that torchrun started."""

    def __init__(self, device: str = "cpu", patience: timedelta = timedelta(minutes=30)) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=patience)
            atexit.register(_leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device)
        self._share: tuple[Tensor, Tensor] | None = None
        signal.signal(signal.SIGTERM, self._told_to_stop)  # what torchrun sends when another process has died

    def mine(self, work: Tensor) -> Tensor:
        if self._share is None or not self._share[0].equal(work):
            share = torch.tensor(balanced(work.tolist(), self.size)[self.rank], dtype=torch.long)
            self._share = work, torch.zeros(len(work), dtype=torch.bool).index_fill_(0, share, 1)
        return self._share[1]

    def add(self, tensor: Tensor) -> Tensor:
        try:
            dist.all_reduce(tensor)
        except (RuntimeError, ValueError) as error:  # the latter after the group broke down
            raise self._lost(error) from None
        return tensor

    def gather(self, rows: Tensor, work: Tensor) -> Tensor:
        own = self.mine(work).to(rows.device)
        return self.add(torch.where(own.reshape(-1, *(1 for _ in rows.shape[1:])), rows, torch.zeros_like(rows)))

    def from_first(self, tensor: Tensor) -> Tensor:
        return self.add(tensor.clone() if self.first else torch.zeros_like(tensor))

    def ask_first(self, question: Callable[[], Answer]) -> Answer:
        answer: Any = None
        refusal: PPFLError | None = None
        if self.first:
            try:
                answer = question()
            except PPFLError as error:
                refusal = error
        said = self._say(json.dumps({"answer": answer, "refused": refusal is not None}).encode())
        if refusal is not None:
            raise refusal
        heard = json.loads(said)
        if heard["refused"]:
            raise SystemExit(2)  # the first process says why
        result: Answer = answer if self.first else heard["answer"]
        return result

    def _say(self, message: bytes) -> bytes:
        length = self.add(torch.tensor([len(message) if self.first else 0], device=self.device))
        buffer = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.first:
            buffer.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        return bytes(self.add(buffer).cpu().numpy())

    def _lost(self, error: Exception) -> RankError:
        reason = str(error).splitlines()[0]
        return RankError(f"another of the {self.size} processes stopped answering process {self.rank} ({reason})")

    def _told_to_stop(self, signum: int, frame: FrameType | None) -> NoReturn:
        raise RankError(f"process {self.rank} of {self.size} was told to stop: most likely another one has died")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_first_process() -> bool:
    """Whether this is an ordinary run, or the first of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def launched_ranks(device: str) -> Ranks:
    """The processes of this run: several where torchrun started this one."""
    return TorchRanks(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 or dist.is_initialized() else ALONE


def balanced(work: Sequence[int], parts: int) -> list[list[int]]:
    """Positions in `parts` lists of about equal work: the largest first, always to the list that has least.

    >>> balanced([5, 4, 3, 3], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, at) for at in range(parts)]
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        load, at = heapq.heappop(loads)
        shares[at].append(position)
        heapq.heappush(loads, (load + work[position], at))
    return shares
