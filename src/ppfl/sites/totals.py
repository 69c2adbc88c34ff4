"""What the uploads of clients add up to at a site: sums, rows, and the norms that filters look at."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Method, Sum, Total, Upload, Work
from ..core.trees import named_leaves, tree_leaves, tree_map
from ..errors import SettingError
from ..io.codec import size_of
from .filters import FilterMemory, Norms, row_norms

_MEMBERS = "members"  # among the names of sums: how much each canonical model is used


def refuse_undeclared_rows(method: Method, upload: Upload) -> None:
    """What is seen client by client must be said in `shows`."""
    for name in upload.rows:
        if not name.startswith(method.shows):
            raise SettingError(
                f"{method.name} uploads the row {name!r}, which its `shows` {method.shows} does not name; "
                f"name it there, or upload a sum"
            )


def refuse_sum(name: str, sum_: Sum, clients: int) -> None:
    """Refuse a sum of another shape: its total would show clients one by one, or nothing that makes sense."""
    if not isinstance(sum_, Sum):
        raise SettingError(f"the upload {name!r} is a {type(sum_).__name__}; give a Sum(weight, value)")
    if sum_.weight is not None and (sum_.weight.dim() != 2 or len(sum_.weight) != clients):
        raise SettingError(
            f"the weight of the sum {name!r} has shape {tuple(sum_.weight.shape)}; expected ({clients}, r): r weights "
            f"for each of the {clients} clients, or None"
        )
    for leaf in tree_leaves(sum_.value):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != clients or not leaf.is_floating_point():
            found = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise SettingError(
                f"the sum {name!r} has a value that is {found}; expected float tensors with one row for each of the "
                f"{clients} clients"
            )


def _weighted_sums(weight: Tensor, leaf: Tensor) -> Tensor:
    """sum_i weight_ir leaf_i, (r, ...), for weights (C, r) of a leaf (C, ...)."""
    return (weight.T @ leaf.reshape(len(leaf), -1)).view(weight.shape[1], *leaf.shape[1:])


class Spread(NamedTuple):
    """Over how many clients weights spread: ten equal ones are ten, and one that outweighs all others is one."""

    total: Tensor  # (r,): sum_i |w_ir|
    squares: Tensor  # (r,): sum_i w_ir^2

    @classmethod
    def of(cls, weights: Tensor) -> Spread:
        """Of weights (C, r)."""
        wide = weights.detach().double().cpu()
        return cls(wide.abs().sum(0), wide.square().sum(0))

    @property
    def clients(self) -> Tensor:
        """(r,): the effective number of clients, (sum_i |w_ir|)^2 / sum_i w_ir^2; 0 where all weights are 0."""
        return self.total.square() / self.squares.clamp_min(torch.finfo(torch.float64).tiny)

    def is_few(self, fewest: float) -> Tensor:
        """(r,): whether that is less than so many; so many equal ones are not, however their weights are rounded."""
        return self.clients < fewest * (1 - 1e-9)


class UploadTotals:
    """What the uploads of some of a round's clients add up to. One thread's own; threads' are joined at the end."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.totals: dict[str, Total] = {}
        self.metrics: dict[str, Tensor] = {}
        self.spread: dict[str, Spread] = {}  # of the weights of each sum, and of memberships where they were given
        self.bytes_up = 0
        self.kind = ""  # which parts the uploads have
        self._parts: list[tuple[Tensor, dict[str, Tensor], Tensor]] = []  # positions, rows, norms (C, 3)

    def add(self, at: Tensor, work: Work, p: Tensor, batch: Tensor) -> None:
        """The work of the clients at these positions of the round (C,), with importance p (C,) and so many samples in
        a batch (C,)."""
        upload = work.upload
        for name, sum_ in upload.sums.items():
            self._add_sum(name, sum_, p)
        metrics = {name: value.detach().double() for name, value in upload.metrics.items()}
        for name, value in metrics.items():
            total = value.sum().cpu()
            self.metrics[name] = self.metrics[name] + total if name in self.metrics else total
        sent = [leaf for sum_ in upload.sums.values() for leaf in tree_leaves(sum_.value)] + [*upload.rows.values()]
        models, counts = [v for v in sent if v.dim() > 1], [v for v in sent if v.dim() == 1]
        rest = row_norms([*tree_leaves(work.client), *counts, *metrics.values()], len(at))
        steps = metrics["samples"].cpu() / batch if "samples" in metrics else torch.ones(len(at))
        norms = torch.stack([row_norms(models, len(at)), steps.double().clamp_min(1), rest], dim=1)
        rows = {name: leaf.clone() for name, leaf in upload.rows.items()}  # may be memory that is used again
        self._parts.append((at, rows, norms))
        self.kind = ",".join([*upload.sums, *upload.rows])
        self.bytes_up += size_of(Upload(upload.sums, upload.rows))

    def add_members(self, weights: Tensor) -> None:
        """How much each canonical model is used by each client of a chunk, (C, K): p_i c_ik."""
        self._add_spread(_MEMBERS, Spread.of(weights))

    def _add_spread(self, name: str, spread: Spread) -> None:
        known = self.spread.get(name)
        self.spread[name] = spread if known is None else tree_map(torch.add, known, spread)

    def leave_out_few(self, fewest: float, canonical: Container[str]) -> None:
        """Replace by 0 what is a sum over effectively fewer clients: of each sum the rows with such weights, with their
        weights; and of canonical models that are side by side in one row, those that so few clients use."""
        members = self.spread.get(_MEMBERS)
        for name, total in self.totals.items():
            few = self.spread[name].is_few(fewest)
            total.weight[few.to(total.weight.device)] = 0
            for path, leaf in named_leaves(total.value).items():
                leaf[few.to(leaf.device)] = 0
                if members is not None and path in canonical and leaf.shape[:2] == (1, len(members.total)):
                    leaf[:, members.is_few(fewest).to(leaf.device)] = 0

    def _add_sum(self, name: str, sum_: Sum, p: Tensor) -> None:
        """sum_i p_i weight_i ⊗ value_i over a chunk."""
        refuse_sum(name, sum_, len(p))
        weight = p[:, None] if sum_.weight is None else p[:, None] * sum_.weight  # (C, r)
        self._add_spread(name, Spread.of(weight))
        total = self.totals.get(name)
        if total is None:
            self.totals[name] = Total(weight.sum(dim=0), tree_map(partial(_weighted_sums, weight), sum_.value))
            return
        total.weight.add_(weight.sum(dim=0))
        for onto, leaf in zip(tree_leaves(total.value), tree_leaves(sum_.value), strict=True):
            onto.view(len(onto), -1).addmm_(weight.T, leaf.reshape(len(leaf), -1))

    def join(self, other: UploadTotals) -> None:
        """Add another thread's."""
        for name, total in other.totals.items():
            self.totals[name] = tree_map(torch.add, self.totals[name], total) if name in self.totals else total
        for metric, value in other.metrics.items():
            self.metrics[metric] = self.metrics[metric] + value if metric in self.metrics else value
        for name, spread in other.spread.items():
            self._add_spread(name, spread)
        self._parts += other._parts
        self.bytes_up += other.bytes_up

    @property
    def rows(self) -> dict[str, Tensor]:
        """(S, ...), in the order of the round's clients."""
        return {name: self._in_order([rows[name] for _, rows, _ in self._parts]) for name in self._parts[0][1]}

    def norms(self, memory: FilterMemory) -> Norms:
        """Of every client's upload, in the order of the round's clients."""
        upload, steps, rest = self._in_order([norms for *_, norms in self._parts]).unbind(1)
        return Norms(upload, steps, rest, *memory.get(self.kind, ()))

    def _in_order(self, parts: list[Any]) -> Tensor:
        together: Tensor = parts[0].new_empty(self.clients, *parts[0].shape[1:])
        for (at, *_), part in zip(self._parts, parts, strict=True):
            together[at.to(together.device)] = part
        return together
