"""Memberships of clients that sat out rounds: what each rule makes up for, with models that stand still."""

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import assert_same, losses_of_clients, positions_of, run
from ppfl.algorithms import PPFL
from ppfl.core.population import Population

FEDERATION = make_federation((7, 12, 20, 5, 3, 9), dtype=torch.float64)
ROUNDS, SEED = 8, 2
MIXES = ["outputs", "weights"]
RULES = ["none", "step_size", "steps", "solve"]
# from K draws and even memberships, with a step that is too short to change a model
STILL = {"lr": 1e-12, "momentum": 0.0, "start": "uniform", "warmup": 0, "membership_steps": 1, "membership_lr": 0.3}
SOME = {"participation": 0.4}


def trained(mix: str, method: PPFL):
    population = Population(make_net(dtype=torch.float64), k=2, mix=mix)
    return run(method, population, FEDERATION, rounds=ROUNDS, seed=SEED)


def visits(found) -> list[list[int]]:
    """Who takes part, round by round."""
    return [positions_of(found.problem, found.method, t) for t in range(ROUNDS)]


def membership(found, client: int, rounds: int) -> torch.Tensor:
    return found.clients[rounds].values["membership"][client]


def comebacks(found):
    """Round and client of every visit that follows missed rounds, with their number."""
    last = dict.fromkeys(range(FEDERATION.n_clients), 0)  # nobody can miss the first round
    for t, who in enumerate(visits(found)):
        for client in who:
            if t > last[client] + 1:
                yield t, client, t - last[client] - 1
            last[client] = t


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rule", RULES[1:])
def test_who_misses_nothing_does_the_same_under_every_rule(mix: str, rule: str) -> None:
    settings = {"lr": 0.3, "batch_size": 4}  # with a survey, and models that move
    one, other = (trained(mix, PPFL(**settings, catch_up=catch_up)) for catch_up in (rule, "none"))
    assert_same(one.everything(), other.everything(), atol=0, rtol=0)


@pytest.mark.parametrize("mix", MIXES)
def test_more_steps_make_up_for_every_missed_round(mix: str) -> None:
    """Where models stand still, a client that comes back is where it would be had it never been away."""
    some = trained(mix, PPFL(**STILL, **SOME, catch_up="steps"))
    never_away, left_behind = trained(mix, PPFL(**STILL)), trained(mix, PPFL(**STILL, **SOME))
    first, checked = visits(some)[0], 0
    for t, client, _ in comebacks(some):
        steps = t + (client in first)  # the first round counts as missed for nobody
        expected = membership(never_away, client, steps)
        torch.testing.assert_close(membership(some, client, t + 1), expected, atol=1e-8, rtol=1e-7)
        assert not torch.allclose(membership(left_behind, client, t + 1), expected, atol=1e-4)
        checked += 1
    assert checked > 3


@pytest.mark.parametrize("mix", MIXES)
def test_longer_steps_are_as_many_times_as_long(mix: str) -> None:
    """log c_1 - log c_0 moves along the gradient: at the first visit, from even memberships, 1 + m times as far."""
    longer, usual = (trained(mix, PPFL(**STILL, **SOME, catch_up=rule)) for rule in ("step_size", "none"))
    seen: set[int] = set()
    for t, who in enumerate(visits(usual)):
        for client in set(who) - seen:
            moved = [float(membership(run_, client, t + 1).log().diff()) for run_ in (longer, usual)]
            assert moved[0] == pytest.approx(max(1, t) * moved[1], rel=1e-6)
        seen |= set(who)
    assert len(seen) == FEDERATION.n_clients


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("order", ["alternating", "random"])
def test_a_solved_membership_fits_as_well_as_the_best_of_a_grid(mix: str, order: str) -> None:
    found = trained(mix, PPFL(**STILL, **SOME, catch_up="solve", order=order, block_probability=0.99))
    away = [(t, client) for t, client, _ in comebacks(found)]
    assert len(away) > 3
    best = torch.full((FEDERATION.n_clients,), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0, 1, 51, dtype=torch.float64):
        best = torch.minimum(best, losses_with(found, torch.stack([share, 1 - share])))
    for t, client in away:
        loss = losses_with(found, membership(found, client, t + 1))[client]
        assert loss <= best[client] + 1e-3 * (1 + best[client].abs())


def losses_with(found, c: torch.Tensor) -> torch.Tensor:
    """f_i (M,) at the end of a run, where all clients had this membership (K,)."""
    rows = c.expand(FEDERATION.n_clients, -1)
    values = {**found.clients[-1].values, "membership": rows, "rounds": torch.ones(len(rows), dtype=rows.dtype)}
    return losses_of_clients(found._replace(clients=[found.clients[-1]._replace(values=values)]))


@pytest.mark.parametrize("rule", RULES)
def test_frozen_memberships_and_those_in_the_warm_up_do_not_move(rule: str) -> None:
    for settings in ({"membership_steps": 0}, {"warmup": 100, "membership_steps": 5}):
        found = run(
            PPFL(**{**STILL, **SOME, **settings}, catch_up=rule),
            Population(make_net(dtype=torch.float64), k=2),
            FEDERATION, rounds=60, until=5, seed=SEED,
        )  # fmt: skip
        assert bool((found.memberships == 0.5).all())
