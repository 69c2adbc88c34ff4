"""Synthetic populations have the documented distributions."""

import numpy as np
import pytest
import torch

from ppfl.core.errors import DataError
from ppfl.data import (
    bayes_accuracy,
    digits_federation,
    logistic_population,
    synthetic_classification,
    synthetic_groups,
    synthetic_linear,
)

MAKERS = {
    "classification": lambda seed: synthetic_classification(20, 10, test_points=20, seed=seed),
    "groups": lambda seed: synthetic_groups(seed=seed),
    "groups, regression": lambda seed: synthetic_groups(seed=seed, task="regression"),
    "linear": lambda seed: synthetic_linear(seed=seed),
    "logistic": lambda seed: logistic_population(50, seed=seed),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_truth_is_on_the_simplex_and_data_depend_on_the_seed(maker):
    first, again, other = (MAKERS[maker](seed) for seed in (0, 0, 1))
    c = first.truth.memberships
    assert (c >= 0).all()
    torch.testing.assert_close(c.sum(1), torch.ones(first.n_clients))
    assert first.truth.sources.shape == (c.shape[1], first.train.x.shape[1])
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.y, again.test.y)
    assert not torch.equal(first.train.x[:5], other.train.x[:5])
    assert first.train.x.dtype == torch.float32
    assert len(set(first.ids)) == first.n_clients


def test_sizes_are_those_of_the_paper():
    sizes = synthetic_classification(3000, 2, test_points=0).train.sizes.double()
    assert (sizes.min(), sizes.max()) == (50, 1000)
    # for lognormal(4, 2), half are below e^4 and P(50 + e^(4 + 2z) > 1000) = P(z > 1.428)
    assert float(sizes.median()) == pytest.approx(50 + np.exp(4), abs=8)
    assert float((sizes == 1000).double().mean()) == pytest.approx(0.0766, abs=0.02)


def test_features_are_uniform():
    x = synthetic_classification(50, 20, test_points=0).train.x
    assert (x.min(), x.max()) == (pytest.approx(-1, abs=1e-3), pytest.approx(1, abs=1e-3))
    assert float(x.mean()) == pytest.approx(0, abs=0.01)
    assert float(x.var()) == pytest.approx(1 / 3, abs=0.01)


def test_points_come_from_the_sources_in_the_proportions_of_the_client():
    """Without noise, a label agrees with source k if k generated it, otherwise with a probability set by the angle."""
    f = synthetic_classification(4, 400, alpha=1.0, noise=0.0, test_points=20_000, seed=2)
    agree = ((f.test.x @ f.truth.sources.T > 0).long() == f.test.y[:, None]).float()
    rate = agree.reshape(4, -1, 3).mean(1)
    unit = torch.nn.functional.normalize(f.truth.sources, dim=1)
    same_side = 1 - torch.arccos((unit @ unit.T).clamp(-1, 1)) / torch.pi  # probability that two half-spaces agree
    torch.testing.assert_close(rate, f.truth.memberships @ same_side, atol=0.015, rtol=0)


def test_labels_do_not_depend_on_the_order_of_points():
    """In the published generator the last points of every client all have label 0."""
    f = synthetic_classification(30, 20, test_points=200)
    tail = f.test.y.reshape(30, 200)[:, 150:]
    assert 0.4 < tail.double().mean() < 0.6


def test_the_number_of_test_points_does_not_change_the_training_data():
    few, many = (synthetic_classification(5, 4, test_points=n) for n in (0, 50))
    assert few.test is None
    assert torch.equal(few.train.x, many.train.x)


def test_alpha_is_the_concentration():
    """Variance of a Dirichlet(a) share over s sources is (s - 1) / (s^2 (s a + 1))."""
    c = synthetic_classification(4000, 1, test_points=0, max_size=51).truth.memberships
    assert float(c.var(0).mean()) == pytest.approx(2 / 9 / (3 * 0.4 + 1), rel=0.05)


def test_the_bayes_rule_is_right_for_one_source_up_to_noise():
    noisy = synthetic_classification(10, 50, sources=1, test_points=2000)
    assert 0.97 < bayes_accuracy(noisy) < 1
    clean = synthetic_classification(10, 50, sources=1, noise=0.0, test_points=200)
    assert bayes_accuracy(clean) == 1


def test_the_bayes_rule_is_better_than_similar_rules():
    f = synthetic_classification(100, 150, test_points=300, seed=5)
    best = bayes_accuracy(f)
    assert 0.83 < best < 0.90
    score = f.test.x @ f.truth.sources.T
    own = f.truth.memberships[f.test.client_of()]
    main_source = score.gather(1, own.argmax(1, keepdim=True)).flatten() > 0
    mixed_weights = (own * score).sum(1) > 0
    for rule in (main_source, mixed_weights):
        assert (rule.long() == f.test.y).double().mean() <= best


def test_groups_are_easy_to_tell_apart():
    f = synthetic_groups(task="regression")
    own = f.train.x @ f.truth.sources.T
    error = (own - f.train.y[:, None]).square()
    by_client = torch.zeros(f.n_clients, 3).index_add_(0, f.train.client_of(), error)
    assert torch.equal(by_client.argmin(1), f.truth.memberships.argmax(1))
    f = synthetic_groups()
    agree = ((f.train.x @ f.truth.sources.T > 0).long() == f.train.y[:, None]).float()
    by_client = torch.zeros(f.n_clients, 3).index_add_(0, f.train.client_of(), agree)
    assert torch.equal(by_client.argmax(1), f.truth.memberships.argmax(1))


def test_linear_targets_differ_from_the_model_by_the_noise_only():
    f = synthetic_linear(n_clients=100, noise=0.3)
    own = (f.truth.memberships @ f.truth.sources)[f.train.client_of()]
    assert float((f.train.y - (f.train.x * own).sum(1)).std()) == pytest.approx(0.3, rel=0.05)


def test_logistic_labels_are_drawn_with_the_models_probabilities():
    """For a predicted probability p, a share p of the labels is 1, within 4.5 standard errors, in train and test."""
    f = logistic_population(4000, samples=10, dim=6, k=3, test_points=5)
    own = f.truth.memberships @ f.truth.sources
    for part in f.splits.values():
        p = torch.sigmoid((part.x * own[part.client_of()]).sum(1)).double()
        for low in torch.arange(0, 1, 0.1):
            near = (p >= low) & (p < low + 0.1)
            error = (p[near] * (1 - p[near])).sum().sqrt()
            assert abs(float((part.y[near] - p[near]).sum())) < 4.5 * float(error)


def test_logistic_features_and_memberships_have_the_expected_moments():
    f = logistic_population(4000, dim=5, k=3, alpha=0.3, test_points=0)
    assert f.test is None and f.train.sizes.unique().tolist() == [10]
    assert (f.train.x.min(), f.train.x.max()) == (pytest.approx(-1, abs=1e-3), pytest.approx(1, abs=1e-3))
    assert float(f.train.x.var()) == pytest.approx(1 / 3, abs=0.01)
    assert float(f.truth.memberships.var(0).mean()) == pytest.approx(2 / 9 / (3 * 0.3 + 1), rel=0.05)


def test_a_logistic_client_does_not_depend_on_the_number_of_clients():
    few, many = logistic_population(7, seed=3), logistic_population(40, seed=3)
    assert few.truth.sources.equal(many.truth.sources)
    assert few.truth.memberships.equal(many.truth.memberships[:7])
    some = many.select(many.ids[:7])
    for split in ("train", "test"):
        assert few.split(split).x.equal(some.split(split).x) and few.split(split).y.equal(some.split(split).y)
    alone = logistic_population(40, seed=3, test_points=0).train
    assert alone.x.equal(many.train.x) and alone.y.equal(many.train.y)


def test_models_of_scale_zero_give_labels_with_equal_probabilities():
    y = logistic_population(2000, scale=0).train.y.double()
    assert abs(float(y.mean()) - 0.5) < 4.5 * 0.5 / len(y) ** 0.5


ERRORS = {
    "no client": (lambda: synthetic_classification(0), "n_clients is 0"),
    "negative noise": (lambda: synthetic_classification(2, noise=-1), "noise >= 0"),
    "sizes": (lambda: synthetic_classification(2, min_size=10, max_size=5), "min <= max"),
    "too few dimensions": (lambda: synthetic_groups(groups=5, dim=3), "raise dim"),
    "no concentration": (lambda: logistic_population(2, alpha=0), "alpha > 0"),
    "negative scale": (lambda: logistic_population(2, scale=-1), "scale >= 0"),
    "no samples": (lambda: logistic_population(2, samples=0), "samples is 0"),
    "no sources": (lambda: bayes_accuracy(digits_federation()), "no true sources"),
    "no test": (lambda: bayes_accuracy(synthetic_classification(2, 2, test_points=0)), "no test samples"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_settings_are_refused(case):
    build, pattern = ERRORS[case]
    with pytest.raises(DataError, match=pattern):
        build()


@pytest.mark.parametrize("draw", [synthetic_classification, synthetic_groups, synthetic_linear, logistic_population])
@pytest.mark.parametrize("change", [{"n_clients": 10**12}, {"dim": 10**12}, {"test_points": 10**12}])
def test_more_than_memory_holds_is_refused(draw, change):
    with pytest.raises(DataError, match="more than the limit"):
        draw(**change)
