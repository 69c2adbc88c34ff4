"""Clients whose samples are drawn when they take part: the same data, and the same training, as with all in memory."""

import pytest
import torch
from torch import nn

from kit.problems import make_linear, make_net
from kit.training import BytesTransport, assert_same, run
from ppfl import Population, fit
from ppfl.algorithms import PPFL, FedAvg, FedEM
from ppfl.data import lazy_population
from ppfl.data.lazy_population import MixedClassifiers


def test_numbered_ids_are_the_tuple_of_their_names() -> None:
    names, ids = tuple(f"c{at:03}" for at in range(200)), lazy_population(200).ids
    assert tuple(ids) == names and ids == names and len(ids) == 200
    assert [ids[at] for at in range(-200, 200)] == [names[at] for at in range(-200, 200)]
    assert ids[3:90:7] == names[3:90:7]
    assert dict(ids.positions) == {name: at for at, name in enumerate(names)}
    assert ids != lazy_population(201).ids and ids != names[:-1] and ids != (*names[:-1], "c1")
    with pytest.raises(IndexError):
        ids[200]
    for name in ("c1", "c0001", "c200", "c-01", "d001", "", "c", "c٠٠١", "c1_0", "c+01"):
        assert name not in ids and name not in ids.positions


@pytest.mark.parametrize("classes", [2, 5])
def test_what_is_drawn_for_a_client_depends_on_the_seed_and_its_number_alone(classes: int) -> None:
    small, large = (lazy_population(n, classes=classes, seed=3).in_memory() for n in (7, 300))
    for split in ("train", "test"):
        a, b = small.split(split), large.split(split)
        assert torch.equal(a.x, b.x[: len(a)]) and torch.equal(a.y, b.y[: len(a)])
    other = lazy_population(7, classes=classes, seed=4).in_memory()
    assert not torch.equal(other.train.x, small.train.x)
    assert not torch.equal(small.train.x[:5], small.test.x[:5])  # the splits differ
    assert sorted(set(large.train.y.tolist())) == list(range(classes))


def test_rows_clients_and_selections_are_those_of_the_federation_in_memory() -> None:
    lazy = lazy_population(50, samples=3, test_points=2, seed=1)
    whole = lazy.in_memory()
    for rows in (torch.tensor([149, 0, 77, 76, 0]), slice(10, 20)):
        assert torch.equal(lazy.train.x[rows], whole.train.x[rows])
        assert torch.equal(lazy.train.y[rows], whole.train.y[rows])
    chosen = ["c31", "c04"]
    for one, other in ((lazy.select(chosen).in_memory(), whole.select(chosen)), (lazy.to("cpu").in_memory(), whole)):
        assert torch.equal(one.train.x, other.train.x) and torch.equal(one.test.y, other.test.y)
        assert torch.equal(one.weights, other.weights) and one.ids == other.ids
    assert torch.equal(lazy.client("c31")["test"].x, whole.client("c31")["test"].x)
    assert lazy.describe() == whole.describe() and repr(lazy) == repr(whole) and "50" in lazy._repr_html_()


def test_fingerprints_tell_populations_apart() -> None:
    first = lazy_population(50, seed=1)
    others = [lazy_population(51, seed=1), lazy_population(50, seed=2), lazy_population(50, seed=1, samples=9)]
    others += [first.select(first.ids[:-1]), lazy_population(50, seed=1, alpha=0.4)]
    assert first.fingerprint == lazy_population(50, seed=1).fingerprint
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("method", "k", "mix", "engine"),
    [
        (PPFL(lr=0.3, batch_size=4, participation=0.3), 3, "predictions", "loop"),
        (PPFL(lr=0.3, participation=0.3, share_memberships=False), 2, "weights", "chunks-of-2"),
        (FedAvg(lr=0.3, batch_size=4, local_epochs=2), 1, "outputs", "threads"),
        (FedEM(lr=0.3, participation=0.5), 2, "predictions", "threads"),
    ],
)
def test_training_gives_the_same_bits_as_with_all_data_in_memory(method, k: int, mix: str, engine: str) -> None:
    lazy, net = lazy_population(30, samples=6, dim=4, k=3, seed=2), make_linear(classes=2)
    found, expected = (
        run(method, Population(net, k=k, mix=mix), data, engine=engine, rounds=3, kind=BytesTransport)
        for data in (lazy, lazy.in_memory())
    )
    assert_same(found.everything(), expected.everything(), atol=0, rtol=0)


def test_frozen_layers_run_again_whenever_a_client_comes() -> None:
    lazy = lazy_population(12, samples=6, dim=4, k=3, seed=2)
    net = make_net(classes=2)
    net[0].requires_grad_(False)
    found, expected = (
        run(FedAvg(lr=0.3, batch_size=4), Population(net, k=1), data, engine="stacked")
        for data in (lazy, lazy.in_memory())
    )
    assert_same(found.everything(), expected.everything(), atol=1e-5, rtol=1e-4)


def test_a_lazy_federation_is_fitted_and_evaluated_like_any_other() -> None:
    lazy, net = lazy_population(40, seed=1), make_linear(20, 2)
    whole = lazy.in_memory()
    fitted, expected = (fit(Population(net, k=2), data, PPFL(lr=0.3), rounds=2) for data in (lazy, whole))
    assert torch.equal(fitted.memberships, expected.memberships) and fitted.ids == whole.ids
    assert fitted.evaluate(lazy).pooled == expected.evaluate(whole).pooled
    assert torch.equal(fitted.predict("c07", whole.test.x[:3]), expected.predict("c07", whole.test.x[:3]))


def test_memberships_follow_the_dirichlet_distribution_and_labels_the_mixed_classifier() -> None:
    k, clients = 4, torch.arange(20_000)
    source = MixedClassifiers(seed=0, dim=3, k=k, classes=3, alpha=0.3, scale=1.0)
    c = source.memberships(clients)
    assert torch.allclose(c.sum(1), torch.ones(len(c), dtype=torch.float64))
    variance = (1 / k) * (1 - 1 / k) / (k * 0.3 + 1)  # of one share
    assert float((c.mean(0) - 1 / k).abs().max()) < 5 * (variance / len(c)) ** 0.5
    assert float((c.var(0) / variance - 1).abs().max()) < 0.05
    x, y = source.draw(clients[:3000], "train", 10)
    weights = torch.einsum("ck,kld->cld", c[:3000], source.models)
    p = torch.einsum("cnd,cld->cnl", x.double(), weights).softmax(-1)
    hits = nn.functional.one_hot(y, 3).double() - p  # mean zero, and uncorrelated with any function of x
    spread = (p * (1 - p)).mean((0, 1)).sqrt() / (p[..., 0].numel()) ** 0.5
    assert bool((hits.mean((0, 1)).abs() < 4.5 * spread).all())
    assert bool(((hits * p).mean((0, 1)).abs() < 4.5 * spread).all())
    assert float(x.min()) >= -1 and float(x.max()) < 1
    assert abs(float(x.mean())) < 0.02 and abs(float(x.var()) - 1 / 3) < 0.01
