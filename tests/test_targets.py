"""Targets of any shape: every engine agrees, and FedAvg agrees with a plain PyTorch loop."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ppfl import Federation, Population, fit
from ppfl.algorithms import CFL, IFCA, METHODS, PPFL, FedAvg, FedEM, FineTune
from ppfl.core.losses import IGNORED

SIZES = (5, 9, 6)


class Words(nn.Module):
    """One output per class at every position of a sequence of tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.embed(x).cumsum(1))


class Task(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    net: nn.Module
    loss: str
    plain: object  # (output, y) -> the mean loss, by torch


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def per_sequence(output, y):
    each = F.cross_entropy(output.movedim(-1, 1), y, ignore_index=IGNORED, reduction="none")
    return (each.sum(1) / (y != IGNORED).sum(1)).mean()


def tasks():
    n = sum(SIZES)
    torch.manual_seed(0)
    words = torch.randint(0, 3, (n, 4))
    words[torch.arange(4) >= torch.randint(1, 5, (n, 1))] = IGNORED
    hidden = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    grid = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)))
    half_square = lambda output, y: (output - y).square().flatten(1).sum(1).mean() / 2  # noqa: E731
    labels = (draw(n, 4) > 0).float()
    return {
        "several labels": Task(draw(n, 3), labels, hidden, "multilabel", F.binary_cross_entropy_with_logits),
        "labels as integers": Task(
            draw(n, 3), labels.long(), hidden, "multilabel",
            lambda output, y: F.binary_cross_entropy_with_logits(output, y.float()),
        ),
        "several numbers": Task(draw(n, 3), draw(n, 4), hidden, "squared", half_square),
        "a grid of numbers": Task(draw(n, 3), draw(n, 2, 4), grid, "squared", half_square),
        "sequences": Task(torch.randint(0, 7, (n, 4)), words, Words(), "cross_entropy", per_sequence),
    }  # fmt: skip


TASKS = tasks()


def federation_of(task, test_fraction=0.0):
    clients = [f"c{i}" for i, size in enumerate(SIZES) for _ in range(size)]
    tokens = not task.x.is_floating_point()
    return Federation.from_arrays(task.x, task.y, clients, test_fraction=test_fraction, tokens=tokens)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_fedavg_is_a_plain_loop(name, engine):
    task = TASKS[name]
    federation = federation_of(task)
    method = FedAvg(lr=0.2, momentum=0.0, batch_size=None, local_steps=2, schedule="constant")
    fitted = fit(Population(task.net, k=1, loss=task.loss), federation, method, rounds=2, engine=engine)

    net = copy.deepcopy(task.net)
    for _ in range(2):
        ends = []
        for part in (federation.client(i)["train"] for i in federation.ids):
            mine = copy.deepcopy(net)
            for _ in range(2):
                mine.zero_grad()
                task.plain(mine(part.x), part.y).backward()
                with torch.no_grad():
                    for p in mine.parameters():
                        p -= 0.2 * p.grad
            ends.append({name: len(part) / len(federation.train) * v for name, v in mine.state_dict().items()})
        net.load_state_dict({name: sum(end[name] for end in ends) for name in ends[0]})
    torch.testing.assert_close(fitted.models(["c0"]).values, net.state_dict(), check_stride=False)
    scored = fitted.evaluate(federation, "train").pooled_loss
    assert scored == pytest.approx(task.plain(net(federation.train.x), federation.train.y).item(), rel=1e-4)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("name", TASKS)
def test_engines_agree_on_ppfl(name, mix):
    task = TASKS[name]
    federation = federation_of(task, test_fraction=0.3)
    one, other = (
        fit(
            Population(task.net, k=2, mix=mix, loss=task.loss), federation, PPFL(lr=0.1, batch_size=3), rounds=3,
            engine=engine,
        )
        for engine in ("loop", "stacked")
    )  # fmt: skip
    torch.testing.assert_close(one.memberships, other.memberships, rtol=1e-4, atol=1e-5)
    assert one.history[-1]["test_loss"] == pytest.approx(other.history[-1]["test_loss"], rel=1e-4)
    assert not torch.allclose(one.memberships, torch.tensor(0.5))
    predicted = one.predict("c1", task.x[:3])
    torch.testing.assert_close(predicted, other.predict("c1", task.x[:3]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["several labels", "sequences"])
def test_every_method_takes_several_labels(name, method):
    task = TASKS[name]
    federation = federation_of(task, test_fraction=0.3)
    chosen = FineTune(method=FedAvg(lr=0.1)) if method is FineTune else method(lr=0.1, batch_size=4)
    k, mix = {PPFL: (2, "outputs"), FedEM: (2, "predictions"), IFCA: (2, "outputs"), CFL: (2, "outputs")}.get(
        method, (1, "outputs")
    )
    losses = []
    for engine in ("loop", "stacked"):
        population = Population(task.net, k=k, mix=mix, loss=task.loss)
        losses.append(fit(population, federation, chosen, rounds=2, engine=engine).history[-1]["test_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_padding_counts_in_nothing():
    task = TASKS["sequences"]
    federation = federation_of(task)
    longer = torch.cat([task.y, torch.full((len(task.y), 2), IGNORED)], dim=1)
    padded = task._replace(x=F.pad(task.x, (0, 2)), y=longer)
    method = FedAvg(lr=0.2, batch_size=4)
    fits = [fit(Population(task.net, k=1), each, method, rounds=2) for each in (federation, federation_of(padded))]
    torch.testing.assert_close(fits[0].models(["c0"]).values, fits[1].models(["c0"]).values)
    scores = [
        fitted.evaluate(each, "train").pooled
        for fitted, each in zip(fits, (federation, federation_of(padded)), strict=True)
    ]
    assert scores[0] == pytest.approx(scores[1])


def test_label_counts_leave_padding_out():
    task = TASKS["sequences"]
    federation = federation_of(task)
    assert federation.n_classes == 3
    assert int(federation.label_counts().sum()) == int((task.y != IGNORED).sum())
    assert "y (4,), 3 classes" in federation.describe()
