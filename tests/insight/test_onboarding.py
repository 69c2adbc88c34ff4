"""Clients that come later: the best membership there is, and nothing else changes."""

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, Watch, affinity, fit
from ppfl.algorithms import CFL, IFCA, Ditto, FedEM, FedProx, FineTune
from ppfl.algorithms.local.memberships import best_memberships
from ppfl.core.errors import DataError, ModelError, SettingError
from ppfl.core.losses import cross_entropy
from ppfl.core.mixing import MIXES
from ppfl.core.simplex import FLOOR
from ppfl.core.simplex_program import minimize_on_simplex
from ppfl.core.trees import named_leaves
from ppfl.fitted import load

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


def fitted_by(name: str, federation: Federation = OLD, rounds: int = 12) -> Fitted:
    method, k, mix = CASES[name]
    return fit(Population(make_net(), k=k, mix=mix), federation, method, rounds=rounds)


@pytest.fixture(scope="module", params=CASES)
def both(request) -> tuple[Fitted, Fitted]:
    fitted = fitted_by(request.param)
    return fitted, fitted.onboard(NEW)


def loss_at(fitted: Fitted, client: str, c: torch.Tensor) -> torch.Tensor:
    """The training loss of a client with another membership, by hand in double precision."""
    own, c = ALL.client(client)["train"], c.double()
    x, net = own.x.double(), make_net(dtype=torch.float64)
    models = [{name: leaf[at].double() for name, leaf in fitted.state.server.shared.items()} for at in range(len(c))]
    mix = fitted.population.mix.name
    if mix == "weights":
        mixed = {name: sum(w * m[name] for w, m in zip(c, models, strict=True)) for name in models[0]}
        return nn.functional.cross_entropy(torch.func.functional_call(net, mixed, (x,)), own.y)
    outputs = torch.stack([torch.func.functional_call(net, m, (x,)) for m in models])
    if mix == "outputs":
        return nn.functional.cross_entropy(torch.tensordot(c, outputs, dims=1), own.y)
    return nn.functional.nll_loss(torch.tensordot(c, outputs.softmax(-1), dims=1).log(), own.y)


def client_loss(fitted: Fitted, client: str, c: torch.Tensor) -> float:
    return float(loss_at(fitted, client, c))


# ---------------------------------------------------------------------- newcomers


def test_known_clients_stay_as_they_were_bit_for_bit(both) -> None:
    before, after = both
    assert after.ids == (*OLD.ids, *NEW.ids) and before.ids == OLD.ids
    for client in OLD.ids:
        assert torch.equal(before.predict(client, X), after.predict(client, X))
        assert torch.equal(before.membership(client), after.membership(client))
    for one, other in zip(*(named_leaves(f.state.server).values() for f in both), strict=True):
        assert torch.equal(one, other)


def test_newcomers_are_clients_like_others(both) -> None:
    _, after = both
    torch.testing.assert_close(after.memberships.sum(1), torch.ones(7))
    scores = after.evaluate(ALL)
    for at, client in enumerate(ALL.ids):
        own = ALL.client(client)["test"]
        hits = (after.predict(client, own.x).argmax(1) == own.y).double().mean()
        assert float(scores.score[at]) == pytest.approx(float(hits))
        with torch.no_grad():
            found = after.model(client, predictions=True)(X)
        torch.testing.assert_close(found, after.predict(client, X), rtol=1e-5, atol=1e-6)


def test_a_newcomers_loss_does_not_depend_on_who_comes_with_it(both) -> None:
    """To the gap at which the search for a membership stops. Where a loss is flat, that fixes no place."""
    before, after = both
    tolerance = 1e-3 if isinstance(after.method, FineTune) else 2 * GAP  # of networks trained further from there
    for client in NEW.ids:
        alone = before.onboard(NEW.select([client]))
        own = ALL.client(client)["train"]
        losses = [float(nn.functional.nll_loss(f.predict(client, own.x).log(), own.y)) for f in (alone, after)]
        assert losses[0] == pytest.approx(losses[1], abs=tolerance * (1 + losses[1]))


@pytest.mark.parametrize("name", ["outputs", "predictions", "weights", "private"])
def test_a_newcomers_membership_is_stationary(name: str) -> None:
    """<c, g> - min_k g_k bounds how far a convex loss is above its minimum; it is 0 where no step helps."""
    fitted = fitted_by(name).onboard(NEW)
    for client in NEW.ids:
        c = fitted.membership(client).double().requires_grad_()
        loss = loss_at(fitted, client, c)
        (g,) = torch.autograd.grad(loss, c)
        gap = ((c.detach() - FLOOR) * (g - g.min())).sum()
        assert float(gap) <= 2 * GAP * (1 + float(loss.detach()))


def test_a_fit_with_newcomers_can_be_saved(both, tmp_path) -> None:
    _, after = both
    again = load(after.save(tmp_path / "fitted"))
    assert again.ids == after.ids
    for client in again.ids:
        assert torch.equal(again.predict(client, X), after.predict(client, X))


@pytest.mark.parametrize("name", ["outputs", "predictions", "private"])
def test_no_other_membership_fits_a_newcomer_better(name: str) -> None:
    """Convex in c: no corner, no other client's membership and no point between is better than what was found."""
    fitted = fitted_by(name).onboard(NEW)
    k = fitted.population.k
    tried = torch.distributions.Dirichlet(torch.full((k,), 0.5)).sample((50,))
    for client in NEW.ids:
        found = fitted.membership(client)
        best = client_loss(fitted, client, found)
        for c in (*torch.eye(k), *fitted.memberships, *tried, *(0.9 * found + 0.1 * corner for corner in torch.eye(k))):
            assert best <= client_loss(fitted, client, c) + 1e-4


def test_mixed_weights_end_where_no_step_helps() -> None:
    fitted = fitted_by("weights").onboard(NEW)
    for client in NEW.ids:
        found = fitted.membership(client)
        even = client_loss(fitted, client, torch.full((3,), 1 / 3))
        best = client_loss(fitted, client, found)
        assert best <= even + 1e-5
        for corner in torch.eye(3):
            assert best <= client_loss(fitted, client, 0.99 * found + 0.01 * corner) + 1e-4


def test_memberships_solve_a_quadratic_program() -> None:
    """Against the exact solver."""
    draw = torch.Generator().manual_seed(0)
    roots, f = torch.randn(20, 4, 6, generator=draw).double(), torch.randn(20, 4, generator=draw).double()
    H = roots @ roots.mT

    def loss_at(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope = (H @ c[:, :, None])[:, :, 0] + f
        return slope, (c * (slope + f)).sum(1) / 2

    found, loss = best_memberships(loss_at, torch.full((20, 4), 0.25).double(), 500)
    _, exact = loss_at(minimize_on_simplex(H, f, torch.full((20, 4), 0.25).double()))
    assert bool((loss <= exact + 3e-5 * (1 + exact.abs())).all())
    torch.testing.assert_close(loss_at(found)[1], loss)


def test_memberships_on_kept_outputs_reach_the_edge() -> None:
    """A client whose every label one model explains is wholly in it."""
    outputs = torch.zeros(1, 2, 3, 5)
    outputs[0, 1, 2] = 4.0  # model 1 is sure of class 2
    y, share = torch.full((1, 5), 2), torch.full((1, 5), 0.2)
    loss_at = MIXES["predictions"].membership_loss(cross_entropy, outputs, y, share)
    c, _ = best_memberships(loss_at, torch.tensor([[0.5, 0.5]]), 500)
    assert float(c[0, 1]) > 0.999


def test_wrong_clients_are_told_where_to_go() -> None:
    fitted = fitted_by("outputs", rounds=2)
    with pytest.raises(DataError, match=r"'client-3' is already known \(1 of 4 are\).*update\(federation\)"):
        fitted.onboard(ALL.select(ALL.ids[3:]))
    with pytest.raises(DataError, match=r"no client 'client-4' among the 4.*onboard\(federation\)"):
        fitted.update(ALL)
    with pytest.raises(DataError, match=r"no client 'client-4' among the 4 .*fitted.onboard\(federation\)"):
        fitted.evaluate(ALL)


def test_other_data_are_refused() -> None:
    fitted = fitted_by("outputs", rounds=2)
    wide = Federation.from_arrays(torch.randn(8, 5), [0, 1] * 4, ["new"] * 8)
    with pytest.raises(DataError, match=r"samples of shape \(5,\).*trained on \(4,\)"):
        fitted.onboard(wide)
    named = Federation.from_arrays(torch.randn(8, 4), ["cat", "dog"] * 4, ["new"] * 8)
    with pytest.raises(DataError, match=r"classes 'cat', 'dog'; .* classes '0', '1', '2'.*classes="):
        fitted.onboard(named)
    fewer = Federation.from_arrays(torch.randn(8, 4), [0, 1] * 4, ["new"] * 8)
    assert fitted.onboard(fewer).ids[-1] == "new"


# ---------------------------------------------------------------------- new data of known clients


@pytest.mark.parametrize("name", ["outputs", "predictions", "private"])
def test_update_finds_the_best_membership_for_new_data(name: str) -> None:
    fitted = fitted_by(name)
    x, y = (ALL.client("client-4")["train"].x, ALL.client("client-4")["train"].y)
    changed = Federation.from_arrays(x, y, ["client-1"] * len(x), test_fraction=0, classes=ALL.classes)
    updated = fitted.update(changed)
    as_newcomer = fitted.onboard(NEW).membership("client-4")
    found, best = (client_loss(fitted, "client-4", c) for c in (updated.membership("client-1"), as_newcomer))
    assert found == pytest.approx(best, abs=1e-4)
    for client in ("client-0", "client-2", "client-3"):
        assert torch.equal(updated.membership(client), fitted.membership(client))
        assert torch.equal(updated.predict(client, X), fitted.predict(client, X))
    assert updated.ids == fitted.ids and not torch.equal(fitted.membership("client-1"), updated.membership("client-1"))


def test_update_of_methods_with_own_networks_changes_theirs_alone() -> None:
    fitted = fitted_by("ditto")
    updated = fitted.update(OLD.select(["client-2"]))
    assert torch.equal(updated.predict("client-0", X), fitted.predict("client-0", X))
    assert not torch.equal(updated.predict("client-2", X), fitted.predict("client-2", X))


# ---------------------------------------------------------------------- going on


@pytest.mark.parametrize("name", ["outputs", "weights", "fedavg", "ditto", "fedem", "cfl"])
def test_going_on_is_one_long_run(name: str) -> None:
    """Six rounds and then six more are twelve, bit for bit, where no step depends on the number of rounds."""
    method, k, mix = CASES[name]
    steady = {"schedule": "constant"} | ({"warmup": 0} if isinstance(method, PPFL) else {})
    method = method.model_copy(update=steady)

    def run(rounds: int, start: Fitted | None = None) -> Fitted:
        population = Population(make_net(), k=k, mix=mix) if start is None else start.population
        return fit(population, OLD, method, rounds=rounds, start=start)

    whole, parts = run(12), run(6, run(6))
    assert [record["round"] for record in parts.history] == list(range(1, 13))
    for client in OLD.ids:
        assert torch.equal(whole.predict(client, X), parts.predict(client, X))
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in parts.history]


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_old_and_new_clients(name: str, tmp_path) -> None:
    fitted = fitted_by(name, rounds=4)
    loaded = load(fitted.save(tmp_path / "fitted"))
    more = fit(loaded.population, ALL, rounds=3, start=loaded)
    assert set(more.ids) == set(ALL.ids) and more.state.round == 7 and len(more.history) == 7
    assert more.evaluate(ALL).pooled > 0
    again = fit(fitted.population, ALL, rounds=3, start=fitted)
    assert all(torch.equal(more.predict(client, X), again.predict(client, X)) for client in ALL.ids)


def test_clients_that_are_absent_are_still_known() -> None:
    fitted = fitted_by("private", rounds=4)
    more = fit(fitted.population, ALL.select(ALL.ids[1:]), rounds=2, start=fitted)
    assert set(more.ids) == set(ALL.ids)
    assert torch.equal(more.membership("client-0"), fitted.membership("client-0"))
    assert more.predict("client-0", X).shape == (6, 3)


def test_what_cannot_go_on_says_why() -> None:
    fitted = fitted_by("outputs", rounds=2)
    with pytest.raises(ModelError, match=r"pass start\.population"):
        fit(Population(make_net(), k=2), OLD, start=fitted, rounds=1)
    with pytest.raises(
        SettingError, match="trained by PPFL, whose clients have models of their own, and method is FedProx"
    ):
        fit(fitted.population, OLD, FedProx(), start=fitted, rounds=1)
    with pytest.raises(SettingError, match="penalty is 0.1, but there is no affinity"):
        fit(fitted.population, OLD, PPFL(penalty=0.1), start=fitted, rounds=1)
    with pytest.raises(SettingError, match="'last' or 'best'"):
        fit(fitted.population, OLD, start=fitted, rounds=1, watch=Watch(output="random"))
    pulled = fit(fitted.population, OLD, PPFL(penalty=0.1), start=fitted, rounds=1, affinity=affinity.uniform(OLD.ids))
    assert pulled.method.penalty == 0.1 and pulled.method.lr == fitted.method.lr
