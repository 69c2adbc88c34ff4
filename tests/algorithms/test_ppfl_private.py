"""PPFL with share_memberships = False: the same training, and the server sees sums over clients alone."""

import pytest
import torch

from kit.problems import make_federation, make_linear, make_net
from kit.training import Recording, assert_same, run
from ppfl.algorithms import PPFL
from ppfl.core import affinity
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.simplex import match
from ppfl.core.trees import named_leaves
from ppfl.data import digits_federation, synthetic_groups

SIZES = (7, 12, 20, 5, 9, 3)
FEDERATION = make_federation(SIZES)
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
MIXES = ["outputs", "predictions", "weights"]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("settings", "dropout"),
    [({}, 0.0), ({"participation": 0.5, "order": "random"}, 0.0), ({}, 0.4), ({"participation": 0.7}, 0.3)],
    ids=["everyone", "some-clients", "lost-clients", "some-and-lost-clients"],
)
def test_from_a_uniform_start_it_is_the_open_method_to_the_bit(mix: str, settings: dict, dropout: float) -> None:
    open_, private = (
        run(
            PPFL(**SMALL, **settings, start="uniform", share_memberships=share),
            Population(make_net(), k=3, mix=mix),
            FEDERATION,
            engine="stacked",
            dropout=dropout,
        )
        for share in (True, False)
    )
    for at in range(1, 5):
        assert_same(private.states[at].server.shared, open_.states[at].server.shared, atol=0, rtol=0)
        assert_same(private.models(at), open_.models(at), atol=0, rtol=0)
    assert len(private.memberships.unique(dim=0)) > 1


def shapes_seen_by_the_server(clients: int, monkeypatch) -> list[dict[str, tuple]]:
    """Of all that the server holds, sends or receives in any exchange of a run."""
    seen = []

    def shapes(tree) -> dict[str, tuple]:
        return {name: tuple(getattr(leaf, "shape", ())) for name, leaf in named_leaves(tree).items()}

    with monkeypatch.context() as patch:
        plain = PPFL.merge

        def merge(self, problem, server, task, totals, rows):
            assert rows.values == {}
            after = plain(self, problem, server, task, totals, rows)
            seen.append(shapes(after) | {f"total of {name}": shape for name, shape in shapes(totals).items()})
            return after

        patch.setattr(PPFL, "merge", merge)
        federation = make_federation(SIZES * (clients // len(SIZES)))
        found = run(
            PPFL(**SMALL, share_memberships=False), Population(make_net(), k=3), federation, kind=Recording, rounds=2
        )
    for at, (request, reply) in enumerate(found.transport.exchanges()):
        assert request.own == {} and reply.rows.values == {} and not reply.rows.ids
        seen[at] |= {f"sent {name}": shape for name, shape in shapes(request.shared).items()}
        seen[at] |= {f"metric {name}": tuple(value.shape) for name, value in reply.metrics.items()}
    return seen


def test_nothing_that_the_server_has_grows_with_the_number_of_clients(monkeypatch) -> None:
    few, many = (shapes_seen_by_the_server(clients, monkeypatch) for clients in (6, 24))
    assert len(few) == 11  # ten messages for the start, and one round
    assert few == many
    assert any("survey.centres" in shapes for shapes in few)  # the states between messages were looked at too


@pytest.mark.parametrize("begins", ["gradients", "uniform"])
def test_no_client_uploads_a_row(begins: str, monkeypatch) -> None:
    uploads, plain = [], PPFL.work

    def work(self, *arguments):
        done = plain(self, *arguments)
        uploads.append(done.upload)
        return done

    monkeypatch.setattr(PPFL, "work", work)
    method = PPFL(**SMALL, share_memberships=False, start=begins)
    run(method, Population(make_net(), k=3), FEDERATION)
    assert len(uploads) == 6 * (10 + 3 if begins == "gradients" else 4)
    assert all(upload.rows == {} for upload in uploads)
    assert method.visible_rows == ()


DIGITS_NET = make_net(64, 16, 10)


@pytest.mark.parametrize(
    ("federation", "net", "k"),
    [
        (digits_federation(), DIGITS_NET, 4),
        (digits_federation(seed=1), DIGITS_NET, 4),
        (synthetic_groups(30, seed=1), make_linear(8, 2), 3),
    ],
    ids=["digits", "digits-drawn-again", "drawn-groups"],
)
def test_separated_groups_have_the_start_of_the_open_method_in_ten_exchanges(federation, net, k: int) -> None:
    open_, private = (
        run(PPFL(lr=0.1, share_memberships=share), Population(net, k=k), federation, engine="stacked", until=1)
        for share in (True, False)
    )
    assert private.state.exchange <= 10
    expected, found = open_.memberships, private.memberships
    torch.testing.assert_close(found[:, match(expected, found)], expected, atol=1e-4, rtol=0)
    truth = federation.truth.memberships.argmax(1)
    group = found.argmax(1)
    assert (group[:, None] == group).equal(truth[:, None] == truth)


def test_a_penalty_between_neighbours_needs_their_memberships() -> None:
    method, population = PPFL(lr=0.1, penalty=0.1, share_memberships=False), Population(make_net(), k=2)
    with pytest.raises(SettingError, match="set penalty = 0, or share_memberships = true"):
        run(method, population, FEDERATION, affinity=affinity.uniform(FEDERATION.ids))
    run(method, population, FEDERATION, rounds=1)  # without neighbours there is nothing to share
