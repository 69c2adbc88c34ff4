"""States of a run come back from a file with the same bits, or are refused by name."""

from typing import NamedTuple

import pytest
import torch

from kit.experiments import Rows, named_leaves, written_and_read
from kit.refusals import CheckpointError, assert_refused
from ppfl.runs.states import pack, unpack
from ppfl.server import Checkpoint, Kept, ServerState
from ppfl.sites import SavedStates


class Server(NamedTuple):  # of a method of one's own: it need not be registered
    shared: dict[str, torch.Tensor]
    memberships: torch.Tensor


WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SERVER = Server({"0.weight": WEIGHT, "again": WEIGHT}, torch.full((2, 3), 1 / 3))  # two names for one memory
CLIENT = {"spread": WEIGHT[0], "counts": torch.arange(4), "exact": WEIGHT.double()}
ROWS = {
    "spread": WEIGHT[0].expand(3, 4),
    "counts": torch.arange(12).view(3, 4),
    "exact": WEIGHT.double().repeat(3, 1, 1),
}
IDS = ("a", "b", "c", "d")
SAVED = SavedStates(Rows(IDS[:3], ROWS), {"site": {"0": 3}})
ALL = SavedStates(Rows(IDS, {name: torch.cat([leaf, leaf[:1]]) for name, leaf in ROWS.items()}))
STATE = ServerState(7, 9, SERVER)
CHECKPOINT = Checkpoint(STATE, SAVED, Kept(STATE._replace(round=2), float("inf")), ALL)


def through_file(path, checkpoint, server=SERVER):
    packed = written_and_read(path, pack(checkpoint, len(IDS)), mapped=("clients.",))
    return unpack(path, packed, server, CLIENT, IDS)


def test_a_checkpoint_comes_back_with_the_same_bits_and_every_tensor_is_written_once(tmp_path):
    again = through_file(tmp_path / "a", CHECKPOINT)
    for (name, found), expected in zip(named_leaves(again).items(), named_leaves(CHECKPOINT).values(), strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, atol=0, rtol=0, msg=name)
        else:
            assert found == expected
    alike = CHECKPOINT._replace(clients=ALL)
    through_file(tmp_path / "b", alike)
    assert (tmp_path / "b").stat().st_size < (tmp_path / "a").stat().st_size


ZEROS = torch.zeros
TEMPLATE = {"a": ZEROS(2), "memberships": torch.full((2, 3), 1 / 3)}
BAD = {
    "too few": ({"a": ZEROS(2)}, "lacks tensor 'memberships'"),
    "too many": (TEMPLATE | {"c": ZEROS(1)}, "unknown tensor 'c'"),
    "another shape": (TEMPLATE | {"a": ZEROS(4)}, "has 'a' as torch.float32 (4,), expected torch.float32 (2,)"),
    "not a number": (TEMPLATE | {"a": torch.tensor([0, torch.nan])}, "values in 'a' that are not finite"),
    "off the simplex": (TEMPLATE | {"memberships": torch.full((2, 3), 0.3)}, "memberships[0]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(tmp_path, case):
    found, words = BAD[case]
    checkpoint = CHECKPOINT._replace(state=STATE._replace(server=found))
    assert_refused(lambda: through_file(tmp_path / "a", checkpoint, TEMPLATE), CheckpointError, words)


@pytest.mark.parametrize("ids", [("a", "b", "x"), ("a", "b", "b")])
def test_states_of_unknown_clients_or_of_one_client_twice_are_refused(tmp_path, ids):
    checkpoint = CHECKPOINT._replace(clients=SavedStates(Rows(ids, ROWS)))
    words = "client states of others than the 4 clients"
    assert_refused(lambda: through_file(tmp_path / "a", checkpoint), CheckpointError, words)
