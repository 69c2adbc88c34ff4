"""Memberships of many rounds come back from one file as they were."""

import torch

from ppfl.runs.membership_log import membership_record, read_membership_log


def test_rounds_with_fewer_models_get_columns_of_zeros(tmp_path):
    """Clustered FL cuts a cluster in two on the way, so its memberships get wider."""
    one, two, three = torch.ones(3, 1), torch.eye(2)[[0, 1, 0]], torch.eye(3)
    log = tmp_path / "memberships.log"
    log.write_bytes(b"".join(membership_record(round, c, 7) for round, c in ((5, one), (10, two), (15, three))))
    found = read_membership_log(log, log.stat().st_size, 3, 7)
    assert {round: c.shape for round, c in found.items()} == {5: (3, 3), 10: (3, 3), 15: (3, 3)}
    assert torch.equal(found[5][:, :1], one) and torch.equal(found[10][:, :2], two) and torch.equal(found[15], three)
    assert not found[5][:, 1:].any() and not found[10][:, 2:].any()
