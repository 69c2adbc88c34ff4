"""Batches: every sample once an epoch, the same whatever else is in the chunk, padding without weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.algorithms.batches import LocalData, id_keys
from support import make_federation

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 1))


def local(clients: list[int], seed: int = 0, round: int = 0) -> LocalData:
    keys = id_keys(FEDERATION.ids)
    return LocalData(FEDERATION.train, FEDERATION.weights, keys, torch.tensor(clients), seed, round)


def samples_seen(batches, row: int) -> list[list[tuple]]:
    """Each step's real samples of one client, in order."""
    return [
        [tuple(x.tolist()) for x, w in zip(batch.x[row], batch.weight[row], strict=True) if w > 0]
        for batch in batches
        if batch.active[row] > 0
    ]


@given(st.integers(1, 25), st.integers(1, 3))
def test_every_epoch_visits_every_sample_once(batch_size: int, epochs: int) -> None:
    clients = [0, 1, 2, 3, 4]
    batches = list(local(clients).steps(batch_size, epochs=epochs))
    for row in clients:
        own = sorted(tuple(x.tolist()) for x in FEDERATION.client(FEDERATION.ids[row])["train"].x)
        steps = samples_seen(batches, row)
        per_epoch = -(-len(own) // batch_size)
        assert len(steps) == epochs * per_epoch
        for epoch in range(epochs):
            seen = [s for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for s in step]
            assert sorted(seen) == own
        assert all(len(step) <= batch_size for step in steps)


@given(st.integers(1, 9))
def test_local_steps_are_the_same_number_for_all(steps: int) -> None:
    batches = list(local([2, 3, 4]).steps(4, steps=steps))
    assert len(batches) == steps
    assert all(bool(batch.active.all()) for batch in batches)


def test_a_clients_batches_do_not_depend_on_its_chunk() -> None:
    alone = samples_seen(local([1]).steps(5, epochs=2), 0)
    among = samples_seen(local([4, 1, 2]).steps(5, epochs=2), 1)
    assert alone == among


def test_seed_round_and_purpose_change_the_order() -> None:
    orders = [
        samples_seen(local([2], seed, round).steps(20, epochs=1, purpose=purpose), 0)
        for seed, round, purpose in [(0, 0, "theta"), (1, 0, "theta"), (0, 1, "theta"), (0, 0, "memberships")]
    ]
    assert len({str(order) for order in orders}) == 4


def test_a_whole_batch_is_all_of_a_clients_data() -> None:
    (batch,) = local([0, 3]).steps(None, epochs=1)
    assert batch.weight.sum(1).tolist() == FEDERATION.train.sizes[[0, 3]].tolist()


@pytest.mark.parametrize("block", [1, 3, 100])
def test_everything_is_everything_once(block: int) -> None:
    blocks = list(local([0, 2, 4]).everything(block))
    for row, client in enumerate([0, 2, 4]):
        own = [tuple(x.tolist()) for x in FEDERATION.client(FEDERATION.ids[client])["train"].x]
        assert [s for step in samples_seen(blocks, row) for s in step] == own
