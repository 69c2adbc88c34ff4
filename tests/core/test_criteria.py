"""Criteria of torch and plain functions as losses: the same numbers as torch's own, through fit()."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ppfl import Federation, Population, fit
from ppfl.algorithms import PPFL, FedAvg
from ppfl.core import Loss, ModelError, links
from ppfl.core.criteria import as_loss
from ppfl.core.losses import IGNORED

N = 18
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=G)
LABELS = torch.randint(0, 4, (N,), generator=G)
SEQUENCES = torch.randint(0, 4, (N, 2), generator=G)
SEQUENCES[::3, 1] = IGNORED
NUMBERS = torch.randn(N, 4, generator=G)
BINARY = (NUMBERS > 0).float()
CLIENTS = [f"c{i % 3}" for i in range(N)]
HEAD, ONE = nn.Linear(3, 4), nn.Linear(3, 1)
PROBABILITIES = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
LOG_PROBABILITIES = nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(-1))
WORDS = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)))
CASES = {
    "huber": (nn.HuberLoss(delta=0.3), HEAD, NUMBERS, "mae"),
    "huber of one number": (nn.HuberLoss(delta=0.3, reduction="sum"), ONE, NUMBERS[:, 0], "mae"),
    "mse": (nn.MSELoss(), HEAD, NUMBERS, "rmse"),
    "l1": (nn.L1Loss(), ONE, NUMBERS[:, 0], "mae"),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), HEAD, NUMBERS, "mae"),
    "poisson": (nn.PoissonNLLLoss(), HEAD, NUMBERS.exp().round(), "deviance"),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), HEAD, BINARY, "accuracy"),
    "bce of integers": (nn.BCEWithLogitsLoss(), HEAD, BINARY.long(), "accuracy"),
    "bce of one label": (nn.BCEWithLogitsLoss(), ONE, BINARY[:, 0].long(), "accuracy"),
    "bce of probabilities": (nn.BCELoss(), PROBABILITIES, BINARY, "accuracy"),
    "soft margin": (nn.SoftMarginLoss(), HEAD, 2 * BINARY - 1, "accuracy"),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), HEAD, BINARY, "accuracy"),
    "cross entropy": (nn.CrossEntropyLoss(label_smoothing=0.1), HEAD, LABELS, "accuracy"),
    "cross entropy of probabilities": (nn.CrossEntropyLoss(), HEAD, NUMBERS.softmax(-1), "accuracy"),
    "cross entropy of sequences": (nn.CrossEntropyLoss(label_smoothing=0.1), WORDS, SEQUENCES, "accuracy"),
    "nll": (nn.NLLLoss(), LOG_PROBABILITIES, LABELS, "accuracy"),
    "multi margin": (nn.MultiMarginLoss(), HEAD, LABELS, "accuracy"),
    "function": (lambda output, y: (output - y).abs().pow(1.5), HEAD, NUMBERS, "<lambda>"),
}


def federation_of(y):
    return Federation.from_arrays(X, y, CLIENTS, test_fraction=0.0)


def plainly(criterion, output, y):
    """The mean over samples of the mean over a sample's numbers, with torch's own call."""
    if not isinstance(criterion, nn.Module):
        return criterion(output, y).mean()
    own = copy.deepcopy(criterion)
    own.reduction = "none"
    if y.dim() == 2 and not y.is_floating_point() and output.dim() == 3:
        each = own(output.movedim(-1, 1), y)
        return (each.sum(1) / (y != IGNORED).sum(1)).mean()
    y = y.to(output.dtype) if not isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)) else y
    return own(output.reshape(y.shape) if y.dim() == 1 and output.shape[1:] == (1,) else output, y).mean()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("name", CASES)
def test_fedavg_follows_torchs_own_gradient(name, engine):
    criterion, net, y, metric = CASES[name]
    federation = federation_of(y)
    fitted = fit(
        Population(net, k=1, loss=criterion), federation,
        FedAvg(lr=0.1, momentum=0.0, batch_size=None, local_steps=1, schedule="constant"), rounds=1, engine=engine,
    )  # fmt: skip
    mine = copy.deepcopy(net)
    plainly(criterion, mine(federation.train.x), federation.train.y).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in mine.named_parameters()}
    torch.testing.assert_close(fitted.models(["c0"]).values, expected, check_stride=False)
    assert fitted.problem.population.loss.metric_name == metric


@pytest.mark.filterwarnings("ignore:There is a performance drop.*margin_loss")  # torch loops over clients in these two
@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("name", CASES)
def test_engines_agree_on_criteria(name, mix):
    criterion, net, y, metric = CASES[name]
    federation = federation_of(y).holdout(0.3)
    one, other = (
        fit(Population(net, k=2, mix=mix, loss=criterion), federation, PPFL(lr=0.05), rounds=3, engine=engine)
        for engine in ("loop", "stacked")
    )
    torch.testing.assert_close(one.memberships, other.memberships, rtol=1e-3, atol=1e-5)
    for key in ("test_loss", metric, f"{metric}_worst_tenth"):
        assert one.history[-1][key] == pytest.approx(other.history[-1][key], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("function", "cross entropy of sequences")])
def test_the_mixed_loss_is_that_of_the_mean_prediction(name):
    criterion, net, y, _ = CASES[name]
    loss = as_loss(criterion)
    outputs = torch.stack([net(X), net(-X)]).detach()
    c = torch.tensor([0.3, 0.7])
    mean = torch.tensordot(c, loss.inverse_link(outputs), dims=1)
    mixed = loss.link.mixed(outputs, c)
    torch.testing.assert_close(loss.inverse_link(mixed), mean)
    torch.testing.assert_close(loss.mixed(outputs, c, y), loss.per_sample(mixed, y))


def test_weights_of_classes_multiply_and_do_not_divide():
    weight = torch.tensor([1.0, 5.0, 1.0, 1.0])
    losses = as_loss(nn.CrossEntropyLoss(weight=weight)).per_sample(HEAD(X), LABELS)
    torch.testing.assert_close(losses, weight[LABELS] * F.cross_entropy(HEAD(X), LABELS, reduction="none"))


def test_the_metrics_are_torchs():
    output = HEAD(X).detach()
    rmse = as_loss(nn.MSELoss())
    torch.testing.assert_close(rmse.metric(rmse.score(output, NUMBERS).mean()), F.mse_loss(output, NUMBERS).sqrt())
    torch.testing.assert_close(as_loss(nn.L1Loss()).score(output, NUMBERS).mean(), F.l1_loss(output, NUMBERS))


class OwnLink(Loss):
    name, metric_name = "own", "own"

    def per_sample(self, output, target):
        return (output.tanh() - target).square().flatten(1).sum(1)

    def inverse_link(self, output):
        return output.tanh()


class Distance(Loss):
    name, metric_name = "distance", "distance"

    def per_sample(self, output, target):
        return (output - target).abs().flatten(1).sum(1)


def test_a_loss_needs_no_more_than_its_value():
    fitted = fit(
        Population(HEAD, k=2, mix="predictions", loss=Distance()), federation_of(NUMBERS).holdout(0.3), rounds=2
    )
    assert fitted.history[-1]["distance"] == pytest.approx(fitted.history[-1]["test_loss"])


def test_a_link_is_enough_for_mixed_predictions():
    class WithLink(Distance):
        link = links.log

        def score(self, prediction, target):
            return (prediction - target).abs().sum(-1)

    outputs = torch.stack([HEAD(X), HEAD(-X)])
    mixed = WithLink().mixed(outputs, torch.tensor([0.5, 0.5]), NUMBERS)
    torch.testing.assert_close(mixed, WithLink().per_sample(outputs.exp().mean(0).log(), NUMBERS))


REFUSED = {
    "other inputs": (lambda: Population(HEAD, k=1, loss=nn.CTCLoss()), "CTCLoss takes other inputs"),
    "a class": (lambda: Population(HEAD, k=1, loss=nn.HuberLoss), r"give an object of it: HuberLoss\(\)"),
    "a number": (lambda: Population(HEAD, k=1, loss=3), "loss is 3; give the name"),
    "parameters": (lambda: Population(HEAD, k=1, loss=nn.Linear(2, 2)), "parameters of its own"),
    "own link": (lambda: Population(HEAD, k=2, mix="predictions", loss=OwnLink()), "write its `mixed`"),
    "one number": (lambda: run(F.mse_loss), "one number for the whole batch.*reduction='none'"),
    "of the batch": (lambda: run(lambda o, y: (o - y - (o - y).mean(0)).square()), "depends on others"),
    "no score": (lambda: run(OwnLink()), "write its `score`"),
    "classes second": (
        lambda: run(nn.CrossEntropyLoss(), SEQUENCES, nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)))),
        "classes are last",
    ),
}  # fmt: skip


def run(loss, y=NUMBERS, net=HEAD):
    return fit(Population(net, k=1, loss=loss), federation_of(y).holdout(0.3), FedAvg(lr=0.1), rounds=1)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_loss_is_refused_in_one_line(case):
    call, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
