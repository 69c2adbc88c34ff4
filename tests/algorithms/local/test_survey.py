"""The survey before the first round: whom it asks, when it is repeated, and what it leaves with those who were lost."""

import pytest
import torch

from algorithms.states import Recording
from ppfl.algorithms import PPFL
from ppfl.algorithms.contract import EVERYONE
from ppfl.algorithms.local.survey import Survey
from ppfl.core.population import Population
from ppfl.sites import Train
from support import make_federation, make_net
from training import assert_same, run

FEDERATION = make_federation((7, 12, 20, 5, 9, 3), dtype=torch.float64)
ROUNDS = 6


def trained(method: PPFL, k: int, federation=FEDERATION, **settings):
    population = Population(make_net(dtype=torch.float64), k=k)
    return run(method, population, federation, rounds=ROUNDS, engine="stacked", kind=Recording, **settings)


def is_survey(found, round: int) -> bool:
    return isinstance(found.transport.exchanges(round)[0][0].task, Survey)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("k", "begins", "surveys"), [(2, "gradients", True), (2, "uniform", False), (1, "gradients", False)]
)
def test_the_survey_asks_everyone_once_and_only_where_there_is_a_choice(k, begins, surveys, share: bool) -> None:
    found = trained(PPFL(lr=0.1, participation=0.5, start=begins, share_memberships=share), k)
    assert [is_survey(found, round) for round in range(ROUNDS)] == [surveys, *5 * [False]]
    assert found.reports[0].participants == (6 if surveys else 3)
    assert all(request.who == EVERYONE for request, _ in found.transport.exchanges(0)) == surveys
    assert len(found.transport.exchanges(0)) == (1 if share or not surveys else 10)


def test_a_client_lost_in_the_survey_starts_evenly_and_the_others_as_if_they_were_all() -> None:
    method, k = PPFL(lr=0.1), 3
    found = trained(method, k, dropout=0.4)
    ((_, reply),) = found.transport.exchanges(0)
    back = found.problem.roster.positions(reply.rows.ids)
    lost = [i for i in range(6) if i not in back.tolist()]
    assert len(back) >= k and lost
    before, after = (state.server.memberships for state in found.states[:2])
    assert after[lost].equal(before[lost])
    alone = trained(method, k, FEDERATION.select(reply.rows.ids))
    torch.testing.assert_close(after[back], alone.states[1].server.memberships)


@pytest.mark.parametrize("share", [True, False])
def test_the_survey_is_repeated_until_as_many_answer_as_there_are_models(share: bool) -> None:
    """Else nothing would ever tell the models apart. What a survey of too few has found is forgotten."""
    k = 3
    found = trained(PPFL(lr=0.1, share_memberships=share), k, dropout=0.6)
    enough = [report.participants >= k for report in found.reports]
    first = enough.index(True)
    assert 0 < first < ROUNDS - 1
    assert [is_survey(found, round) for round in range(ROUNDS)] == [round <= first for round in range(ROUNDS)]
    assert [len(found.transport.exchanges(round)) for round in range(first)] == [1] * first
    for at in range(first + 1):
        assert_same(found.states[at].server, found.states[0].server, atol=0, rtol=0)
        assert_same(found.client_tree(at).membership, found.client_tree(0).membership, atol=0, rtol=0)
    assert len(found.memberships.unique(dim=0)) >= k


def test_a_private_survey_that_all_clients_leave_in_the_middle_begins_again(monkeypatch) -> None:
    """The round is as if it had never been, and the next one starts from the moments."""
    method = PPFL(lr=0.1, share_memberships=False)
    expected = trained(method, 3)
    plain = Recording.deliver

    def lose_everyone_in_the_third_exchange(self, site, requests):
        lost = [
            request._replace(who=()) if isinstance(request, Train) and request.exchange == 3 else request
            for request in requests
        ]
        return plain(self, site, lost)

    monkeypatch.setattr(Recording, "deliver", lose_everyone_in_the_third_exchange)
    found = trained(method, 3)
    stages = [[request.task.stage for request, _ in found.transport.exchanges(round)] for round in (0, 1)]
    assert stages == [["moments", "assign", "assign"], ["moments", *8 * ["assign"], "place"]]
    assert_same(found.states[1].server, found.states[0].server, atol=0, rtol=0)
    assert_same(found.client_tree(2), expected.client_tree(1), atol=0, rtol=0)
