"""A round on many processes, on one machine or several: each works on clients of its own, whose state stays with it.

One all-reduce a round brings the sums together, and with them the rows where the server reads them; so every process
ends the round with the same server state, and no process is special but for writing files.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.contract import Algorithm, Plan, Problem, Total, Tree
from ..data import Federation
from .chunks import Engine, Outcome, Stacked
from .ranks import Ranks, TorchRanks


class Distributed:
    """The processes that torchrun started, each with an engine for its own clients."""

    name = "distributed"

    def __init__(self, inner: Engine | None = None, ranks: Ranks | None = None) -> None:
        self.inner = Stacked() if inner is None else inner
        self.ranks: Ranks = TorchRanks() if ranks is None else ranks

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome:
        mine = self.ranks.mine(federation.train.sizes.cpu())[plan.who].nonzero()[:, 0]
        # a process with nothing to do works for another's client, to see what the sums look like, and adds zeros
        at = mine if len(mine) else torch.zeros(1, dtype=torch.long)
        found = self.inner.run(algorithm, problem, federation, plan.only(at), clients, round)
        each_up = found.bytes_up // len(at)  # the same for every client
        if len(mine) == 0:
            found = _nothing(found, clients)
        public = {} if plan.private else {n: _placed(leaf, mine, len(plan.who)) for n, leaf in found.rows.items()}
        totals, public, met, lost = self._added(found, public)
        return Outcome(
            clients=found.clients,
            totals=totals,
            who=found.who if plan.private else plan.who,
            rows=found.rows if plan.private else public,
            loss=lost / met if met else float("nan"),
            samples=met,
            bytes_up=each_up * len(plan.who),
        )

    def _added(
        self, found: Outcome, rows: dict[str, Tensor]
    ) -> tuple[dict[str, Total], dict[str, Tensor], float, float]:
        """Totals, rows, samples met and loss over all processes, in one message."""
        leaves, structure = pytree.tree_flatten((found.totals, rows))
        like = leaves[0] if leaves else torch.zeros(1)
        lost = found.loss * found.samples if found.samples else 0.0
        leaves.append(torch.tensor([found.samples, lost], dtype=like.dtype, device=like.device))
        flat = self.ranks.add(torch.cat([leaf.flatten().to(like.dtype) for leaf in leaves]))
        parts = torch.split(flat, [leaf.numel() for leaf in leaves])
        *new, last = (part.reshape(leaf.shape).to(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True))
        totals, rows = pytree.tree_unflatten(new, structure)
        met, lost = last.tolist()
        return totals, rows, met, lost


def _nothing(found: Outcome, clients: Tree) -> Outcome:
    """The same of nobody."""
    return found._replace(
        clients=clients,
        totals=pytree.tree_map(torch.zeros_like, found.totals),
        who=found.who[:0],
        rows={name: leaf[:0] for name, leaf in found.rows.items()},
        samples=0.0,
    )


def _placed(rows: Tensor, at: Tensor, length: int) -> Tensor:
    """Rows at their places among all, zeros elsewhere."""
    return rows.new_zeros(length, *rows.shape[1:]).index_copy_(0, at.to(rows.device), rows)
