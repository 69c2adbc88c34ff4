"""One client's model, as a plain module and in ONNX; clients that come later; and training that goes on."""

import copy
import functools
import logging

import numpy as np
import pytest
import torch
from torch import nn

from kit.fits import quadratic_gaps, quadratic_minima
from kit.networks import Mixture, adapted_layers, make_net, with_seed
from kit.problems import make_federation
from kit.refusals import DataError, ModelError, SettingError, WriteError, assert_refused
from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, Watch, affinity, fit, load
from ppfl.algorithms import CFL, IFCA, Ditto, FedEM, FedProx, FineTune
from ppfl.core import lora, simplex, with_adapters
from ppfl.sites import client_model, export_onnx

ALL = make_federation((17, 12, 30, 9, 25, 14, 8), test_fraction=0.3)
OLD, NEW = ALL.select(ALL.ids[:4]), ALL.select(ALL.ids[4:])
X = ALL.train.x[:7]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
GAP = 1e-5  # to which a newcomer's loss is brought to its minimum, relative to 1 + loss


def bends() -> nn.Module:
    """A network with a nonlinear part in its middle, a frozen layer and dropout."""
    middle = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 5))
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), middle, nn.GroupNorm(1, 5), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    return net


CASES = {
    "outputs": (PPFL(lr=0.3), make_net, {"k": 3}),
    "predictions": (PPFL(lr=0.3), make_net, {"k": 3, "mix": "predictions"}),
    "weights": (PPFL(lr=0.3), make_net, {"k": 3, "mix": "weights"}),
    "private": (PPFL(lr=0.3, share_memberships=False), make_net, {"k": 2, "mix": "predictions"}),
    "outputs of a linear part": (PPFL(lr=0.3), bends, {"k": 3, "canonical": "4"}),
    "outputs in the middle": (PPFL(lr=0.3), bends, {"k": 3, "canonical": "2"}),
    "predictions of a part": (PPFL(lr=0.3), bends, {"k": 3, "mix": "predictions", "canonical": "2"}),
    "weights of a part": (PPFL(lr=0.3), bends, {"k": 3, "mix": "weights", "canonical": ["2", "4"]}),
    "fedavg": (FedAvg(lr=0.3), bends, {"k": 1}),
    "local": (Local(lr=0.3), make_net, {"k": 1}),
    "ditto": (Ditto(lr=0.3), make_net, {"k": 1}),
    "finetune": (FineTune(method=PPFL(lr=0.3)), make_net, {"k": 2, "mix": "weights"}),
    "fedem": (FedEM(lr=0.3), make_net, {"k": 2, "mix": "predictions"}),
    "ifca": (IFCA(lr=0.3), make_net, {"k": 2}),
    "cfl": (CFL(lr=0.3), make_net, {"k": 2}),
}
ONE_NETWORK = {"weights", "outputs of a linear part", "weights of a part", "fedavg", "local", "ditto", "finetune"}


def population_of(name: str) -> Population:
    _, make, settings = CASES[name]
    return Population(with_seed(make, dtype=torch.float32), **settings)


@functools.cache
def fitted_by(name: str, rounds: int = 12) -> Fitted:
    return fit(population_of(name), OLD, CASES[name][0], rounds=rounds)


@functools.cache
def onboarded(name: str) -> Fitted:
    return fitted_by(name).onboard(NEW)


@pytest.mark.parametrize("name", CASES)
def test_a_client_has_a_plain_network_with_memory_of_its_own(name):
    fitted = fitted_by(name)
    one, given, before = fitted.model("client-0"), fitted.population.architecture, fitted.predict("client-0", X)
    assert not any(module.training for module in one.modules())
    program = torch.export.export(one, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.no_grad():
        outputs = one(X)
        torch.testing.assert_close(program.module()(X[:3]), outputs[:3])
        before_the_link = fitted.population.mix.name != "predictions"
        torch.testing.assert_close(outputs.softmax(1) if before_the_link else outputs, before, **CLOSE)
        hard = fitted.model("client-1", predictions=True, hard=True)
        torch.testing.assert_close(hard(X), fitted.predict("client-1", X, hard=True), **CLOSE)
    if name in ONE_NETWORK:
        assert str(one) == str(given)
        frozen = {name for name, p in given.named_parameters() if not p.requires_grad}
        assert {name for name, p in one.named_parameters() if not p.requires_grad} == frozen
        assert all(torch.equal(one.state_dict()[name], given.state_dict()[name]) for name in frozen)
    changed = copy.deepcopy(fitted)
    changed.model("client-0").requires_grad_(False).apply(lambda module: [p.zero_() for p in module.parameters()])
    assert torch.equal(before, changed.predict("client-0", X))


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_a_clients_network_has_plain_layers_where_the_populations_has_adapters(mix):
    population = Population(with_adapters(make_net(), lora(rank=2)), k=2, mix=mix, canonical="adapters.up")
    models = Mixture(population.initial_models(seed=0, distinct=True), torch.tensor([[0.3, 0.7]]))
    plain, adapted = (client_model(population, models, predictions=True, merge=merge) for merge in (True, False))
    assert adapted_layers(adapted) and not adapted_layers(plain)
    torch.testing.assert_close(plain(X), adapted(X), **CLOSE)


@pytest.mark.parametrize("name", ["weights", "outputs in the middle", "predictions of a part"])
def test_onnxruntime_gives_the_same_predictions_and_the_export_warns_of_nothing(name, tmp_path, monkeypatch, caplog):
    pytest.importorskip("onnxscript")
    runtime, fitted = pytest.importorskip("onnxruntime"), fitted_by(name)
    monkeypatch.setattr(logging.getLogger("torch.onnx"), "handlers", [caplog.handler])
    path = fitted.export_onnx("client-1", tmp_path / "model.onnx")
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (X, X[:1]):
        (found,) = session.run(None, {"x": batch.numpy()})
        expected = fitted_by(name).predict("client-1", batch)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-6)


def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    path, net, branches = tmp_path / "model.onnx", nn.Linear(4, 3), nn.Linear(4, 3)
    branches.forward = lambda x: x if float(x.sum()) > 0 else -x
    assert_refused(lambda: export_onnx(branches, path, X), ModelError, "ONNX")
    assert_refused(lambda: export_onnx(net, tmp_path / "a" / "model.onnx", X), WriteError, "no folder")
    monkeypatch.setattr("ppfl.sites.personal_models.find_spec", lambda _: None)
    assert_refused(lambda: export_onnx(net, path, X), SettingError, "pip install 'ppfl[export]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CASES)
def test_newcomers_are_clients_like_others_and_known_clients_stay_as_they_were(name, tmp_path):
    before, after = fitted_by(name), onboarded(name)
    assert after.ids == (*OLD.ids, *NEW.ids) and before.ids == OLD.ids
    for client in OLD.ids:  # bit for bit
        assert torch.equal(before.predict(client, X), after.predict(client, X))
        assert torch.equal(before.membership(client), after.membership(client))
    torch.testing.assert_close(after.memberships.sum(1), torch.ones(7))
    again, scores = load(after.save(tmp_path / "fitted")), after.evaluate(ALL)
    for at, client in enumerate(ALL.ids):
        own, found = ALL.client(client)["test"], after.predict(client, X)
        hits = (after.predict(client, own.x).argmax(1) == own.y).double().mean()
        assert float(scores.score.values[at]) == pytest.approx(float(hits))
        assert torch.equal(again.predict(client, X), found)
        with torch.no_grad():
            torch.testing.assert_close(after.model(client, predictions=True)(X), found, **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_a_newcomers_loss_does_not_depend_on_who_comes_with_it(name):
    """To the gap at which the search for a membership stops. Where a loss is flat, that fixes no place."""
    tolerance = 1e-3 if name == "finetune" else 2 * GAP  # of networks trained further from there
    for client in NEW.ids:
        fits, own = (fitted_by(name).onboard(NEW.select([client])), onboarded(name)), ALL.client(client)["train"]
        alone, among = (float(nn.functional.nll_loss(each.predict(client, own.x).log(), own.y)) for each in fits)
        assert alone == pytest.approx(among, abs=tolerance * (1 + among))


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


@pytest.mark.parametrize("name", ["outputs", "predictions", "weights", "private"])
def test_no_other_membership_fits_a_newcomer_better(name):
    """<c, g> - min_k g_k bounds how far a convex loss is above its minimum; it is 0 where no step helps. Outputs and
    predictions are convex in c: no corner, no other client's membership and no point between is better."""
    fitted, k = onboarded(name), fitted_by(name).population.k
    tried = torch.from_numpy(np.random.default_rng(0).dirichlet([0.5] * k, 50))
    for client in NEW.ids:
        found = fitted.membership(client).double().requires_grad_()
        loss = loss_at(fitted, client, found)
        (g,) = torch.autograd.grad(loss, found)
        loss, found = float(loss.detach()), found.detach()
        assert float(((found - simplex.FLOOR) * (g - g.min())).sum()) <= 2 * GAP * (1 + loss)
        others = [0.99 * found + 0.01 * corner for corner in torch.eye(k)]
        others += [torch.full((k,), 1 / k)] if name == "weights" else [*torch.eye(k), *fitted.memberships, *tried]
        assert loss <= min(float(loss_at(fitted, client, other)) for other in others) + 1e-4


def test_the_search_solves_quadratic_programs_as_the_exact_solver_does():
    draw = torch.Generator().manual_seed(0)
    roots, f = torch.randn(20, 4, 6, generator=draw).double(), torch.randn(20, 4, generator=draw).double()
    found, exact = quadratic_minima(roots @ roots.mT, f)
    assert bool((found <= exact + 3e-5 * (1 + exact.abs())).all())


@pytest.mark.parametrize("seed", range(3))
def test_the_search_comes_as_near_to_minima_in_single_precision_as_is_promised(seed):
    """Minima inside the simplex, where losses are flat: steps become shorter than single precision can tell apart."""
    draw = torch.Generator().manual_seed(seed)
    roots, inside = torch.randn(40, 3, 3, generator=draw), torch.randn(40, 3, 1, generator=draw).softmax(1)
    H = roots @ roots.mT
    assert float(quadratic_gaps(H, -(H @ inside)[:, :, 0]).max()) <= 2 * GAP


@pytest.mark.parametrize("name", ["outputs", "predictions", "private", "ditto"])
def test_update_finds_the_best_membership_for_new_data_and_leaves_all_others_alone(name):
    fitted, own = fitted_by(name), ALL.client("client-4")["train"]
    changed = Federation.from_arrays(own.x, own.y, ["client-1"] * len(own), test_fraction=0, classes=ALL.classes)
    updated = fitted.update(changed)
    same = [torch.equal(updated.predict(client, X), fitted.predict(client, X)) for client in OLD.ids]
    assert updated.ids == fitted.ids and same == [True, False, True, True]
    if name != "ditto":  # which has a network of its own instead
        both = updated.membership("client-1"), onboarded(name).membership("client-4")
        found, best = (float(loss_at(fitted, "client-4", c)) for c in both)
        assert found == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("name", ["outputs", "weights", "fedavg", "ditto", "fedem", "cfl"])
def test_going_on_is_one_long_run(name):
    """Three rounds and then three more are six, bit for bit, where no step depends on the number of rounds."""
    steady = {"schedule": "constant"} | ({"warmup": 0} if CASES[name][0].name == "ppfl" else {})
    method = CASES[name][0].model_copy(update=steady)
    whole, half = (fit(population_of(name), OLD, method, rounds=rounds) for rounds in (6, 3))
    parts = fit(half.population, OLD, method, rounds=3, start=half)
    assert [record["loss"] for record in parts.history] == [record["loss"] for record in whole.history]
    assert all(torch.equal(whole.predict(client, X), parts.predict(client, X)) for client in OLD.ids)


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_old_and_new_clients_and_those_that_are_absent_are_still_known(name, tmp_path):
    fitted = fitted_by(name, rounds=4)
    loaded = load(fitted.save(tmp_path / "fitted"))
    more, again = (fit(each.population, ALL, rounds=3, start=each) for each in (loaded, fitted))
    assert set(more.ids) == set(ALL.ids) and more.state.round == 7 == len(more.history)
    assert all(torch.equal(more.predict(client, X), again.predict(client, X)) for client in ALL.ids)
    if name == "private":
        more = fit(fitted.population, ALL.select(ALL.ids[1:]), rounds=2, start=fitted)
        assert torch.equal(more.membership("client-0"), fitted.membership("client-0"))
    if name == "outputs":  # with other settings too
        assert go_on(PPFL(penalty=0.1), affinity=affinity.uniform(OLD.ids)).method == PPFL(lr=0.3, penalty=0.1)


def test_another_method_begins_with_the_network_of_a_fit_and_the_callers_population_stays_as_it_was():
    population = population_of("fedavg")
    before, start = population.initial_network(), fitted_by("fedavg", rounds=4)
    found = fit(population, OLD, Local(lr=1e-9), rounds=1, start=start)
    after = population.initial_network()
    assert not population.pretrained and all(torch.equal(after[name], leaf) for name, leaf in before.items())
    torch.testing.assert_close(found.predict("client-0", X), start.predict("client-0", X), **CLOSE)


def go_on(*method, **settings):
    start = fitted_by("outputs", rounds=4)
    return fit(settings.pop("population", start.population), OLD, *method, start=start, rounds=1, **settings)


PETS = Federation.from_arrays(torch.ones(8, 4), ["cat", "dog"] * 4, ["new"] * 8)
REFUSED = {
    "known clients": (lambda: onboarded("outputs").onboard(NEW), DataError, "'client-4'", "update(federation)"),
    "update of strangers": (lambda: fitted_by("outputs").update(ALL), DataError, "'client-4'", "onboard(federation)"),
    "other classes": (lambda: fitted_by("outputs").onboard(PETS), DataError, "'cat'", "classes="),
    "another population": (lambda: go_on(population=population_of("fedem")), ModelError, "start.population"),
    "another method": (lambda: go_on(FedProx()), SettingError, "PPFL", "FedProx"),
    "a random round": (lambda: go_on(watch=Watch(output="random")), SettingError, "'last' or 'best'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_in_or_go_on_says_why(name):
    assert_refused(*REFUSED[name])
