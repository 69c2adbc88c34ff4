"""Small federations, and `PROBLEMS`: kinds of network, input, target and loss, for laws that hold for all."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit import networks
from kit.networks import make_linear, make_net, with_seed
from ppfl import Federation, Population, lora, with_adapters


def make_federation(sizes=(7, 12, 20, 5), dim=4, classes=3, seed=0, dtype=torch.float32, **settings) -> Federation:
    """Clients of unequal size whose labels come from linear models of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), dim, generator=generator, dtype=torch.float64)
    models = torch.randn(len(sizes), dim, classes, generator=generator, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = torch.einsum("nd,ndc->nc", x, models[owner]).argmax(1)
    clients = [f"client-{i}" for i in owner.tolist()]
    federation = Federation.from_arrays(x.float(), y, clients, **{"test_fraction": 0.0, **settings})
    return federation.to(dtype=dtype) if dtype != torch.float32 else federation


def make_contradicting_federation(groups=(0, 1, 0, 0, 1), size=12, dtype=torch.float64) -> Federation:
    """Clients with the same x and two classes; those of group 1 have the two labels the other way round."""
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    clients = [f"client-{i}" for i in range(len(groups)) for _ in range(size)]
    labels = torch.cat([1 - y if group else y for group in groups])
    return Federation.from_arrays(x.repeat(len(groups), 1), labels, clients, test_fraction=0.0).to(dtype=dtype)


LINKS = {  # from outputs to predictions, and back
    "softmax": (partial(torch.softmax, dim=-1), torch.log),
    "logit": (torch.sigmoid, torch.logit),
    "log": (torch.exp, torch.log),
    "identity": (lambda output: output, lambda prediction: prediction),
}


class Problem(NamedTuple):
    """A kind of data and network with the loss that torch itself gives; in double precision, without test samples."""

    federation: Federation
    net: Callable[[], nn.Module]  # fresh, with the same values every time
    loss: Any = "cross_entropy"  # as `Population` takes it
    mean_loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy  # of outputs and targets, by torch
    link: str = "softmax"
    metric: str = "accuracy"
    canonical: Sequence[str | Sequence[str]] = ("all",)  # parts to try

    def population(self, k=1, **settings):
        return Population(self.net(), k=k, loss=self.loss, **settings)

    def plain(self, net, x, y):
        return self.mean_loss(net(x), y)

    def mixed_predictions(self, outputs, c):
        """The output that belongs to the mean prediction of K models, outputs (K, ...)."""
        inverse, link = LINKS[self.link]
        return link(torch.einsum("k,k...->...", c, inverse(outputs)))


def by_torch(criterion):
    """The mean loss by a criterion of torch, which may want targets as integers or in the shape of outputs."""
    own = copy.deepcopy(criterion).double()
    own.reduction = "mean"
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss | nn.MultiMarginLoss):
        return own
    return lambda output, y: own(output.reshape(y.shape), y.to(output.dtype))


def half_squares(output, y):
    return (output.reshape(y.shape) - y).square().sum() / (2 * len(y))


def mean_of_texts(output, y, smoothing=0.0):  # the mean over samples of the mean over the tokens that count
    each = F.cross_entropy(output.movedim(-1, 1), y, reduction="none", label_smoothing=smoothing)
    return (each.sum(1) / (y != -100).sum(1)).mean()


def power(output, y):
    return (output - y).abs().pow(1.5)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SIZES, N = (5, 9, 6), 20  # of the clients, and together
X, Y = numbers(N, 4), numbers(N, 3, seed=1)
LABELS, BINARY = Y.argmax(1), (Y > 0).long()
TEXTS = torch.randint(0, 7, (N, 4), generator=torch.Generator().manual_seed(2))
NEXT = ((TEXTS + 1) % 7).masked_fill(torch.arange(4) > torch.arange(N)[:, None] % 4, -100)  # -100 is padding


def of_net(make: Callable[[], nn.Module], *parts, x: Any = X, y: Tensor = LABELS, tokens=False, **rest) -> Problem:
    clients = [f"c{i}" for i, size in enumerate(SIZES) for _ in range(size)]
    federation = Federation.from_arrays(x, y, clients, test_fraction=0.0, tokens=tokens).to(dtype=torch.float64)
    return Problem(federation, partial(with_seed, make), **{"canonical": ("all", *parts), **rest})


def of_loss(loss: Any, y: Tensor, link: str, metric: str, mean_loss=None, last=()) -> Problem:
    """A chain of layers with one output per number of the target, or three for labels."""
    width = 3 if y is LABELS else y[0].numel()
    make = lambda: nn.Sequential(*make_net(classes=width), *last)  # noqa: E731
    return of_net(make, y=y, loss=loss, mean_loss=mean_loss or by_torch(loss), link=link, metric=metric)


BCE, WEIGHTED_BCE = nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))
SMOOTHED, PAIRS = nn.CrossEntropyLoss(label_smoothing=0.1), [nn.Unflatten(1, (2, 2))]
TEXT = {"x": TEXTS, "y": NEXT, "tokens": True, "mean_loss": mean_of_texts}
SMOOTHED_TEXT = TEXT | {"loss": SMOOTHED, "mean_loss": partial(mean_of_texts, smoothing=0.1)}
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "linear": partial(of_net, make_linear),
    "chain": partial(of_net, make_net, "0", "2", ("0", "2")),
    "long chain": partial(of_net, networks.long_chain, "6", x=X.view(N, 2, 2)),
    "lstm": partial(of_net, networks.Recurrent, "out", "cells"),
    "gru": partial(of_net, partial(networks.Recurrent, nn.GRU)),
    "rnn": partial(of_net, partial(networks.Recurrent, nn.RNN)),
    "packed": partial(of_net, partial(networks.Recurrent, packed=True), "out", "cells"),
    "function": partial(of_net, networks.OwnFunction, "out", "cells"),
    "branches": partial(of_net, networks.Branches),
    "residual": partial(of_net, networks.Residual, "middle", ("first", "middle")),
    "shared layer": partial(of_net, networks.shared_layer, "2", "4"),
    "group norm": partial(of_net, lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)), "1"),
    "attention": partial(of_net, networks.attention, "2"),
    "images": partial(of_net, networks.filters, "0", "4", x=numbers(N, 2, 4, 4)),
    "images of one channel": partial(of_net, partial(networks.filters, 1), x=numbers(N, 1, 4, 4)),
    "images in one layout": partial(of_net, partial(networks.filters, flatten=networks.View), x=numbers(N, 2, 4, 4)),
    "partly frozen": partial(of_net, networks.PartlyFrozen, "body", "head"),
    "adapters": partial(of_net, lambda: with_adapters(make_net(), lora(rank=2)), canonical=("adapters.up",)),
    "texts": partial(of_net, networks.Words, "hidden", **TEXT),
    "tied": partial(of_net, partial(networks.Words, tied=True), "out", "hidden", **SMOOTHED_TEXT),
    "several inputs": partial(of_net, networks.WordsAndAge, "out", x=torch.cat([TEXTS, X[:, :1]], 1)),
    "several labels": partial(of_loss, "multilabel", BINARY, "logit", "accuracy", by_torch(BCE)),
    "one label": partial(of_loss, "logistic", BINARY[:, 0], "logit", "accuracy", by_torch(BCE)),
    "counts": partial(of_loss, "poisson", Y[:, 0].exp().round(), "log", "deviance", by_torch(nn.PoissonNLLLoss())),
    "one number": partial(of_loss, "squared", Y[:, 0], "identity", "rmse", half_squares),
    "several numbers": partial(of_loss, "squared", Y, "identity", "rmse", half_squares),
    "grid of numbers": partial(of_loss, "squared", numbers(N, 2, 2), "identity", "rmse", half_squares, PAIRS),
    "own loss": partial(of_loss, power, Y, "identity", "power", lambda output, y: power(output, y).mean()),
    "huber": partial(of_loss, nn.HuberLoss(delta=0.3, reduction="sum"), Y, "identity", "mae"),
    "mse": partial(of_loss, nn.MSELoss(), Y, "identity", "rmse"),
    "smooth l1": partial(of_loss, nn.SmoothL1Loss(beta=0.5), Y, "identity", "mae"),
    "l1": partial(of_loss, nn.L1Loss(), Y[:, 0], "identity", "mae"),
    "poisson": partial(of_loss, nn.PoissonNLLLoss(), Y.exp().round(), "log", "deviance"),
    "bce": partial(of_loss, WEIGHTED_BCE, BINARY.float(), "logit", "accuracy"),
    "bce of one label": partial(of_loss, BCE, BINARY[:, 0], "logit", "accuracy"),
    "probabilities": partial(of_loss, nn.BCELoss(), BINARY.float(), "identity", "accuracy", None, [nn.Sigmoid()]),
    "soft margin": partial(of_loss, nn.SoftMarginLoss(), 2.0 * BINARY - 1, "logit", "accuracy"),
    "multilabel soft margin": partial(of_loss, nn.MultiLabelSoftMarginLoss(), BINARY.float(), "logit", "accuracy"),
    "cross entropy": partial(of_loss, SMOOTHED, LABELS, "softmax", "accuracy"),
    "cross entropy of probabilities": partial(of_loss, nn.CrossEntropyLoss(), Y.softmax(-1), "softmax", "accuracy"),
    "nll": partial(of_loss, nn.NLLLoss(), LABELS, "log", "accuracy", None, [nn.LogSoftmax(-1)]),
    "multi margin": partial(of_loss, nn.MultiMarginLoss(), LABELS, "identity", "accuracy"),
}
