"""`fit` and what it returns: every client's own model, found by its name and scored by hand."""

import functools
import warnings

import numpy as np
import pytest
import torch

from kit.problems import PROBLEMS, make_federation, make_net
from kit.refusals import AffinityError, DataError, SettingError, assert_refused
from ppfl import PPFL, DivergedWarning, FedAvg, Federation, Fitted, Local, Population, Watch, affinity, fit
from ppfl.algorithms import METHODS, Ditto, FineTune
from ppfl.server import warn_if_diverged

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
STRANGER = Federation.from_arrays(torch.ones(3, 4), [0, 1, 2], ["stranger"] * 3, test_fraction=0)
CASES = {
    "local": (Local(lr=0.3), 1, "outputs"),
    "ditto": (Ditto(lr=0.3), 1, "outputs"),
    "finetune": (FineTune(method=PPFL(lr=0.3)), 2, "weights"),
    "predictions": (PPFL(lr=0.3), 3, "predictions"),
    "weights": (PPFL(lr=0.3), 3, "weights"),
    "private": (PPFL(lr=0.3, share_memberships=False), 2, "outputs"),
}


@functools.cache
def fitted_by(name: str) -> Fitted:
    method, k, mix = CASES[name]
    return fit(Population(make_net(), k=k, mix=mix), FEDERATION, method, rounds=3)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_losses_are_counted_client_by_client_in_any_order_and_selection(name):
    """All ways of mixing give probabilities, whose logarithm is the loss."""
    fitted = fitted_by(name)
    test, train = fitted.evaluate(FEDERATION), fitted.evaluate(FEDERATION, "train")
    right = 0
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["test"]
        hits = int((fitted.predict(client, own.x).argmax(1) == own.y).sum())
        assert float(test.score.values[i]) == pytest.approx(hits / len(own))
        right += hits
        own = FEDERATION.client(client)["train"]
        probability = fitted.predict(client, own.x).gather(1, own.y[:, None])
        torch.testing.assert_close(train.loss.values[i], -probability.log().double().mean(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fitted.membership(client), fitted.memberships[i])
    assert test.pooled == fitted.history[-1]["accuracy"] == pytest.approx(right / len(FEDERATION.test))
    ids = ("client-2", "client-0")
    part, at = fitted.evaluate(FEDERATION.select(ids)), FEDERATION.positions(ids)
    for figure in ("loss", "score"):
        torch.testing.assert_close(getattr(part, figure).values, getattr(test, figure).values[at])


def test_scores_of_numbers_are_in_their_units_client_by_client_and_as_in_the_history():
    x = torch.arange(180.0).reshape(60, 3).sin()
    federation = Federation.from_arrays(x, x.sum(1), [f"client-{i % 4}" for i in range(60)])
    fitted = fit(Population(torch.nn.Linear(3, 1), k=2, loss="squared"), federation, PPFL(lr=0.05), rounds=2)
    score, record = fitted.evaluate(federation).score, fitted.history[-1]
    for figure, found in (("", score.pooled), ("_mean", score.mean), ("_worst_tenth", score.worst_tenth)):
        assert found == pytest.approx(record[f"rmse{figure}"])
    errors = []
    for value, client in zip(score.values, federation.ids, strict=True):
        own = federation.client(client)["test"]
        errors.append((fitted.predict(client, own.x)[:, 0] - own.y).double().square())
        assert float(value) == pytest.approx(float(errors[-1].mean().sqrt()), rel=1e-5)
    assert score.pooled == pytest.approx(float(torch.cat(errors).mean().sqrt()), rel=1e-5)


def test_by_the_max_rule_a_client_has_one_canonical_model():
    fitted, own = fitted_by("predictions"), FEDERATION.client("client-1")["test"]
    best = int(fitted.membership("client-1").argmax())
    one = {name: leaf[best] for name, leaf in fitted.models(["client-1"]).models.items()}
    expected = torch.func.functional_call(make_net(), one, (own.x,)).softmax(1)
    torch.testing.assert_close(fitted.predict("client-1", own.x, hard=True), expected)
    hard = fitted.evaluate(FEDERATION, hard=True)
    assert float(hard.score.values[1]) == pytest.approx(float((expected.argmax(1) == own.y).double().mean()))


def test_the_history_has_every_round_and_is_reported_on_the_way():
    seen, net = [], make_net()
    fitted = fit(Population(net, k=2), FEDERATION, rounds=4, watch=Watch(every=2), on_round=seen.append)
    assert seen == fitted.history and [record["round"] for record in seen] == [1, 2, 3, 4]
    assert ["accuracy" in record for record in seen] == [False, True, False, True]
    assert fitted.method.lr > 0 and fitted.state.round == 4  # lr = "auto" has become a number
    # and the network that was given is left as it was
    assert all(a.equal(b) for a, b in zip(net.parameters(), make_net().parameters(), strict=True))


def test_numbers_name_clients_and_arrays_in_give_arrays_out():
    x, y = FEDERATION.train.x[:40], FEDERATION.train.y[:40]
    fitted = fit(Population(make_net(), k=2), Federation.from_arrays(x, y, np.arange(40) % 4), PPFL(lr=0.1), rounds=2)
    expected = fitted.predict("2", x)
    assert isinstance(expected, torch.Tensor) and fitted.predict("2", x.double()).dtype == torch.float32
    read_only = x.numpy().copy()
    read_only.flags.writeable = False  # torch would warn
    for given in (x.numpy(), x.double().numpy(), x.tolist(), read_only):
        for client in (2, np.int64(2)):
            found = fitted.predict(client, given)
            assert isinstance(found, np.ndarray)
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_training_that_diverged_is_said_once_where_fit_was_called():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Population(make_net(), k=2), FEDERATION, PPFL(lr=1000.0), rounds=5)
    (said,) = [w for w in caught if issubclass(w.category, DivergedWarning)]
    assert "lr = 1000" in str(said.message) and "smaller lr" in str(said.message) and said.filename == __file__
    nan, inf = float("nan"), float("inf")
    for losses in ([1.0, 0.5], [1.0, 2.5], [-1.0, 0.5], [nan, 1.0, 0.9], []):
        warn_if_diverged(losses, lr=0.1)
    for losses in ([1.0, 3.5], [-1.0, 1.5], [1.0, nan], [1.0, inf]):
        with pytest.warns(DivergedWarning):
            warn_if_diverged(losses, lr=0.1)


MIXES = dict.fromkeys(METHODS, "outputs") | {"fedem": "predictions"}


@pytest.mark.parametrize(("method", "mix"), [*MIXES.items(), ("ppfl", "predictions"), ("ppfl", "weights")])
def test_every_method_takes_targets_of_several_values(method, mix):
    """Texts are padded. That gradients are right for each kind of target is shown in core for all of PROBLEMS."""
    kind, k = METHODS[method], 2 if method in ("ppfl", "fedem", "ifca", "cfl") else 1
    chosen = FineTune(method=FedAvg(lr=0.1)) if kind is FineTune else kind(lr=0.1, batch_size=4)
    for task in (PROBLEMS["several labels"](), PROBLEMS["texts"]()):
        federation = task.federation.holdout(0.3)
        fits = [fit(task.population(k, mix=mix), federation, chosen, rounds=2, engine=engine)
                for engine in ("loop", "stacked")]  # fmt: skip
        for client in federation.ids:
            x = federation.client(client)["test"].x
            torch.testing.assert_close(*(fitted.predict(client, x) for fitted in fits), rtol=1e-7, atol=1e-9)


def fit_with(*method, **settings):
    return fit(Population(make_net(), k=2), FEDERATION, *method, **{"rounds": 1, **settings})


OTHERS = affinity.uniform(("a", "b", "c", "d"))
REFUSED = {
    "a new client": (lambda: fitted_by("private").evaluate(STRANGER, "train"), DataError, "'stranger'", "onboard("),
    "samples of another shape": (
        lambda: fitted_by("local").predict("client-0", torch.ones(3, 5)),
        DataError,
        "(3, 5)",
        "(B, 4)",
    ),
    "one sample": (lambda: fitted_by("local").predict("client-0", torch.ones(4)), DataError, "x[None]"),
    "no test data": (lambda: fitted_by("local").evaluate(make_federation()), DataError, "holdout"),
    "no rounds": (lambda: fit_with(rounds=0), SettingError, "at least one round"),
    "a method that is none": (lambda: fit_with("pfl"), SettingError, "'pfl'", "'ppfl'"),
    "affinity of others": (lambda: fit_with(affinity=OTHERS), AffinityError),
    "a device that is not there": (lambda: FEDERATION.to("cuda:99"), SettingError, "'cuda:99'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_a_remedy(name):
    assert_refused(*REFUSED[name])


def test_a_server_state_that_is_not_finite_ends_training():
    class Overflows(FedAvg):
        def merge(self, problem, server, task, totals, rows):
            merged = super().merge(problem, server, task, totals, rows)
            return merged._replace(shared={name: leaf * torch.inf for name, leaf in merged.shared.items()})

    call = functools.partial(fit, Population(make_net(), k=1), FEDERATION, Overflows(lr=0.3), rounds=1)
    assert_refused(call, SettingError, "after round 1", "smaller lr")
