"""What a client computes: batches, local SGD, gradients for its membership and the memory they take."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppfl
from kit.local_work import backend_for, limit_outputs, local_data, slope_and_loss
from kit.problems import make_federation, make_net, with_seed
from ppfl.algorithms.local.memberships import MembershipSteps, losses_of_models
from ppfl.algorithms.local.sgd import SGD, descend
from ppfl.algorithms.ppfl_client import Stationarity, stationarity_upload
from ppfl.algorithms.ppfl_start import gradient_sketch

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 1), dtype=torch.float64)
LARGEST_FIRST = [2, 1, 0, 3, 4]
NET = make_net(dtype=torch.float64)


def rows_seen(batches, row):
    """Each step's real samples of one client, as rows of the federation's data."""
    return [batch.rows[row][batch.share[row] > 0].tolist() for batch in batches if row < len(batch.x)]


def rows_of(client):
    end = int(FEDERATION.train.sizes[: client + 1].sum())
    return list(range(end - int(FEDERATION.train.sizes[client]), end))


@given(st.integers(1, 25), st.integers(1, 3))
def test_every_epoch_visits_every_sample_once_and_steps_are_as_many_for_all(batch_size, epochs):
    data = local_data(FEDERATION, LARGEST_FIRST)
    batches = list(data.steps(batch_size, epochs=epochs))
    for row, client in enumerate(LARGEST_FIRST):
        own, steps = rows_of(client), rows_seen(batches, row)
        per_epoch = -(-len(own) // batch_size)
        assert len(steps) == epochs * per_epoch == int(data.count_steps(batch_size, epochs)[row])
        for epoch in range(epochs):
            assert sorted(itertools.chain(*steps[epoch * per_epoch : (epoch + 1) * per_epoch])) == own
        assert all(len(step) <= batch_size for step in steps)
    assert [len(batch.x) for batch in data.steps(batch_size, steps=epochs)] == [5] * epochs  # so many of everyone
    assert data.count_steps(batch_size, None, epochs).tolist() == [epochs] * 5


def test_batches_and_masks_change_with_seed_round_and_purpose_and_not_with_the_chunk():
    def order_and_keys(seed=0, round=0, purpose="theta", clients=(2, 1, 4)):
        data = local_data(FEDERATION, list(clients), seed=seed, round=round, masks=True)
        batches = list(data.steps(4, epochs=2, purpose=purpose))
        return str(rows_seen(batches, 0)), [batch.keys.tolist() for batch in batches]

    others = [order_and_keys(), order_and_keys(seed=1), order_and_keys(round=1), order_and_keys(purpose="memberships")]
    assert len({order for order, _ in others}) == 4
    keys = [key for _, steps in others for step in steps for key in step]
    assert len(set(keys)) == len(keys)  # of every client and step too
    order, alone = order_and_keys(clients=(2,))
    assert (order, [step[0] for step in alone]) == (others[0][0], [step[0] for step in others[0][1]])
    data = local_data(FEDERATION, [2], masks=True)
    assert all(batch.keys is None for batch in data.everything(block=2048))  # dropout is off


@pytest.mark.parametrize("block", [1, 3, 100])
def test_everything_is_everything_once_and_rows_say_where_samples_stand(block):
    """Whatever memory held before. Samples that lie side by side are not copied."""
    data = local_data(FEDERATION, [2, 0, 4], used_memory=True)
    blocks = list(data.everything(block))
    for row, client in enumerate([2, 0, 4]):
        assert list(itertools.chain(*rows_seen(blocks, row))) == rows_of(client)
    for batch in itertools.chain(data.steps(4, epochs=2), data.steps(None, epochs=2), data.everything(block)):
        assert FEDERATION.train.x[batch.rows].equal(batch.x)
        assert FEDERATION.train.y[batch.rows].equal(batch.y)
    (whole,) = data.steps(None, epochs=1)
    assert whole.real.tolist() == FEDERATION.train.sizes[[2, 0, 4]].tolist()
    torch.testing.assert_close(whole.share.sum(1), torch.ones(3, dtype=torch.float64))
    alone = local_data(FEDERATION, [1])
    for batch in (next(iter(alone.steps(None, epochs=1))), next(iter(alone.everything(block=2048)))):
        assert batch.x.data_ptr() == FEDERATION.train.x[7:].data_ptr()


@pytest.mark.parametrize(
    ("kind", "mix", "canonical", "block", "kept"),  # bytes of a block of outputs, and of all that are kept
    [
        ("autograd", "outputs", "all", 2**30, 2**30),
        ("fastest", "outputs", "all", 600, 1500),
        ("autograd", "outputs", "0", 600, 1500),
        ("autograd", "predictions", "2", 600, 0),
        ("fastest", "predictions", "2", 600, 1500),
        ("autograd", "weights", "all", 600, 1500),
        ("fastest", "weights", "all", 2**30, 2**30),
    ],
)
def test_full_gradients_are_those_of_all_data_of_clients_of_any_size(kind, mix, canonical, block, kept, monkeypatch):
    limit_outputs(monkeypatch, block=block, kept=kept)
    population = ppfl.Population(NET, k=3, mix=mix, canonical=canonical)
    backend, models = backend_for(FEDERATION, population, kind), population.initial_models(1, distinct=True)
    c = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    data = local_data(FEDERATION, LARGEST_FIRST, backend)
    for gradient in MembershipSteps(models, data, batch_size=None).steps(2):
        slopes, losses = gradient(c)
        for row, client in enumerate(LARGEST_FIRST):
            expected = slope_and_loss(backend, models, c[row], FEDERATION.train.client(client))
            torch.testing.assert_close((slopes[row], losses[row]), expected)
        c = c.flip(0)  # the same outputs serve other memberships


def test_a_factor_multiplies_the_gradients_of_canonical_leaves_and_nothing_else():
    """With momentum and weight decay: as SGD whose gradients are multiplied before they reach the velocity."""
    population = ppfl.Population(NET, k=2, mix="weights", canonical="2")
    backend, canonical = backend_for(FEDERATION, population), population.canonical_names
    data, factor = local_data(FEDERATION, LARGEST_FIRST, backend), torch.linspace(0.2, 3, 5, dtype=torch.float64)
    sgd = SGD(lr=0.2, momentum=0.9, weight_decay=0.1, batch_size=4, epochs=2, steps=None)
    found, expected = (population.initial_network() for _ in range(2))
    found, expected = (
        {name: leaf.expand(5, *leaf.shape).clone() for name, leaf in values.items()} for values in (found, expected)
    )

    def add_scaled(at, velocity, momentum, batch):
        gradient = {name: torch.zeros_like(leaf) for name, leaf in velocity.items()}
        losses = backend.add_gradients(at, gradient, 0.0, batch)
        for name, leaf in velocity.items():
            own = factor[: len(leaf)] if name in canonical else torch.ones_like(factor[: len(leaf)])
            before = momentum * leaf if momentum else 0
            leaf.copy_(before + torch.einsum("c,c...->c...", own, gradient[name]))
        return losses

    losses = [
        descend(backend.add_gradients, found, data, sgd, factor=factor),
        descend(add_scaled, expected, data, sgd),
    ]
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(losses[0].loss, losses[1].loss, atol=1e-13, rtol=1e-12)


K, WORDS, SAMPLES = 3, 200, 300
SMALL_BLOCK, SMALL_KEPT = 2**16, 2**20  # bytes; a client's outputs of K models are 1.4 MB


class LargestTensor(TorchDispatchMode):
    """Watches what operations give."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


def of_two_clients(mix, *shape):
    """A backend, models, memberships, and data of two clients with many outputs: a target has so many words, or one."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(2 * SAMPLES, *shape, 4, generator=drawn, dtype=torch.float64)
    y = torch.randint(WORDS, (2 * SAMPLES, *shape), generator=drawn)
    if shape:
        y[:, -1] = torch.where(x[:, 0, 0] > 0, y[:, -1], -100)
    clients = ["a"] * SAMPLES + ["b"] * SAMPLES
    federation = ppfl.Federation.from_arrays(x, y, clients, test_fraction=0).to(dtype=torch.float64)
    population = ppfl.Population(with_seed(lambda: nn.Linear(4, WORDS)), k=K, mix=mix)
    c = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], dtype=torch.float64)
    models = population.initial_models(1, distinct=True)
    backend = backend_for(federation, population)
    return backend, models, c, local_data(federation, [0, 1], backend)


MEASURE = Stationarity(0.1)
PASSES = {
    "steps": lambda models, c, data: [g(c) for g in MembershipSteps(models, data, None).steps(2)],
    "best": lambda models, c, data: MembershipSteps(models, data, None).best(c, 2),
    "losses of models": lambda models, c, data: list(losses_of_models(models, data)),
    "sketch": lambda models, c, data: gradient_sketch(models, data),
    "measure": lambda models, c, data: stationarity_upload(MEASURE, models, {}, c, data, 0.0),
}


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("name", PASSES)
def test_passes_over_all_data_never_hold_more_outputs_than_a_block_has(name, mix, monkeypatch):
    limit_outputs(monkeypatch, block=SMALL_BLOCK, kept=0)
    _, *setting = of_two_clients(mix)
    with torch.no_grad(), LargestTensor() as seen:
        PASSES[name](*setting)
    assert SMALL_BLOCK // 4 < seen.bytes <= SMALL_BLOCK


def test_no_more_outputs_are_kept_than_the_budget_allows(monkeypatch):
    limit_outputs(monkeypatch, block=SMALL_BLOCK, kept=SMALL_KEPT)
    backend, models, c, data = of_two_clients("outputs")
    made = []

    def outputs(models, x):
        found = type(backend).outputs(backend, models, x)
        made.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(backend, "outputs", outputs)
    gradients = list(MembershipSteps(models, data, None).steps(2))
    kept = sum(made)
    assert SMALL_KEPT - SMALL_BLOCK <= kept <= SMALL_KEPT
    for gradient in gradients:
        made.clear()
        gradient(c)
        assert sum(made) == 2 * SAMPLES * K * WORDS * 8 - kept  # the rest runs again


@pytest.mark.parametrize("shape", [(), (3,)], ids=["one word", "several words"])
def test_mixed_predictions_of_labels_keep_likelihoods_alone(shape, monkeypatch):
    limit_outputs(monkeypatch, block=2**25, kept=0)
    backend, models, c, data = of_two_clients("predictions", *shape)
    gradient, _ = MembershipSteps(models, data, None).steps(2)
    monkeypatch.setattr(backend, "outputs", None)  # what was kept is enough
    slopes, losses = gradient(c)
    for i in range(2):
        expected = slope_and_loss(backend, models, c[i], data.samples.client(i))
        torch.testing.assert_close((slopes[i], losses[i]), expected)
