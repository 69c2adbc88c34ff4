"""Clients whose samples are drawn when they take part: the same data, and the same training, as with all in memory."""

import pytest
import torch
from lazy_population import MixedClassifiers, lazy_population
from torch import nn

from kit.problems import make_linear, make_net
from kit.training import BytesTransport, assert_same, run
from ppfl import Population, fit
from ppfl.algorithms import PPFL, FedAvg, FedEM


def test_numbered_ids_are_the_tuple_of_their_names():
    names, ids = tuple(f"c{at:03}" for at in range(200)), lazy_population(200).ids
    assert ids == names and ids != names[:-1] and (ids[-200], ids[3:90:7]) == (names[0], names[3:90:7])
    assert dict(ids.positions) == {name: at for at, name in enumerate(names)}
    assert not any(name in ids for name in ("c1", "c0001", "c200", "c-01", "d001", "", "c٠٠١", "c1_0"))


@pytest.mark.parametrize("classes", [2, 5])
def test_what_is_drawn_for_a_client_depends_on_the_seed_and_its_number_alone(classes):
    drawn = [lazy_population(n, classes=classes, seed=s) for n, s in ((7, 3), (300, 3), (7, 4))]
    small, large, other = (each.in_memory() for each in drawn)
    for a, b in ((small.train, large.train), (small.test, large.test)):
        assert torch.equal(a.x, b.x[: len(a)]) and torch.equal(a.y, b.y[: len(a)])
    assert not torch.equal(other.train.x, small.train.x)


def test_clients_and_selections_are_those_of_the_federation_in_memory():
    lazy = lazy_population(50, samples=3, test_points=2, seed=1)
    whole = lazy.in_memory()
    assert lazy.train.x.shape == whole.train.x.shape and torch.equal(lazy.train.offsets, whole.train.offsets)
    one, other = lazy.select(["c31", "c04"]).in_memory(), whole.select(["c31", "c04"])
    assert torch.equal(one.train.x, other.train.x) and torch.equal(one.test.y, other.test.y)
    assert torch.equal(one.weights, other.weights) and one.ids == other.ids
    assert torch.equal(lazy.client("c31")["test"].x, whole.client("c31")["test"].x)
    other = ({"n_clients": 51}, {"seed": 2}, {"alpha": 0.4}, {"samples": 4}, {})
    asked = {"n_clients": 50, "samples": 3, "test_points": 2, "seed": 1}
    assert len({lazy.fingerprint, *(lazy_population(**asked | change).fingerprint for change in other)}) == 5


CASES = [
    (PPFL(lr=0.3, batch_size=4, participation=0.3), 3, "predictions", "loop"),
    (PPFL(lr=0.3, participation=0.3, share_memberships=False), 2, "weights", "chunks-of-2"),
    (FedAvg(lr=0.3, batch_size=4, local_epochs=2), 1, "outputs", "threads"),
    (FedEM(lr=0.3, participation=0.5), 2, "predictions", "threads"),
]


@pytest.mark.parametrize(("method", "k", "mix", "engine"), CASES)
def test_training_gives_the_same_bits_as_with_all_data_in_memory(method, k, mix, engine):
    lazy, population = lazy_population(30, samples=6, dim=4, k=3), Population(make_linear(classes=2), k=k, mix=mix)
    how = {"engine": engine, "rounds": 3, "kind": BytesTransport}
    found, expected = (run(method, population, data, **how) for data in (lazy, lazy.in_memory()))
    assert_same(found.everything(), expected.everything(), atol=0, rtol=0)


def test_frozen_layers_run_again_whenever_a_client_comes_and_a_fit_is_as_in_memory():
    lazy, net = lazy_population(12, samples=6, dim=4, k=3, seed=2), make_net(classes=2)
    net[0].requires_grad_(False)
    both, method = (lazy, lazy.in_memory()), FedAvg(lr=0.3, batch_size=4)
    found, expected = (run(method, Population(net, k=1), data, engine="stacked") for data in both)
    assert_same(found.everything(), expected.everything(), atol=1e-5, rtol=1e-4)
    first, second = (fit(Population(make_linear(classes=2), k=2), data, PPFL(lr=0.3), rounds=2) for data in both)
    assert first.ids == second.ids and first.evaluate(both[0]).pooled == second.evaluate(both[1]).pooled
    x = both[1].test.x[:3]
    assert torch.equal(first.predict("c07", x), second.predict("c07", x))


def test_memberships_follow_the_dirichlet_distribution_and_labels_the_mixed_classifier():
    k, clients = 4, torch.arange(20_000)
    source = MixedClassifiers(seed=0, dim=3, k=k, classes=3, alpha=0.3, scale=1.0)
    c = source.memberships(clients)
    assert torch.allclose(c.sum(1), torch.ones(len(c), dtype=torch.float64))
    variance = (1 / k) * (1 - 1 / k) / (k * 0.3 + 1)  # of one share
    assert float((c.mean(0) - 1 / k).abs().max()) < 5 * (variance / len(c)) ** 0.5
    assert float((c.var(0) / variance - 1).abs().max()) < 0.05
    x, y = source.draw(clients[:3000], "train", 10)
    p = torch.einsum("cnd,ck,kld->cnl", x.double(), c[:3000], source.models).softmax(-1)
    hits = nn.functional.one_hot(y, 3).double() - p  # mean zero, and uncorrelated with any function of x
    spread = (p * (1 - p)).mean((0, 1)).sqrt() / (p[..., 0].numel()) ** 0.5
    for mean in (hits.mean((0, 1)), (hits * p).mean((0, 1))):
        assert bool((mean.abs() < 4.5 * spread).all())
    assert -1 <= x.min() < x.max() < 1 and abs(x.mean()) < 0.02 and abs(x.var() - 1 / 3) < 0.01
