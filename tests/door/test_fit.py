"""`fit` and what it returns: every client's own model, found by its name and scored by hand."""

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import ppfl
from kit.networks import make_net, with_seed
from kit.problems import PROBLEMS, make_federation
from kit.refusals import AffinityError, DataError, ModelError, SettingError, assert_refused
from ppfl import PPFL, DivergedWarning, FedAvg, Federation, Fitted, Local, Population, Watch, affinity, fit
from ppfl.algorithms import METHODS, Ditto, FineTune
from ppfl.server import warn_if_diverged

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
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


@functools.cache
def fitted_to_numbers() -> Fitted:
    """Its clients were given by numbers."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_arrays(x, [0, 1, 2, 1] * 10, np.arange(40) % 4)
    return fit(Population(make_net(), k=2), federation, PPFL(lr=0.1), rounds=2)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_losses_are_counted_client_by_client(name: str) -> None:
    """All ways of mixing give probabilities, whose logarithm is the loss."""
    fitted = fitted_by(name)
    test, train = fitted.evaluate(FEDERATION), fitted.evaluate(FEDERATION, "train")
    right = total = 0
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["test"]
        hits = int((fitted.predict(client, own.x).argmax(1) == own.y).sum())
        assert float(test.score[i]) == pytest.approx(hits / len(own))
        right, total = right + hits, total + len(own)
        own = FEDERATION.client(client)["train"]
        probability = fitted.predict(client, own.x).gather(1, own.y[:, None])
        torch.testing.assert_close(train.loss[i], -probability.log().double().mean(), rtol=1e-4, atol=1e-5)
    assert test.pooled == pytest.approx(right / total)
    assert fitted.history[-1]["accuracy"] == pytest.approx(right / total)


@pytest.mark.parametrize("name", CASES)
def test_clients_are_found_by_id_in_any_order_and_selection(name: str) -> None:
    fitted = fitted_by(name)
    assert fitted.ids == FEDERATION.ids
    torch.testing.assert_close(fitted.memberships.sum(1), torch.ones(4))
    for at, client in enumerate(fitted.ids):
        torch.testing.assert_close(fitted.membership(client), fitted.memberships[at])
    whole = fitted.evaluate(FEDERATION)
    for ids in (FEDERATION.ids[::-1], ("client-2", "client-0")):
        part, at = fitted.evaluate(FEDERATION.select(ids)), FEDERATION.positions(ids)
        for figure in ("loss", "score", "samples"):
            torch.testing.assert_close(getattr(part, figure), getattr(whole, figure)[at])


def test_by_the_max_rule_a_client_has_one_canonical_model() -> None:
    fitted, own = fitted_by("predictions"), FEDERATION.client("client-1")["test"]
    best = int(fitted.membership("client-1").argmax())
    one = {name: leaf[best] for name, leaf in fitted.models(["client-1"]).models.items()}
    expected = torch.func.functional_call(make_net(), one, (own.x,)).softmax(1)
    torch.testing.assert_close(fitted.predict("client-1", own.x, hard=True), expected)
    hard = fitted.evaluate(FEDERATION, hard=True)
    assert float(hard.score[1]) == pytest.approx(float((expected.argmax(1) == own.y).double().mean()))


def test_the_history_has_every_round_and_is_reported_on_the_way() -> None:
    seen, net = [], make_net()
    watch = Watch(every=2)
    fitted = fit(Population(net, k=2), FEDERATION, rounds=4, watch=watch, on_round=seen.append, engine="loop")
    assert seen == fitted.history and [record["round"] for record in seen] == [1, 2, 3, 4]
    assert ["accuracy" in record for record in seen] == [False, True, False, True]
    assert fitted.method.lr > 0 and fitted.state.round == 4  # lr = "auto" has become a number
    # and the network that was given is left as it was
    assert all(a.equal(b) for a, b in zip(net.parameters(), make_net().parameters(), strict=True))


def test_a_method_may_be_given_by_its_class_or_name() -> None:
    federation = make_federation((17, 12, 30, 9))
    fits = [fit(Population(make_net(), k=2), federation, method, rounds=2) for method in (None, PPFL, "ppfl", PPFL())]
    assert all(fitted.method == fits[0].method for fitted in fits)
    assert all(torch.equal(fitted.memberships, fits[0].memberships) for fitted in fits)
    assert isinstance(fit(Population(make_net(), k=1), federation, "fedavg", rounds=1).method, FedAvg)


def test_numbers_name_clients() -> None:
    fitted, x = fitted_to_numbers(), torch.ones(3, 4)
    assert fitted.ids == ("0", "1", "2", "3")
    for client in (2, np.int64(2)):
        assert torch.equal(fitted.predict(client, x), fitted.predict("2", x))
        assert torch.equal(fitted.membership(client), fitted.membership("2"))
        assert torch.equal(fitted.model(client)(x), fitted.model("2")(x))


def test_arrays_in_give_arrays_out() -> None:
    fitted, x = fitted_to_numbers(), torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = fitted.predict("1", x)
    read_only = x.numpy().copy()
    read_only.flags.writeable = False  # torch would warn
    for given in (x.numpy(), x.double().numpy(), x.tolist(), read_only):
        found = fitted.predict("1", given)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert isinstance(expected, torch.Tensor) and fitted.predict("1", x.double()).dtype == torch.float32


def test_training_that_diverged_is_said_once_where_fit_was_called() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = fit(Population(make_net(), k=2), FEDERATION, PPFL(lr=1000.0), rounds=5)
    (said,) = [w for w in caught if issubclass(w.category, DivergedWarning)]
    assert "lr = 1000" in str(said.message) and "smaller lr" in str(said.message)
    assert said.filename == __file__
    assert fitted.history[-1]["loss"] > 3 * fitted.history[0]["loss"]


def test_when_training_has_diverged() -> None:
    nan, inf = float("nan"), float("inf")
    fine = ([1.0, 0.5], [1.0, 2.5], [-1.0, 0.5], [nan, 1.0, 0.9], [])
    for losses in fine:
        warn_if_diverged(losses, lr=0.1)
    for losses in ([1.0, 3.5], [-1.0, 1.5], [1.0, nan], [1.0, inf]):
        with pytest.warns(DivergedWarning):
            warn_if_diverged(losses, lr=0.1)


def stranger() -> Federation:
    return Federation.from_arrays(torch.ones(6, 4), [0, 1, 2] * 2, ["client-0", "stranger"] * 3, test_fraction=0)


def fit_with(*method: object, net: nn.Module | None = None, **settings: object) -> Fitted:
    return fit(Population(net or make_net(), k=2), FEDERATION, *method, **{"rounds": 1, **settings})


def predict(x: object, client: object = "1") -> object:
    return fitted_to_numbers().predict(client, x)


class FunctionalDropout(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


RRELU = nn.Sequential(nn.Linear(4, 3), nn.RReLU())
OTHERS = affinity.uniform(("a", "b", "c", "d"))
REFUSED = {
    "a new client": (lambda: fitted_by("private").evaluate(stranger(), "train"), DataError, "'stranger'", "onboard("),
    "its membership": (lambda: fitted_by("ditto").membership("stranger"), DataError, "'stranger'", "'client-0'"),
    "its models": (lambda: fitted_by("ditto").models(["stranger"]), DataError, "'stranger'"),
    "a number of no client": (lambda: predict(torch.ones(1, 4), client=9), DataError, "'9'"),
    "samples of another shape": (lambda: predict(torch.ones(3, 5)), DataError, "(3, 5)", "(B, 4)"),
    "one sample": (lambda: predict(torch.ones(4)), DataError, "x[None]"),
    "text for samples": (lambda: predict("text"), DataError),
    "ragged samples": (lambda: predict([[1, 2], [3]]), DataError),
    "objects for samples": (lambda: predict([object()]), DataError),
    "no test data": (lambda: fitted_by("local").evaluate(make_federation()), DataError, "holdout"),
    "no rounds": (lambda: fit_with(rounds=0), SettingError, "at least one round"),
    "half a round": (lambda: fit_with(rounds=1.5), SettingError, "at least one round"),
    "an engine that is none": (lambda: fit_with(engine="cluster"), SettingError, "'loop', 'stacked'"),
    "a method that is none": (lambda: fit_with("pfl"), SettingError, "'pfl'", "'ppfl'"),
    "a number for a method": (lambda: fit_with(3), SettingError, "method is 3", "PPFL()"),
    "affinity of others": (lambda: fit_with(affinity=OTHERS), AffinityError),
    "randomness without a key": (lambda: fit_with(net=RRELU), ModelError, "'1' (RReLU)", "nn.LeakyReLU"),
    "the same in a function": (lambda: fit_with(PPFL(lr=0.1), net=FunctionalDropout(4, 3)), ModelError, "random"),
    "one input of several": (lambda: grouped({"tokens": TOKENS}), DataError, "x itself"),
    "inputs of unequal length": (lambda: grouped({"tokens": TOKENS, "age": AGE[:9]}), DataError, "tokens 60, age 9"),
    "inputs above 2^24": (lambda: grouped({"tokens": TOKENS + 2**25, "age": AGE}), DataError, "16,777,216"),
    "an input that is no name": (lambda: grouped({"my tokens": TOKENS, "age": AGE}), DataError, "'my tokens'"),
    "ragged numbers": (lambda: grouped({"tokens": TOKENS, "age": [[1.0], [1.0, 2.0]] * 30}), DataError, "'age'"),
    "a population for one input": (lambda: fit_two(NAMED, inputs=None), ModelError, "inputs=federation.inputs"),
    "another input": (lambda: fit_two(NAMED).predict("c0", {"t": TOKENS, "age": AGE}), DataError, "tokens, age"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_a_remedy(name: str) -> None:
    assert_refused(*REFUSED[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(tmp_path) -> None:
    path = fitted_to_numbers().save(tmp_path / "fitted")
    for call in (lambda: FEDERATION.to("cuda:3"), lambda: ppfl.load(path, device="cuda")):
        assert_refused(call, SettingError, "'cuda", "use 'cpu'")
    assert_refused(lambda: FEDERATION.to("gpu"), SettingError, "device is 'gpu'")


# ---------------------------------------------------------------------- several inputs, and targets of several values

TOKENS = torch.randint(0, 9, (60, 5), generator=torch.Generator().manual_seed(0))
AGE = torch.linspace(-1, 1, 60)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(5, 2)

    def forward(self, tokens: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        assert not tokens.is_floating_point()
        return self.head(torch.cat([self.embed(tokens).mean(1), age[:, None]], dim=1))


def grouped(x: object) -> Federation:
    return Federation.from_arrays(x, (TOKENS[:, 0] > 4).long(), [f"c{i % 6}" for i in range(60)])


NAMED = grouped({"tokens": TOKENS, "age": AGE})


def fit_two(federation: Federation, **settings: object) -> Fitted:
    net = with_seed(TwoInputs, dtype=torch.float32)
    population = Population(net, k=2, mix="weights", **{"inputs": federation.inputs, **settings})
    return fit(population, federation, PPFL(lr=0.1, batch_size=4), rounds=2)


def test_inputs_come_by_name_or_in_order_and_a_saved_fit_takes_them_as_the_network_does(tmp_path) -> None:
    named, ordered = fit_two(NAMED), fit_two(grouped((TOKENS, AGE)))
    x = {"tokens": TOKENS[:3].tolist(), "age": AGE[:3].tolist()}
    assert torch.equal(named.memberships, ordered.memberships)
    assert np.array_equal(named.predict("c1", x), ordered.predict("c1", (TOKENS[:3], AGE[:3])))
    again = ppfl.load(named.save(tmp_path / "fit"), net=TwoInputs())
    assert np.array_equal(again.predict("c1", x), named.predict("c1", x))
    with torch.no_grad():
        own = again.model("c1")(tokens=TOKENS[:3], age=AGE[:3]).softmax(1)
    np.testing.assert_allclose(own.numpy(), named.predict("c1", x), atol=1e-6)
    ragged = grouped({"tokens": [row.tolist()[: 1 + at % 5] for at, row in enumerate(TOKENS)], "age": AGE})
    assert "tokens (5,), age ()" in ragged.describe() and ragged.select(["c1"]).inputs == ragged.inputs
    fit_two(ragged)


MIXES = dict.fromkeys(METHODS, "outputs") | {"fedem": "predictions"}


@pytest.mark.parametrize(("method", "mix"), [*MIXES.items(), ("ppfl", "predictions"), ("ppfl", "weights")])
def test_every_method_takes_targets_of_several_values(method: str, mix: str) -> None:
    """Texts are padded. That gradients are right for each kind of target is shown in core for all of PROBLEMS."""
    kind, k = METHODS[method], 2 if method in ("ppfl", "fedem", "ifca", "cfl") else 1
    chosen = FineTune(method=FedAvg(lr=0.1)) if kind is FineTune else kind(lr=0.1, batch_size=4)
    for task in (PROBLEMS["several labels"](), PROBLEMS["texts"]()):
        federation, fits = task.federation.holdout(0.3), []
        for engine in ("loop", "stacked"):
            fits.append(fit(task.population(k, mix=mix), federation, chosen, rounds=2, engine=engine))
        losses = [fitted.history[-1]["test_loss"] for fitted in fits]
        assert losses[0] == pytest.approx(losses[1], rel=1e-8)
        for client in federation.ids:
            x = federation.client(client)["test"].x
            torch.testing.assert_close(*(fitted.predict(client, x) for fitted in fits), rtol=1e-7, atol=1e-9)
