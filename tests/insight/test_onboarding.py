"""Clients that come later: the best membership there is, and nothing else changes."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from kit.newcomers import quadratic_minima
from kit.problems import make_federation, make_net
from kit.refusals import DataError, ModelError, SettingError, assert_refused
from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, Watch, affinity, fit, load
from ppfl.algorithms import CFL, IFCA, Ditto, FedEM, FedProx, FineTune
from ppfl.core import simplex

ALL = make_federation((17, 12, 30, 9, 25, 14, 8), test_fraction=0.3)
OLD, NEW = ALL.select(ALL.ids[:4]), ALL.select(ALL.ids[4:])
X = ALL.train.x[:6]
GAP = 1e-5  # to which a newcomer's loss is brought to its minimum, relative to 1 + loss
CASES = {
    "outputs": (PPFL(lr=0.3), 3, "outputs"),
    "predictions": (PPFL(lr=0.3), 3, "predictions"),
    "weights": (PPFL(lr=0.3), 3, "weights"),
    "private": (PPFL(lr=0.3, share_memberships=False), 2, "predictions"),
    "fedavg": (FedAvg(lr=0.3), 1, "outputs"),
    "local": (Local(lr=0.3), 1, "outputs"),
    "ditto": (Ditto(lr=0.3), 1, "outputs"),
    "finetune": (FineTune(method=PPFL(lr=0.3)), 2, "weights"),
    "fedem": (FedEM(lr=0.3), 2, "predictions"),
    "ifca": (IFCA(lr=0.3), 2, "outputs"),
    "cfl": (CFL(lr=0.3), 2, "outputs"),
}


@functools.cache
def fitted_by(name: str, rounds: int = 12) -> Fitted:
    method, k, mix = CASES[name]
    return fit(Population(make_net(), k=k, mix=mix), OLD, method, rounds=rounds)


@functools.cache
def onboarded(name: str) -> Fitted:
    return fitted_by(name).onboard(NEW)


def loss_at(fitted: Fitted, client: str, c: torch.Tensor) -> torch.Tensor:
    """The training loss of a client with another membership, by hand in double precision."""
    own, c = ALL.client(client)["train"], c.double()
    x, net = own.x.double(), make_net(dtype=torch.float64)
    shared = {name: leaf.double() for name, leaf in fitted.models(fitted.ids[:1]).models.items()}
    if fitted.population.mix.name == "weights":
        mixed = {name: torch.einsum("k,k...->...", c, leaf) for name, leaf in shared.items()}
        return nn.functional.cross_entropy(torch.func.functional_call(net, mixed, (x,)), own.y)
    models = [{name: leaf[at] for name, leaf in shared.items()} for at in range(len(c))]
    outputs = torch.stack([torch.func.functional_call(net, model, (x,)) for model in models])
    if fitted.population.mix.name == "outputs":
        return nn.functional.cross_entropy(torch.tensordot(c, outputs, dims=1), own.y)
    return nn.functional.nll_loss(torch.tensordot(c, outputs.softmax(-1), dims=1).log(), own.y)


# ---------------------------------------------------------------------- newcomers


@pytest.mark.parametrize("name", CASES)
def test_newcomers_are_clients_like_others_and_known_clients_stay_as_they_were(name: str, tmp_path) -> None:
    before, after = fitted_by(name), onboarded(name)
    assert after.ids == (*OLD.ids, *NEW.ids) and before.ids == OLD.ids
    for client in OLD.ids:  # bit for bit
        assert torch.equal(before.predict(client, X), after.predict(client, X))
        assert torch.equal(before.membership(client), after.membership(client))
    torch.testing.assert_close(after.memberships.sum(1), torch.ones(7))
    scores, again = after.evaluate(ALL), load(after.save(tmp_path / "fitted"))
    assert again.ids == after.ids
    for at, client in enumerate(ALL.ids):
        own, found = ALL.client(client)["test"], after.predict(client, X)
        hits = (after.predict(client, own.x).argmax(1) == own.y).double().mean()
        assert float(scores.score[at]) == pytest.approx(float(hits))
        assert torch.equal(again.predict(client, X), found)
        with torch.no_grad():
            torch.testing.assert_close(after.model(client, predictions=True)(X), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_newcomers_loss_does_not_depend_on_who_comes_with_it(name: str) -> None:
    """To the gap at which the search for a membership stops. Where a loss is flat, that fixes no place."""
    after = onboarded(name)
    tolerance = 1e-3 if isinstance(after.method, FineTune) else 2 * GAP  # of networks trained further from there
    for client in NEW.ids:
        alone = fitted_by(name).onboard(NEW.select([client]))
        own = ALL.client(client)["train"]
        losses = [float(nn.functional.nll_loss(f.predict(client, own.x).log(), own.y)) for f in (alone, after)]
        assert losses[0] == pytest.approx(losses[1], abs=tolerance * (1 + losses[1]))


@pytest.mark.parametrize("name", ["outputs", "predictions", "weights", "private"])
def test_no_other_membership_fits_a_newcomer_better(name: str) -> None:
    """<c, g> - min_k g_k bounds how far a convex loss is above its minimum; it is 0 where no step helps. Outputs and
    predictions are convex in c: no corner, no other client's membership and no point between is better."""
    fitted, k = onboarded(name), fitted_by(name).population.k
    tried = torch.from_numpy(np.random.default_rng(0).dirichlet([0.5] * k, 50))
    for client in NEW.ids:
        found = fitted.membership(client).double()
        c = found.clone().requires_grad_()
        loss = loss_at(fitted, client, c)
        (g,) = torch.autograd.grad(loss, c)
        loss = float(loss.detach())
        assert float(((found - simplex.FLOOR) * (g - g.min())).sum()) <= 2 * GAP * (1 + loss)
        others = [0.99 * found + 0.01 * corner for corner in torch.eye(k)]
        others += [torch.full((k,), 1 / k)] if name == "weights" else [*torch.eye(k), *fitted.memberships, *tried]
        for other in others:
            assert loss <= float(loss_at(fitted, client, other)) + 1e-4


def test_the_search_solves_quadratic_programs() -> None:
    """Against the exact solver."""
    draw = torch.Generator().manual_seed(0)
    roots, f = torch.randn(20, 4, 6, generator=draw).double(), torch.randn(20, 4, generator=draw).double()
    found, exact = quadratic_minima(roots @ roots.mT, f)
    assert bool((found <= exact + 3e-5 * (1 + exact.abs())).all())


# ---------------------------------------------------------------------- new data of known clients


@pytest.mark.parametrize("name", ["outputs", "predictions", "private"])
def test_update_finds_the_best_membership_for_new_data(name: str) -> None:
    fitted, own = fitted_by(name), ALL.client("client-4")["train"]
    changed = Federation.from_arrays(own.x, own.y, ["client-1"] * len(own), test_fraction=0, classes=ALL.classes)
    updated = fitted.update(changed)
    both = updated.membership("client-1"), onboarded(name).membership("client-4")
    found, best = (float(loss_at(fitted, "client-4", c)) for c in both)
    assert found == pytest.approx(best, abs=1e-4)
    for client in ("client-0", "client-2", "client-3"):
        assert torch.equal(updated.predict(client, X), fitted.predict(client, X))
    assert updated.ids == fitted.ids and not torch.equal(fitted.membership("client-1"), updated.membership("client-1"))


def test_update_of_methods_with_own_networks_changes_theirs_alone() -> None:
    fitted, updated = fitted_by("ditto"), fitted_by("ditto").update(OLD.select(["client-2"]))
    assert torch.equal(updated.predict("client-0", X), fitted.predict("client-0", X))
    assert not torch.equal(updated.predict("client-2", X), fitted.predict("client-2", X))


# ---------------------------------------------------------------------- going on


@pytest.mark.parametrize("name", ["outputs", "weights", "fedavg", "ditto", "fedem", "cfl"])
def test_going_on_is_one_long_run(name: str) -> None:
    """Three rounds and then three more are six, bit for bit, where no step depends on the number of rounds."""
    method, k, mix = CASES[name]
    steady = {"schedule": "constant"} | ({"warmup": 0} if isinstance(method, PPFL) else {})
    method = method.model_copy(update=steady)

    def run(rounds: int, start: Fitted | None = None) -> Fitted:
        population = Population(make_net(), k=k, mix=mix) if start is None else start.population
        return fit(population, OLD, method, rounds=rounds, start=start)

    whole, parts = run(6), run(3, run(3))
    assert [record["round"] for record in parts.history] == list(range(1, 7))
    assert [record["loss"] for record in parts.history] == [record["loss"] for record in whole.history]
    assert all(torch.equal(whole.predict(client, X), parts.predict(client, X)) for client in OLD.ids)


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_old_and_new_clients_and_those_that_are_absent_are_still_known(
    name: str, tmp_path
) -> None:
    fitted = fitted_by(name, rounds=4)
    loaded = load(fitted.save(tmp_path / "fitted"))
    more, again = (fit(each.population, ALL, rounds=3, start=each) for each in (loaded, fitted))
    assert set(more.ids) == set(ALL.ids) and more.state.round == 7 == len(more.history)
    assert more.evaluate(ALL).pooled > 0
    assert all(torch.equal(more.predict(client, X), again.predict(client, X)) for client in ALL.ids)
    if name == "private":
        more = fit(fitted.population, ALL.select(ALL.ids[1:]), rounds=2, start=fitted)
        assert set(more.ids) == set(ALL.ids) and more.predict("client-0", X).shape == (6, 3)
        assert torch.equal(more.membership("client-0"), fitted.membership("client-0"))


def test_other_settings_may_go_on_and_fewer_classes_may_come() -> None:
    pulled = go_on(PPFL(penalty=0.1), affinity=affinity.uniform(OLD.ids))
    assert pulled.method.penalty == 0.1 and pulled.method.lr == known().method.lr
    assert known().onboard(newcomer(4, [0, 1])).ids[-1] == "new"


def newcomer(dim: int, labels: list) -> Federation:
    return Federation.from_arrays(torch.ones(8, dim), labels * 4, ["new"] * 8)


def known() -> Fitted:
    return fitted_by("outputs", rounds=4)


def go_on(*method: object, population: Population | None = None, **settings: object) -> Fitted:
    return fit(population or known().population, OLD, *method, start=known(), rounds=1, **settings)


REFUSED = {
    "known clients": (lambda: known().onboard(ALL.select(ALL.ids[3:])), DataError, "'client-3'", "update(federation)"),
    "update of strangers": (lambda: known().update(ALL), DataError, "'client-4'", "onboard(federation)"),
    "other samples": (lambda: known().onboard(newcomer(5, [0, 1])), DataError, "(5,)", "(4,)"),
    "other classes": (lambda: known().onboard(newcomer(4, ["cat", "dog"])), DataError, "'cat'", "classes="),
    "another population": (lambda: go_on(population=Population(make_net(), k=2)), ModelError, "start.population"),
    "another method": (lambda: go_on(FedProx()), SettingError, "PPFL", "FedProx"),
    "a penalty alone": (lambda: go_on(PPFL(penalty=0.1)), SettingError, "penalty is 0.1", "affinity"),
    "a random round": (lambda: go_on(watch=Watch(output="random")), SettingError, "'last' or 'best'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_in_or_go_on_says_why(name: str) -> None:
    assert_refused(*REFUSED[name])
