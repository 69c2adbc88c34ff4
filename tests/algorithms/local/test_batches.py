"""Batches: every sample once an epoch, the same whatever else is in the chunk, padding without a share."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.problems import make_federation
from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.core.draws import name_keys
from ppfl.core.workspace import Workspace

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 1))
LARGEST_FIRST = [2, 1, 0, 3, 4]


def local_data(
    clients: list[int], seed: int = 0, round: int = 0, *, federation=FEDERATION, space=None, masks: bool = False
) -> LocalData:
    at = torch.tensor(clients)
    keys, draws = name_keys(federation.ids)[at], Draws(seed, round, masks)
    return LocalData(federation.train, federation.weights[at], keys, at, draws, space or Workspace())


def all_of(batches) -> list:
    """As a list, with copies of the inputs: a batch overwrites those of the one before it."""
    return [batch._replace(x=batch.x.clone()) for batch in batches]


def samples_seen(batches, row: int) -> list[list[tuple]]:
    """Each step's real samples of one client, in order."""
    return [
        [tuple(x.tolist()) for x, w in zip(batch.x[row], batch.share[row], strict=True) if w > 0]
        for batch in batches
        if row < len(batch.x)
    ]


@given(st.integers(1, 25), st.integers(1, 3))
def test_every_epoch_visits_every_sample_once(batch_size: int, epochs: int) -> None:
    batches = all_of(local_data(LARGEST_FIRST).steps(batch_size, epochs=epochs))
    for row, client in enumerate(LARGEST_FIRST):
        own = sorted(tuple(x.tolist()) for x in FEDERATION.client(FEDERATION.ids[client])["train"].x)
        steps = samples_seen(batches, row)
        per_epoch = -(-len(own) // batch_size)
        assert len(steps) == epochs * per_epoch
        for epoch in range(epochs):
            seen = [s for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for s in step]
            assert sorted(seen) == own
        assert all(len(step) <= batch_size for step in steps)


@given(st.integers(1, 9))
def test_local_steps_are_the_same_number_for_all(steps: int) -> None:
    batches = list(local_data([2, 3, 4]).steps(4, steps=steps))
    assert len(batches) == steps
    assert all(len(batch.x) == 3 for batch in batches)
    data = local_data([2, 3, 4])
    assert data.count_steps(4, None, steps).tolist() == [steps] * 3
    assert data.count_steps(4, 2).tolist() == [10, 4, 2]


def test_memory_that_was_used_before_changes_no_batch() -> None:
    used = Workspace()
    with used.frame():
        used.empty((1000,), FEDERATION.train.x).fill_(torch.nan)
    fresh, again = (all_of(local_data([2, 1, 4], space=space).steps(4, epochs=2)) for space in (None, used))
    for one, other in zip(fresh, again, strict=True):
        assert all(a is b is None or a.equal(b) for a, b in zip(one, other, strict=True))


def test_keys_for_masks_depend_on_seed_round_purpose_client_and_step_alone() -> None:
    def keys(seed=0, round=0, purpose="theta", clients=(2, 1, 4)) -> list[list[int]]:
        data = local_data(list(clients), seed, round, masks=True)
        return [batch.keys.tolist() for batch in data.steps(4, epochs=2, purpose=purpose)]

    assert len({key for step in keys() for key in step}) == sum(map(len, keys()))  # all differ
    assert [step[0] for step in keys()] == [step[0] for step in keys(clients=(2,))]
    others = [keys(), keys(seed=1), keys(round=1), keys(purpose="memberships")]
    assert len({step[0] for one in others for step in one}) == sum(map(len, others))
    assert all(batch.keys is None for batch in local_data([2], masks=True).everything(block=2048))
    assert all(batch.keys is None for batch in local_data([2]).steps(4, epochs=1))


@pytest.mark.parametrize("batch_size", [4, None])
def test_rows_say_where_samples_stand(batch_size: int | None) -> None:
    data = local_data([2, 1, 4])
    for batch in itertools.chain(data.steps(batch_size, epochs=2), data.everything(block=3)):
        assert FEDERATION.train.x[batch.rows].equal(batch.x)
        assert FEDERATION.train.y[batch.rows].equal(batch.y)


def test_clients_of_a_chunk_come_largest_first() -> None:
    with pytest.raises(AssertionError, match="largest first"):
        local_data([0, 1])


def test_samples_that_lie_side_by_side_are_not_copied() -> None:
    federation = make_federation(sizes=(6, 6, 6))
    data = local_data([1, 2], federation=federation)
    (whole,), (all_) = list(data.steps(None, epochs=1)), next(iter(data.everything(block=2048)))
    for batch in (whole, all_):
        assert batch.x.data_ptr() == federation.train.x[6:].data_ptr()
        assert batch.x.equal(federation.train.x[6:].reshape(2, 6, -1))


def test_a_clients_batches_do_not_depend_on_its_chunk() -> None:
    alone = samples_seen(local_data([1]).steps(5, epochs=2), 0)
    among = samples_seen(all_of(local_data([2, 1, 4]).steps(5, epochs=2)), 1)
    assert alone == among


def test_seed_round_and_purpose_change_the_order() -> None:
    orders = [
        samples_seen(local_data([2], seed, round).steps(20, epochs=1, purpose=purpose), 0)
        for seed, round, purpose in [(0, 0, "theta"), (1, 0, "theta"), (0, 1, "theta"), (0, 0, "memberships")]
    ]
    assert len({str(order) for order in orders}) == 4


def test_a_whole_batch_is_all_of_a_clients_data() -> None:
    (batch,) = local_data([0, 3]).steps(None, epochs=1)
    assert batch.real.tolist() == FEDERATION.train.sizes[[0, 3]].tolist()
    torch.testing.assert_close(batch.share.sum(1), torch.ones(2))


@pytest.mark.parametrize("block", [1, 3, 100])
def test_everything_is_everything_once(block: int) -> None:
    blocks = all_of(local_data([2, 0, 4]).everything(block))
    for row, client in enumerate([2, 0, 4]):
        own = [tuple(x.tolist()) for x in FEDERATION.client(FEDERATION.ids[client])["train"].x]
        assert [s for step in samples_seen(blocks, row) for s in step] == own
