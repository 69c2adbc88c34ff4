"""The survey before the first round: whom it asks, when it is repeated, and what it leaves with those who were lost."""

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import Recording, assert_same, run, tensors
from ppfl.algorithms import PPFL
from ppfl.algorithms.contract import EVERYONE, participants
from ppfl.algorithms.local import survey
from ppfl.algorithms.local.survey import Survey
from ppfl.core.population import Population
from ppfl.core.simplex import match
from ppfl.data import digits_federation
from ppfl.sites import Train

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
def test_a_survey_of_few_clients_asks_everyone_once_and_only_where_there_is_a_choice(k, begins, surveys, share) -> None:
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


# ---------------------------------------------------------------------- clients that come after the survey


MANY = make_federation(range(4, 34), dtype=torch.float64)  # 30 clients


def some(share: bool = True, **settings) -> PPFL:
    return PPFL(**{"lr": 0.1, "participation": 0.2, "share_memberships": share, **settings})


@pytest.fixture
def three_per_model(monkeypatch):
    monkeypatch.setattr(survey, "SURVEYED", 3)
    survey._arrivals.cache_clear()


@pytest.mark.usefixtures("three_per_model")
@pytest.mark.parametrize("share", [True, False])
def test_a_survey_asks_its_rounds_clients_and_every_other_one_when_it_first_comes(share: bool) -> None:
    k = 2
    found = trained(some(share), k, MANY)
    roster, seen = found.problem.roster, set()
    for round in range(ROUNDS):
        drawn = set(participants(found.problem, 0.2, round))
        exchanges = [(set(request.who), request.task) for request, _ in found.transport.exchanges(round)]
        if round == 0:
            assert drawn == set.union(*(who for who, _ in exchanges)) and len(drawn) == 6 == 3 * k
            assert len(exchanges) == (1 if share else 10)
        else:
            late = [who for who, task in exchanges if isinstance(task, Survey)]
            assert late == ([drawn - seen] if drawn - seen else [])
            assert exchanges[-1][0] == drawn and not isinstance(exchanges[-1][1], Survey)
            assert found.reports[round].participants == len(drawn)
        seen |= drawn
        after = found.models(round + 1).memberships
        even = (after == 1 / k).all(1)
        assert {client for client, is_even in zip(roster.ids, even.tolist(), strict=True) if not is_even} == seen
        assert torch.isfinite(torch.tensor(found.reports[round].loss))


@pytest.mark.usefixtures("three_per_model")
@pytest.mark.parametrize("share", [True, False])
def test_more_are_asked_where_a_round_has_few_for_so_many_models(share: bool) -> None:
    found = trained(some(share), 4, MANY)
    (request, _), *_ = found.transport.exchanges(0)
    assert len(request.who) == 12 and set(participants(found.problem, 0.2, 0)) <= set(request.who)


@pytest.mark.usefixtures("three_per_model")
@pytest.mark.parametrize("share", [True, False])
def test_late_clients_start_where_a_survey_of_everyone_puts_them(share: bool) -> None:
    """On groups that are told apart whoever is asked: the same corners, whenever a client comes."""
    federation, net = digits_federation(), make_net(64, 16, 10)
    frozen = {"membership_steps": 0, "warmup": 0}
    everyone, late = (
        run(some(share, participation=p, **frozen), Population(net, k=4), federation, engine="stacked", rounds=9)
        for p in (1.0, 0.3)
    )
    expected, found = everyone.memberships, late.memberships
    came = (found != 1 / 4).any(1)
    assert 25 < int(came.sum()) < 40  # the rest has never come
    assert (found[:, match(expected[came], found[came])].argmax(1) == expected.argmax(1))[came].all()


@pytest.mark.usefixtures("three_per_model")
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_run_with_late_clients_is_the_same_resumed_and_on_every_engine(share: bool, dropout: float) -> None:
    settings = {"dropout": dropout, "rounds": ROUNDS, "seed": 3}
    population = Population(make_net(dtype=torch.float64), k=2)
    whole = run(some(share), population, MANY, engine="stacked", **settings)
    for until in (1, 2, 4):
        half = run(some(share), population, MANY, engine="stacked", until=until, **settings)
        survey._arrivals.cache_clear()  # as in another process
        resumed = run(some(share), population, MANY, engine="stacked", resume=half, **settings)
        assert_same(resumed.everything(), whole.everything(), atol=0, rtol=0)
    loop = run(some(share), population, MANY, engine="loop", **settings)
    assert_same(loop.everything(), whole.everything(), atol=1e-10, rtol=1e-9)


@pytest.mark.usefixtures("three_per_model")
def test_a_round_goes_on_when_all_its_newcomers_are_lost(monkeypatch) -> None:
    plain = Recording.deliver

    def lose_newcomers(self, site, requests):
        late = [
            request._replace(who=())
            if isinstance(request, Train) and getattr(request.task, "stage", "") == "late"
            else request
            for request in requests
        ]
        return plain(self, site, late)

    monkeypatch.setattr(Recording, "deliver", lose_newcomers)
    found = trained(some(), 2, MANY)
    assert [report.participants for report in found.reports] == [6] * ROUNDS
    moved = [
        not a.server.shared["0.weight"].equal(b.server.shared["0.weight"])
        for a, b in zip(found.states, found.states[1:], strict=False)
    ]
    assert moved == [False, *[True] * (ROUNDS - 1)]


@pytest.mark.usefixtures("three_per_model")
def test_bytes_are_counted_for_those_who_are_asked() -> None:
    """One network goes to each client of a survey, whatever K is, and to each newcomer; a sketch comes back."""
    found = trained(some(), 2, MANY)
    model = sum(p.numel() for p in make_net().parameters()) * 8
    sketch = model  # shorter than what a sketch holds
    first, *later = found.reports
    assert (first.bytes_down, first.bytes_up) == (6 * model, 6 * (sketch + 8))
    late = [len(request.who) for request, _ in found.transport.exchanges(1) if isinstance(request.task, Survey)]
    ordinary = 6 * (2 * model + 2 * 8)
    assert later[0].bytes_down == ordinary + sum(late) * model


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("participation", [1.0, 0.3])
def test_every_round_reports_a_loss(share: bool, participation: float) -> None:
    found = trained(some(share, participation=participation), 2, MANY)
    losses = torch.tensor([report.loss for report in found.reports])
    assert losses.isfinite().all()


def test_nothing_private_grows_with_the_number_of_clients() -> None:
    def shapes(clients: int) -> list[tuple[int, ...]]:
        federation = make_federation((5,) * clients)
        problem = trained(some(share=False), 2, federation.to(dtype=torch.float64)).problem
        return [tuple(leaf.shape) for leaf in tensors(some(share=False).init_server(problem))]

    assert shapes(30) == shapes(60)
