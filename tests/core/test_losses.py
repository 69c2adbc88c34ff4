"""The mixed loss is the loss of the mean prediction, in any precision and under vmap and grad."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap

from kit.problems import PROBLEMS, make_net
from kit.refusals import DataError, ModelError, assert_refused
from ppfl import Population, fit
from ppfl.core import Loss, links
from ppfl.core.criteria import as_loss
from ppfl.core.links import log_mix
from ppfl.core.losses import IGNORED, LOSSES, cross_entropy, logistic, loss_by_name, multilabel, poisson, squared

seeds, widths = st.integers(0, 2**31), st.integers(1, 5)
B = 6


class Kind(NamedTuple):
    """A loss, the shape of the output for one sample, and targets for it."""

    loss: Loss
    shape: tuple[int, ...]
    targets: str

    def draw(self, seed, k, scale=1.0):
        g = torch.Generator().manual_seed(seed)
        outputs = scale * torch.randn(k, B, *self.shape, generator=g, dtype=torch.float64)
        c = torch.softmax(2 * torch.randn(k, generator=g, dtype=torch.float64), 0)
        labels, answers = torch.randint(0, 4, (B, 3), generator=g), torch.randint(0, 2, (B, 3), generator=g)
        y = {
            "labels": labels[:, 0],
            "sequences": labels,
            "padded": labels.index_fill(1, torch.tensor([2]), IGNORED),
            "binary": answers[:, 0],
            "binary floats": answers[:, :1].double(),
            "several": answers,
            "partly known": answers.double().index_fill(1, torch.tensor([0]), IGNORED),
            "numbers": torch.randn(B, generator=g, dtype=torch.float64),
            "vectors": torch.randn(B, 3, generator=g, dtype=torch.float64),
            "counts": torch.randint(0, 9, (B,), generator=g),
        }[self.targets]
        return outputs, c, y


KINDS = [
    Kind(cross_entropy, (4,), "labels"),
    Kind(cross_entropy, (3, 4), "sequences"),
    Kind(cross_entropy, (3, 4), "padded"),
    Kind(multilabel, (3,), "several"),
    Kind(multilabel, (3,), "partly known"),
    Kind(logistic, (), "binary"),
    Kind(logistic, (1,), "binary floats"),
    Kind(squared, (), "numbers"),
    Kind(squared, (1,), "numbers"),
    Kind(squared, (3,), "vectors"),
    Kind(poisson, (), "counts"),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.loss.name}-{kind.targets}-{kind.shape}")


def plainly(loss, prediction, y):
    """The negative log-likelihood of a mean prediction, written without regard to overflow."""
    if y.dim() == 2 and loss in (cross_entropy, multilabel):  # label by label, the mean of those that count
        means = []
        for of_sample, labels in zip(prediction, y.long(), strict=True):
            pairs = [(p, label) for p, label in zip(of_sample, labels, strict=True) if label != IGNORED]
            right = [p[label] if loss is cross_entropy else p if label else 1 - p for p, label in pairs]
            means.append(-torch.stack(right).log().mean())
        return torch.stack(means)
    if loss is cross_entropy:
        return -prediction[torch.arange(B), y].log()
    y, prediction = y.reshape(B, -1).double(), prediction.reshape(B, -1)
    if loss is logistic:
        return -torch.where(y == 1, prediction, 1 - prediction).log().squeeze(1)
    if loss is squared:
        return (prediction - y).square().sum(1) / 2
    return (prediction - y * prediction.log()).squeeze(1)


@every_kind
@given(seeds, widths, st.floats(0, 1))
def test_mixed_is_the_likelihood_of_the_mean_prediction_and_convex_in_the_membership(kind, seed, k, share):
    loss, (outputs, c, y), other = kind.loss, kind.draw(seed, k), kind.draw(seed + 1, k)[1]
    mean = torch.tensordot(c, loss.inverse_link(outputs), dims=1)
    mixed = loss.mixed(outputs, c, y)
    torch.testing.assert_close(mixed, plainly(loss, mean, y))
    torch.testing.assert_close(loss.per_sample(outputs[0], y), plainly(loss, loss.inverse_link(outputs[0]), y))
    between = loss.mixed(outputs, share * c + (1 - share) * other, y)
    chord = share * mixed + (1 - share) * loss.mixed(outputs, other, y)
    assert (between <= chord + 1e-9 * chord.abs().clamp_min(1)).all()
    for which in range(k):  # far from each other, too
        pure = loss.mixed(5 * outputs, torch.eye(k).double()[which], y)
        torch.testing.assert_close(pure, loss.per_sample(5 * outputs[which], y))
    score = loss.score(mean, y)
    assert score.shape == (B,) and (score >= -1e-12).all()
    if kind.shape in ((), (1,)):  # a last dimension of length one does not matter
        torch.testing.assert_close(loss.score(mean.reshape(B), y.reshape(B, 1)), score)


@every_kind
@given(seeds, widths)
def test_slopes_of_many_clients_are_those_of_autograd(kind, seed, k):
    drawn = [kind.draw(seed + i, k) for i in range(3)]
    outputs = torch.stack([outputs for outputs, _, _ in drawn])  # (C, K, B, ...)
    outputs, y = outputs.reshape(3, k, B, *(kind.shape or (1,))), torch.stack([y for _, _, y in drawn])
    found, losses = kind.loss.model_slopes(outputs.movedim(2, -1).contiguous(), y)
    per_sample = vmap(vmap(kind.loss.per_sample, (0, None)))
    torch.testing.assert_close(losses, per_sample(outputs, y))
    expected = grad(lambda outputs: per_sample(outputs, y).sum())(outputs)
    torch.testing.assert_close(found.movedim(-1, 2), expected)


@every_kind
def test_gradients_match_finite_differences_also_on_the_boundary_and_any_precision_is_close(kind):
    drawn = [kind.draw(seed, 3) for seed in range(2)]
    outputs, c, y = (torch.stack(parts) for parts in zip(*drawn, strict=True))  # two clients
    at = outputs.clone().requires_grad_(), c.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda o, m: vmap(kind.loss.mixed)(o, m, y), at)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.autograd.gradgradcheck(lambda o, m: vmap(kind.loss.mixed)(o, m, y), at, fast_mode=True)
    assert torch.autograd.gradcheck(lambda o: vmap(kind.loss.per_sample)(o, y), (at[0][:, 0],))

    def slope(at):
        return grad(lambda m: kind.loss.mixed(outputs[0], m, y[0]).sum())(at)

    face = torch.tensor([0.0, 0.4, 0.6]).double()
    torch.testing.assert_close(slope(face), slope(face + 1e-9 * (c[0] - face)), rtol=1e-6, atol=1e-6)
    exact = kind.loss.mixed(outputs[0], c[0], y[0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low, error = kind.loss.mixed(outputs[0].to(dtype), c[0].to(dtype), y[0]), 50 * torch.finfo(dtype).eps
        assert low.dtype == dtype
        torch.testing.assert_close(low.double(), exact, rtol=error, atol=error)
    kind.loss.check_target(y[0])


@pytest.mark.parametrize("loss", [cross_entropy, logistic])
def test_very_wrong_predictions_have_a_finite_loss(loss):
    far = torch.tensor([[-500.0], [-2000.0]])  # in float32 both models give the label the probability 0
    outputs = torch.stack([torch.zeros(2, 1), far], dim=-1) if loss is cross_entropy else far
    c, y = torch.tensor([0.25, 0.75]), torch.tensor([1])
    torch.testing.assert_close(loss.mixed(outputs, c, y), 500 - c[:1].log())
    assert all(g.isfinite().all() for g in grad(lambda o, m: loss.mixed(o, m, y).sum(), (0, 1))(outputs, c))


@given(seeds, widths)
def test_log_mix_is_logsumexp_and_ignores_large_terms_with_weight_zero(seed, k):
    values, c, _ = Kind(logistic, (), "binary").draw(seed, k, scale=100.0)
    torch.testing.assert_close(log_mix(values, c), torch.logsumexp(values + c.log()[:, None], 0))
    values, c = torch.tensor([-300.0, 300.0]), torch.tensor([1.0, 0.0])
    of_values, of_c = grad(log_mix, (0, 1))(values, c)
    assert log_mix(values, c) == -300 and torch.equal(of_values, c)
    assert of_c.isfinite().all() and of_c[1] > of_c[0]


def test_metrics_and_weights_of_classes_are_those_of_torch_and_of_the_textbook():
    y = torch.tensor([0, 1, 1, 0])
    for loss in map(as_loss, (cross_entropy, logistic, nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss())):
        truth = torch.stack([1 - y, y], dim=1).float() if loss.link is links.softmax else y.float()
        assert (loss.score(0.8 * truth + 0.1, y) == 1).all() and (loss.score(0.9 - 0.8 * truth, y) == 0).all()
    (output,), _, y = Kind(squared, (3,), "vectors").draw(0, 1)
    for loss in (squared, as_loss(nn.MSELoss())):
        torch.testing.assert_close(loss.metric(loss.score(output, y).mean()), F.mse_loss(output, y).sqrt())
    torch.testing.assert_close(as_loss(nn.L1Loss()).score(output, y).mean(), F.l1_loss(output, y))
    (output,), _, y = Kind(poisson, (), "counts").draw(0, 1)
    y = y + 1  # avoid log 0
    lost = poisson.per_sample(output, y) - poisson.per_sample(y.double().log(), y)
    torch.testing.assert_close(poisson.score(output.exp(), y), 2 * lost)
    assert poisson.score(torch.tensor([3.0]), torch.tensor([0])) == 6  # 2 (r - y) where y = 0
    (output,), _, y = Kind(cross_entropy, (4,), "labels").draw(0, 1)
    weight = torch.tensor([1.0, 5.0, 1.0, 1.0], dtype=torch.float64)  # they multiply and do not divide
    losses = as_loss(nn.CrossEntropyLoss(weight=weight)).per_sample(output, y)
    torch.testing.assert_close(losses, weight[y] * F.cross_entropy(output, y, reduction="none"))


class Distance(Loss):
    name, metric_name = "distance", "distance"

    def per_sample(self, output, target):
        return (output - target).abs().flatten(1).sum(1)


class OwnLink(Distance):
    def inverse_link(self, output):
        return output.tanh()


def fit_numbers(loss, **settings):
    federation = PROBLEMS["several numbers"]().federation.holdout(0.3)
    return fit(Population(make_net(dtype=torch.float64), loss=loss, **{"k": 1, **settings}), federation, rounds=1)


def test_a_loss_needs_no_more_than_its_value_and_a_link_is_enough_for_mixed_predictions():
    history = fit_numbers(Distance(), k=2, mix="predictions").history
    assert history[-1]["distance"] == pytest.approx(history[-1]["test_loss"])
    outputs, c, y = Kind(squared, (3,), "vectors").draw(0, 2)
    mean = torch.tensordot(c, outputs.exp(), dims=1)
    loss = Distance()
    loss.link = links.log
    torch.testing.assert_close(loss.mixed(outputs, c, y), loss.per_sample(mean.log(), y))


CRITERION = as_loss(nn.CrossEntropyLoss())
REFUSED = {
    "negative label": (lambda: cross_entropy.check_target(torch.tensor([[0, 1], [-1, 0]])), DataError, "[1, 0] is -1"),
    "three classes": (lambda: logistic.check_target(torch.tensor([0, 1, 2])), DataError, "target[2] is 2", "0 or 1"),
    "nan": (lambda: squared.check_target(torch.tensor([0.0, torch.nan])), DataError, "target[1] is nan"),
    "negative count": (lambda: poisson.check_target(torch.tensor([3, 0, -2])), DataError, "target[2] is -2"),
    "one number for all": (lambda: squared.check_target(torch.tensor(1.0)), DataError, "one per sample"),
    "two counts": (lambda: poisson.check_target(torch.ones(3, 2)), DataError, "(3, 2)"),
    "only padding": (lambda: cross_entropy.check_target(torch.tensor([[0, 1], [IGNORED] * 2])), DataError, "target[1]"),
    "padding": (lambda: CRITERION.check_target(torch.tensor([0, IGNORED])), DataError, "-100", "drop"),
    "unknown name": (lambda: loss_by_name("hinge"), ModelError, "'hinge'", *LOSSES),
    "other inputs": (lambda: as_loss(nn.CTCLoss()), ModelError, "CTCLoss", "other inputs"),
    "parameters": (lambda: as_loss(nn.Linear(2, 2)), ModelError, "Linear", "parameters of its own"),
    "a class": (lambda: as_loss(nn.HuberLoss), ModelError, "HuberLoss()"),
    "a number": (lambda: as_loss(3), ModelError, "loss is 3"),
    "own link": (lambda: fit_numbers(OwnLink(), k=2, mix="predictions"), ModelError, "`mixed`"),
    "one number": (lambda: fit_numbers(F.mse_loss), ModelError, "reduction='none'"),
    "of the batch": (lambda: fit_numbers(lambda o, y: (o - y - (o - y).mean(0)).square()), ModelError, "on others"),
    "no score": (lambda: fit_numbers(OwnLink()), ModelError, "`score`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_targets_and_what_cannot_be_a_loss_are_refused(case):
    assert_refused(*REFUSED[case])


def test_outputs_that_do_not_fit_are_refused_rather_than_broadcast():
    labels = torch.zeros(B, dtype=torch.long)
    shapes = [(cross_entropy, (B, 4), labels[:, None]), (cross_entropy, (B - 1, 4), labels), (logistic, (B, 2), labels)]
    shapes += [(squared, (B, 2), labels.float()), (CRITERION, (B, 4, 2), labels.expand(2, B).T)]  # classes are last
    for loss, shape, y in shapes:
        assert_refused(lambda: loss.per_sample(torch.zeros(shape), y), ModelError, f"outputs {shape} do not fit")
        assert_refused(lambda: loss.mixed(torch.zeros(3, *shape), torch.ones(3) / 3, y), ModelError, "do not fit")
