"""The mixed loss is the loss of the mean prediction, in any precision and under vmap and grad."""

import re
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from ppfl.core.errors import DataError, ModelError
from ppfl.core.links import log_mix
from ppfl.core.losses import IGNORED, LOSSES, Loss, cross_entropy, logistic, loss_by_name, multilabel, poisson, squared

law = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 2**31)
widths = st.integers(1, 5)
B = 6


class Kind(NamedTuple):
    """A loss, the shape of the output for one sample, and targets for it."""

    loss: Loss
    shape: tuple[int, ...]
    targets: str

    def draw(self, seed: int, k: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """outputs (k, B, ...), c (k,), y."""
        g = torch.Generator().manual_seed(seed)
        outputs = scale * torch.randn(k, B, *self.shape, generator=g, dtype=torch.float64)
        c = torch.softmax(2 * torch.randn(k, generator=g, dtype=torch.float64), 0)
        y = {
            "labels": torch.randint(0, 4, (B,), generator=g),
            "binary": torch.randint(0, 2, (B,), generator=g),
            "binary floats": torch.randint(0, 2, (B, 1), generator=g).double(),
            "numbers": torch.randn(B, generator=g, dtype=torch.float64),
            "vectors": torch.randn(B, 3, generator=g, dtype=torch.float64),
            "counts": torch.randint(0, 9, (B,), generator=g),
            "sequences": torch.randint(0, 4, (B, 3), generator=g),
            "padded": torch.randint(0, 4, (B, 3), generator=g).index_fill(1, torch.tensor([2]), IGNORED),
            "several": torch.randint(0, 2, (B, 3), generator=g),
            "partly known": torch.randint(0, 2, (B, 3), generator=g).double().index_fill(1, torch.tensor([0]), IGNORED),
        }[self.targets]
        return outputs, c, y


KINDS = [
    Kind(cross_entropy, (4,), "labels"),
    Kind(logistic, (), "binary"),
    Kind(logistic, (1,), "binary"),
    Kind(logistic, (1,), "binary floats"),
    Kind(squared, (), "numbers"),
    Kind(squared, (1,), "numbers"),
    Kind(squared, (3,), "vectors"),
    Kind(poisson, (), "counts"),
    Kind(poisson, (1,), "counts"),
    Kind(cross_entropy, (3, 4), "sequences"),
    Kind(cross_entropy, (3, 4), "padded"),
    Kind(multilabel, (3,), "several"),
    Kind(multilabel, (3,), "partly known"),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.loss.name}-{kind.targets}-{kind.shape}")


def plainly(loss: Loss, prediction: Tensor, y: Tensor) -> Tensor:
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
@law
@given(seeds, widths)
def test_mixed_is_the_likelihood_of_the_mean_prediction(kind, seed, k):
    outputs, c, y = kind.draw(seed, k)
    mean = torch.tensordot(c, kind.loss.inverse_link(outputs), dims=1)
    torch.testing.assert_close(kind.loss.mixed(outputs, c, y), plainly(kind.loss, mean, y))
    alone = plainly(kind.loss, kind.loss.inverse_link(outputs[0]), y)
    torch.testing.assert_close(kind.loss.per_sample(outputs[0], y), alone)


@every_kind
@law
@given(seeds)
def test_the_mixed_loss_of_one_model_is_its_own_loss(kind, seed):
    outputs, _, y = kind.draw(seed, 1)
    mixed = kind.loss.mixed(outputs, torch.ones(1).double(), y)
    assert mixed.shape == (B,)
    torch.testing.assert_close(mixed, kind.loss.per_sample(outputs[0], y))


@every_kind
@law
@given(seeds, widths, st.data())
def test_a_one_hot_membership_selects_its_model(kind, seed, k, data):
    outputs, _, y = kind.draw(seed, k, scale=5.0)
    which = data.draw(st.integers(0, k - 1))
    pure = torch.eye(k).double()[which]
    torch.testing.assert_close(kind.loss.mixed(outputs, pure, y), kind.loss.per_sample(outputs[which], y))


@every_kind
@law
@given(seeds, widths, st.floats(0, 1))
def test_mixed_is_convex_in_the_membership(kind, seed, k, share):
    outputs, c, y = kind.draw(seed, k, scale=3.0)
    other = kind.draw(seed + 1, k)[1]
    between = kind.loss.mixed(outputs, share * c + (1 - share) * other, y)
    chord = share * kind.loss.mixed(outputs, c, y) + (1 - share) * kind.loss.mixed(outputs, other, y)
    assert (between <= chord + 1e-9 * chord.abs().clamp_min(1)).all()


@every_kind
def test_gradients_under_vmap_match_finite_differences(kind):
    drawn = [kind.draw(seed, 3) for seed in range(2)]
    outputs, c, y = (torch.stack(parts) for parts in zip(*drawn, strict=True))  # two clients
    outputs.requires_grad_()
    c.requires_grad_()

    def mixed(o: Tensor, m: Tensor) -> Tensor:
        return vmap(kind.loss.mixed)(o, m, y)

    assert torch.autograd.gradcheck(mixed, (outputs, c))
    assert torch.autograd.gradgradcheck(mixed, (outputs, c))
    assert torch.autograd.gradcheck(lambda o: vmap(kind.loss.per_sample)(o, y), (outputs[:, 0],))


@every_kind
def test_gradients_of_many_clients_match_those_of_each_client(kind):
    drawn = [kind.draw(seed, 3) for seed in range(4)]
    together = vmap(grad(lambda o, m, y: kind.loss.mixed(o, m, y).sum(), argnums=(0, 1)))(
        *(torch.stack(parts) for parts in zip(*drawn, strict=True))
    )
    for i, (outputs, c, y) in enumerate(drawn):
        outputs.requires_grad_()
        c.requires_grad_()
        apart = torch.autograd.grad(kind.loss.mixed(outputs, c, y).sum(), (outputs, c))
        torch.testing.assert_close((together[0][i], together[1][i]), apart)


@every_kind
def test_the_gradient_in_the_membership_is_correct_on_the_boundary(kind):
    outputs, c, y = kind.draw(0, 3)

    def slope(at: Tensor) -> Tensor:
        return grad(lambda m: kind.loss.mixed(outputs, m, y).sum())(at)

    face = torch.tensor([0.0, 0.4, 0.6]).double()
    near = face + 1e-9 * (c - face)
    torch.testing.assert_close(slope(face), slope(near), rtol=1e-6, atol=1e-6)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_keeps_its_type_and_stays_close(kind, dtype):
    outputs, c, y = kind.draw(0, 3)
    exact = kind.loss.mixed(outputs, c, y)
    low = kind.loss.mixed(outputs.to(dtype), c.to(dtype), y)
    assert low.dtype == dtype
    error = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(low.double(), exact, rtol=error, atol=error)


@pytest.mark.parametrize("loss", [cross_entropy, logistic])
def test_very_wrong_predictions_have_a_finite_loss(loss):
    far = torch.tensor([[-500.0], [-2000.0]])  # in float32 both models give the label the probability 0
    outputs = torch.stack([torch.zeros(2, 1), far], dim=-1) if loss is cross_entropy else far
    c, y = torch.tensor([0.25, 0.75]), torch.tensor([1])
    torch.testing.assert_close(loss.mixed(outputs, c, y), 500 - c[:1].log())
    assert all(g.isfinite().all() for g in grad(lambda o, m: loss.mixed(o, m, y).sum(), (0, 1))(outputs, c))


@law
@given(seeds, widths, st.floats(-1e3, 1e3))
def test_log_mix_is_logsumexp_and_adds_constants(seed, k, constant):
    values, c, _ = KINDS[1].draw(seed, k, scale=100.0)
    torch.testing.assert_close(log_mix(values, c), torch.logsumexp(values + c.log()[:, None], 0))
    torch.testing.assert_close(log_mix(values + constant, c), log_mix(values, c) + constant)


def test_log_mix_ignores_large_terms_with_weight_zero():
    values = torch.tensor([-300.0, 300.0], requires_grad=True)
    c = torch.tensor([1.0, 0.0], requires_grad=True)
    mix = log_mix(values, c)
    assert mix == -300
    slopes = torch.autograd.grad(mix, (values, c))
    assert torch.equal(slopes[0], torch.tensor([1.0, 0.0]))
    assert slopes[1].isfinite().all()
    assert slopes[1][1] > slopes[1][0]


def test_log_mix_of_zero_probabilities_is_minus_infinity():
    assert log_mix(torch.full((2,), -torch.inf), torch.tensor([0.5, 0.5])) == -torch.inf


@every_kind
@law
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


# ── scores ─────────────────────────────────────────────────────────────────────────────────────────────────


@every_kind
@law
@given(seeds)
def test_scores_do_not_depend_on_a_last_axis_of_length_one(kind, seed):
    outputs, c, y = kind.draw(seed, 2)
    mean = torch.tensordot(c, kind.loss.inverse_link(outputs), dims=1)
    score = kind.loss.score(mean, y)
    assert score.shape == (B,)
    assert (score >= -1e-12).all()
    if kind.shape in ((), (1,)):
        torch.testing.assert_close(kind.loss.score(mean.reshape(B), y.reshape(B, 1)), score)


@pytest.mark.parametrize("loss", [cross_entropy, logistic])
def test_accuracy_is_one_for_the_truth_and_zero_for_its_opposite(loss):
    y = torch.tensor([0, 1, 1, 0])
    truth = torch.stack([1 - y, y], dim=1).float() if loss is cross_entropy else y.float()
    assert loss.metric_name == "accuracy"
    assert (loss.score(0.8 * truth + 0.1, y) == 1).all()
    assert (loss.score(0.9 - 0.8 * truth, y) == 0).all()


@law
@given(seeds)
def test_rmse_is_computed_over_all_numbers(seed):
    outputs, _, y = KINDS[6].draw(seed, 1)
    rmse = squared.metric(squared.score(outputs[0], y).mean())
    torch.testing.assert_close(rmse, torch.nn.functional.mse_loss(outputs[0], y).sqrt())


@law
@given(seeds)
def test_deviance_is_twice_the_log_likelihood_ratio_to_a_perfect_prediction(seed):
    outputs, _, y = KINDS[7].draw(seed, 1)
    y = y + 1  # avoid log 0
    lost = poisson.per_sample(outputs[0], y) - poisson.per_sample(y.double().log(), y)
    torch.testing.assert_close(poisson.score(outputs[0].exp(), y), 2 * lost)
    assert poisson.score(torch.tensor([3.0]), torch.tensor([0])) == 6  # 2 (r - y) where y = 0


# ── error messages ───────────────────────────────────────────────────────────────────────────────


@every_kind
def test_valid_targets_are_accepted(kind):
    outputs, _, y = kind.draw(0, 1)
    kind.loss.check_target(y)
    kind.loss.check_target(y, outputs=outputs[0, 0].numel())


@pytest.mark.parametrize(
    ("loss", "y", "outputs", "found"),
    [
        (cross_entropy, torch.tensor([0.0, 1.0]), None, "expected integer labels"),
        (cross_entropy, torch.tensor([[0, 1], [-1, 0]]), None, "target[1, 0] is -1, which is not in 0 to"),
        (cross_entropy, torch.tensor([[0, 1], [IGNORED, IGNORED]]), None, "target[1] has no label but -100"),
        (cross_entropy, torch.tensor([0, IGNORED]), None, "target[1] is -100, which is not in 0 to"),
        (multilabel, torch.tensor([[0, 2]]), None, "target[0, 1] is 2, which is not 0 or 1"),
        (multilabel, torch.tensor([[0, 1]]), 3, "a sample has 2 labels but the model 3 outputs"),
        (cross_entropy, torch.tensor([0, -1]), None, "target[1] is -1, which is not in 0 to"),
        (cross_entropy, torch.tensor([0, 3, 4]), 4, "target[2] is 4, which is not in 0 to 3"),
        (logistic, torch.tensor([0, 1, 2]), None, "target[2] is 2, which is not 0 or 1"),
        (logistic, torch.tensor([1.0, -1.0]), None, "use (y > 0)"),
        (logistic, torch.tensor([[0, 1]]), None, "expected (B,)"),
        (logistic, torch.tensor([0, 1]), 2, "2 outputs per sample"),
        (squared, torch.tensor([0.0, torch.nan]), None, "target[1] is nan, which is not finite"),
        (squared, torch.ones(4, 2), 3, "a target has 2 numbers but the model 3"),
        (poisson, torch.tensor([3, 0, -2]), None, "target[2] is -2, which is negative"),
        (poisson, torch.tensor([torch.inf]), None, "not finite"),
        (squared, torch.tensor(1.0), None, "single number"),
    ],
)
def test_errors_about_wrong_targets_name_the_value(loss, y, outputs, found):
    with pytest.raises(DataError, match=re.escape(found)):
        loss.check_target(y, outputs)


@pytest.mark.parametrize(
    ("loss", "shape", "y"),
    [
        (cross_entropy, (B,), torch.zeros(B, dtype=torch.long)),
        (cross_entropy, (B, 4), torch.zeros(B, 1, dtype=torch.long)),
        (cross_entropy, (B - 1, 4), torch.zeros(B, dtype=torch.long)),
        (logistic, (B, 2), torch.zeros(B)),
        (poisson, (B + 1,), torch.zeros(B)),
        (squared, (B, 2), torch.zeros(B)),
        (squared, (2, B), torch.zeros(B, 2)),
    ],
)
def test_outputs_that_do_not_fit_are_refused_rather_than_broadcast(loss, shape, y):
    with pytest.raises(ModelError, match=re.escape(f"outputs {shape} do not fit targets {tuple(y.shape)}")):
        loss.per_sample(torch.zeros(shape), y)
    with pytest.raises(ModelError, match="do not fit"):
        loss.mixed(torch.zeros(3, *shape), torch.ones(3) / 3, y)


def test_losses_are_found_by_name():
    assert all(loss_by_name(name) is loss and loss.name == name for name, loss in LOSSES.items())
    with pytest.raises(ModelError, match="'hinge'; use one of .*" + ".*".join(sorted(LOSSES))):
        loss_by_name("hinge")
