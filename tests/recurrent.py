"""Networks that torch.func.vmap cannot run, for samples (N, 4) of 3 classes."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


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
