"""FedAvg and PPFL as a careful programmer would write them in PyTorch: what ppfl is compared with.

Tensors in memory, no DataLoader; one model (or K) into which the shared values are copied for each client; one
optimizer whose state is cleared; one gather per client and round; outputs that are kept while a membership moves.
Clients are trained one after the other, which is the point of the comparison. Tests check that these loops compute
what ppfl computes.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ppfl import Federation

FLOOR = 1e-6  # a membership that underflows to 0 could never come back
LEAST_SHARE = 0.1  # of an even share, as in ppfl: bounds the steps of a model that hardly any client uses
Values = dict[str, Tensor]


class Descent(NamedTuple):
    """How a client trains: one epoch of SGD in batches, or one full batch where the size is None."""

    lr: float
    momentum: float = 0.9
    batch_size: int | None = 128

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if self.batch_size is None:
            return iter([(x, y)])
        order = torch.randperm(len(x))
        shuffled = x.index_select(0, order), y.index_select(0, order)
        return zip(*(part.split(self.batch_size) for part in shuffled), strict=True)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


class Client(NamedTuple):
    weight: float
    x: Tensor
    y: Tensor


def clients_of(federation: Federation) -> list[Client]:
    own = (federation.train.client(i) for i in range(federation.n_clients))
    return [Client(float(p), one.x, one.y) for p, one in zip(federation.weights, own, strict=True)]


class FedAvgLoop:
    """One round at each call; `values` is the model between rounds."""

    def __init__(self, net: nn.Module, clients: list[Client], descent: Descent, participation: float = 1.0) -> None:
        self.clients, self.descent = clients, descent
        self.asked = max(1, round(participation * len(self.clients)))
        self.mine = copy.deepcopy(net)
        self.parameters = list(self.mine.parameters())
        self.optimizer = descent.optimizer(self.parameters)
        self.values = {name: p.detach().clone() for name, p in self.mine.named_parameters()}

    def __call__(self) -> None:
        chosen = [self.clients[at] for at in torch.randperm(len(self.clients))[: self.asked].tolist()]
        weight = sum(client.weight for client in chosen)
        totals = self.weighted_models(chosen)
        self.values = {name: total.div_(weight) for name, total in zip(self.values, totals, strict=True)}

    def weighted_models(self, chosen: list[Client]) -> list[Tensor]:
        """The sum of the models that these clients train, each times its client's weight."""
        totals = [torch.zeros_like(p) for p in self.parameters]
        for client in chosen:
            _load(self.parameters, self.values.values())
            self.optimizer.state.clear()
            for x, y in self.descent.batches(client.x, client.y):
                self.optimizer.zero_grad(set_to_none=True)
                cross_entropy(self.mine(x), y).backward()
                self.optimizer.step()
            with torch.no_grad():
                for total, p in zip(totals, self.parameters, strict=True):
                    total.add_(p, alpha=client.weight)
        return totals


class PPFLLoop:
    """PPFL from uniform memberships, by alternating blocks: every client moves its membership, then its models.

    As in ppfl, a client's steps are divided by |c|^2, its change is multiplied by |c|^2, and the server averages over
    members. A subclass defines how the K models are mixed.
    """

    def __init__(
        self,
        net: nn.Module,
        federation: Federation,
        descent: Descent,
        start: Values,  # (K, ...) of each parameter
        membership_steps: int = 1,
        membership_lr: float = 0.5,
    ) -> None:
        self.clients, self.descent = clients_of(federation), descent
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.values = {name: value.clone() for name, value in start.items()}
        one = next(iter(self.values.values()))
        self.k = len(one)
        self.memberships = one.new_full((len(self.clients), self.k), 1 / self.k)
        self.membership_steps, self.membership_lr = membership_steps, membership_lr

    def __call__(self) -> None:
        totals = {name: torch.zeros_like(value) for name, value in self.values.items()}
        for i, client in enumerate(self.clients):
            self.load()
            if self.membership_steps:
                self.memberships[i] = self.moved_membership(self.memberships[i], client)
            c = self.memberships[i]
            self.train(c, client)
            with torch.no_grad():
                self.add_change(totals, client.weight * float(c @ c))
        p = self.memberships.new_tensor([client.weight for client in self.clients])
        members = (p @ self.memberships).clamp_min(LEAST_SHARE / self.k * p.sum())
        counted = p @ self.memberships.square().sum(1)
        for name, value in self.values.items():
            value.add_((totals[name] - counted * value) / members.reshape(-1, *(1 for _ in value.shape[1:])))

    def moved_membership(self, c: Tensor, client: Client) -> Tensor:
        """Exponentiated gradient on all of the client's data."""
        kept = self.kept(client.x)
        for _ in range(self.membership_steps):
            c = c.detach().requires_grad_()
            (slope,) = torch.autograd.grad(cross_entropy(self.output(c, kept), client.y), c)
            c = torch.softmax(c.detach().log() - self.membership_lr * slope, 0).clamp_min(FLOOR)
            c = c / c.sum()
        return c

    def train(self, c: Tensor, client: Client) -> None:
        self.optimizer.state.clear()
        for x, y in self.descent.batches(client.x, client.y):
            self.optimizer.zero_grad(set_to_none=True)
            (cross_entropy(self.mixed(c, x), y) / (c @ c)).backward()
            self.optimizer.step()


class MixedOutputsLoop(PPFLLoop):
    """K networks per client, their outputs mixed."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.models = [copy.deepcopy(self.net).requires_grad_() for _ in range(self.k)]
        self.optimizer = self.descent.optimizer([p for model in self.models for p in model.parameters()])

    def load(self) -> None:
        for k, model in enumerate(self.models):
            _load(model.parameters(), (value[k] for value in self.values.values()))

    def kept(self, x: Tensor) -> Tensor:
        """The outputs of the shared models, (K, N, ...), which a membership's steps do not change."""
        with torch.no_grad():
            return torch.stack([model(x) for model in self.models])

    def output(self, c: Tensor, kept: Tensor) -> Tensor:
        return torch.tensordot(c, kept, dims=1)

    def mixed(self, c: Tensor, x: Tensor) -> Tensor:
        return sum(c_k * model(x) for c_k, model in zip(c, self.models, strict=True))

    def add_change(self, totals: Values, weight: float) -> None:
        for k, model in enumerate(self.models):
            for name, p in model.named_parameters():
                totals[name][k].add_(p, alpha=weight)


class MixedWeightsLoop(PPFLLoop):
    """K sets of parameters per client, one network with their mixture, autograd through the mixture."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.mine = {name: nn.Parameter(value.clone()) for name, value in self.values.items()}
        self.optimizer = self.descent.optimizer(list(self.mine.values()))

    def load(self) -> None:
        _load(self.mine.values(), self.values.values())

    def kept(self, x: Tensor) -> Tensor:
        return x

    def output(self, c: Tensor, kept: Tensor) -> Tensor:
        return self._run(self.values, c, kept)

    def mixed(self, c: Tensor, x: Tensor) -> Tensor:
        return self._run(self.mine, c, x)

    def add_change(self, totals: Values, weight: float) -> None:
        for name, p in self.mine.items():
            totals[name].add_(p, alpha=weight)

    def _run(self, values: Values, c: Tensor, x: Tensor) -> Tensor:
        weights = {name: torch.tensordot(c, value, dims=1) for name, value in values.items()}
        return functional_call(self.net, weights, (x,))


PPFL_LOOPS = {"outputs": MixedOutputsLoop, "weights": MixedWeightsLoop}


@torch.no_grad()
def _load(parameters, values) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
