"""Small federations and networks that the tests share."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from ppfl.core.population import Population
from ppfl.data.federation import Federation


def make_federation(sizes=(7, 12, 20, 5), dim=4, classes=3, seed=0, dtype=torch.float32, **settings) -> Federation:
    """Clients of unequal size whose labels come from linear models of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), dim, generator=generator, dtype=torch.float64)
    clients = [f"client-{i}" for i, size in enumerate(sizes) for _ in range(size)]
    models = torch.randn(len(sizes), dim, classes, generator=generator, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = torch.einsum("nd,ndc->nc", x, models[owner]).argmax(1)
    federation = Federation.from_arrays(x.float(), y, clients, **{"test_fraction": 0.0, **settings})
    return federation.to(dtype=dtype) if dtype != torch.float32 else federation


def make_contradicting_federation(groups=(0, 1, 0, 0, 1), size=12, dtype=torch.float64) -> Federation:
    """Clients with the same x and two classes; those of group 1 have the two labels the other way round."""
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    clients = [f"client-{i}" for i in range(len(groups)) for _ in range(size)]
    labels = torch.cat([1 - y if group else y for group in groups])
    return Federation.from_arrays(x.repeat(len(groups), 1), labels, clients, test_fraction=0.0).to(dtype=dtype)


def make_net(dim=4, hidden=5, classes=3, seed=0, dtype=torch.float32) -> nn.Module:
    """A two-layer perceptron."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, classes)).to(dtype)


def make_linear(dim=4, classes=3, seed=0, dtype=torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(dim, classes).to(dtype)


def make_population(k=2, mix="outputs", net=None, **settings) -> Population:
    return Population(make_net() if net is None else net, k=k, mix=mix, **settings)


# ---------------------------------------------------------------------- networks for vmap to refuse


class Recurrent(nn.Module):
    """Four steps of one number each; the last state is classified."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, packed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.cells, self.out = kind(1, 5, batch_first=True), nn.Linear(5, 3)
        self.dropout, self.packed = nn.Dropout(dropout), packed

    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, :, None]
        if self.packed:
            lengths = 1 + (x[:, 1:] > -0.5).sum(1)  # any rule that differs between samples
            steps = pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        _, state = self.cells(steps)
        last = state[0] if isinstance(state, tuple) else state
        return self.out(self.dropout(last[0]))


class Cube(torch.autograd.Function):
    """Without setup_context, so that torch.func refuses it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


class OwnFunction(nn.Module):
    """An activation with a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Cube.apply(self.cells(x)))


class Branches(OwnFunction):
    """Looks at each sample with Python's `if`."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cells(x)
        return self.out(torch.stack([torch.tanh(h) if float(h.detach().sum()) > 0 else torch.relu(h) for h in hidden]))


NETWORKS = {
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "packed": lambda: Recurrent(packed=True),
    "function": OwnFunction,
    "branches": Branches,
}


def make_network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """One of NETWORKS, with values of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name]().to(dtype)
