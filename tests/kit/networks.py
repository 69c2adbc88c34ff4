"""Small networks for samples of four numbers and labels of three classes, if not said otherwise."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ppfl.core.adapters import adapted_layers as adapted_layers
from ppfl.core.population import Mixture as Mixture


def with_seed(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A fresh network, with the same values every time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes milliseconds
        return make().to(dtype)


def make_net(dim=4, hidden=5, classes=3, seed=0, dtype=torch.float32) -> nn.Module:
    return with_seed(lambda: nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, classes)), seed, dtype)


def make_linear(dim=4, classes=3, seed=0, dtype=torch.float32) -> nn.Module:
    return with_seed(lambda: nn.Linear(dim, classes), seed, dtype)


class Recurrent(nn.Module):
    """Four steps of one number each; outputs and last states are classified."""

    def __init__(self, kind=nn.LSTM, packed=False, dropout=0.0):
        super().__init__()
        self.cells, self.out = kind(1, 5, batch_first=True), nn.Linear(5, 3)
        self.dropout, self.packed = nn.Dropout(dropout), packed

    def forward(self, x):
        steps = x[:, :, None]
        if self.packed:
            lengths = 1 + (x[:, 1:] > -0.5).sum(1)  # any rule that differs between samples
            steps = pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        found, state = self.cells(steps)
        if self.packed:
            found, _ = pad_packed_sequence(found, batch_first=True, total_length=4)
        last = sum(state) if isinstance(state, tuple) else state
        return self.out(self.dropout(found.sum(1) + last[0]))


class Cube(torch.autograd.Function):  # without setup_context, so that torch.func refuses it
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        return 3 * ctx.saved_tensors[0] ** 2 * slope


class OwnFunction(nn.Module):  # an activation with a backward pass of its own
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(Cube.apply(self.cells(x)))


class Branches(OwnFunction):  # looks at each sample with Python's `if`
    def forward(self, x):
        hidden = self.cells(x)
        return self.out(torch.stack([torch.tanh(h) if float(h.detach().sum()) > 0 else torch.relu(h) for h in hidden]))


class Residual(nn.Module):  # a layer with layers on both sides, and a skip around it
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.out(torch.tanh(self.middle(hidden)) + hidden)


def shared_layer():
    layer = nn.Linear(5, 5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 3))


class View(nn.Module):  # flattens images in one memory layout alone, so that channels cannot be last
    def forward(self, x):
        return x.view(len(x), -1)


class PartlyFrozen(nn.Module):
    """A frozen layer, a buffer, a body of which a part is frozen, frozen statistics, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.body = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 5))
        self.norm = nn.BatchNorm1d(5)
        self.norm(3 + 2 * torch.randn(50, 5))  # statistics that are not the first ones
        self.norm.eval()

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(self.scale * self.embedding(x)))))


class Words(nn.Module):
    """One row of outputs at every position of a text; the output layer may have the weight of the embedding."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.hidden(self.embed(tokens).cumsum(1))))


class WordsAndAge(Words):
    """Takes several inputs as columns: four tokens and a number, by which the outputs at the last token are scaled."""

    def forward(self, x):
        return super().forward(x[:, :4].long())[:, -1] * x[:, 4:]


def long_chain() -> nn.Module:
    twice, inner = nn.Tanh(), nn.Linear(6, 5, bias=False)
    layers = nn.Linear(4, 6), twice, nn.Sequential(inner, nn.Sigmoid()), nn.Linear(5, 4), twice, nn.Linear(4, 3)
    return nn.Sequential(nn.Flatten(), *layers, nn.ReLU())


def filters(channels=2, flatten=nn.Flatten):
    convolution = nn.Conv2d(channels, 4, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), flatten(), nn.Linear(16, 3))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 4), layer, nn.Flatten(), nn.Linear(8, 3))
