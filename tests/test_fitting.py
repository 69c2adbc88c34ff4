"""`fit` and what it returns: every client's own model, found by its name and scored by hand."""

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, Federation, Fitted, Local, Population, Watch, affinity, fit
from ppfl.algorithms import Ditto, FineTune
from ppfl.core.errors import AffinityError, DataError, ModelError, SettingError

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
CASES = {
    "local": (Local(lr=0.3), 1, "outputs"),
    "ditto": (Ditto(lr=0.3), 1, "outputs"),
    "finetune": (FineTune(method=PPFL(lr=0.3)), 2, "weights"),
    "predictions": (PPFL(lr=0.3), 3, "predictions"),
    "weights": (PPFL(lr=0.3), 3, "weights"),
    "private": (PPFL(lr=0.3, share_memberships=False), 2, "outputs"),
}


@pytest.fixture(scope="module", params=CASES)
def fitted(request) -> Fitted:
    method, k, mix = CASES[request.param]
    return fit(Population(make_net(), k=k, mix=mix), FEDERATION, method, rounds=3)


def test_scores_are_counted_client_by_client(fitted: Fitted) -> None:
    result = fitted.evaluate(FEDERATION)
    right = total = 0
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["test"]
        hits = int((fitted.predict(client, own.x).argmax(1) == own.y).sum())
        assert float(result.score[i]) == pytest.approx(hits / len(own))
        right, total = right + hits, total + len(own)
    assert result.pooled == pytest.approx(right / total)
    assert fitted.history[-1]["accuracy"] == pytest.approx(right / total)


def test_losses_are_means_over_each_clients_data(fitted: Fitted) -> None:
    """All three ways of mixing give probabilities, whose logarithm is the loss."""
    result = fitted.evaluate(FEDERATION, "train")
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["train"]
        probability = fitted.predict(client, own.x).gather(1, own.y[:, None])
        torch.testing.assert_close(result.loss[i], -probability.log().double().mean(), rtol=1e-4, atol=1e-5)


def test_clients_are_found_by_id_in_any_order_and_selection(fitted: Fitted) -> None:
    whole = fitted.evaluate(FEDERATION)
    for ids in (FEDERATION.ids[::-1], ("client-2", "client-0")):
        part = fitted.evaluate(FEDERATION.select(ids))
        at = FEDERATION.positions(ids)
        for name in ("loss", "score", "samples"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name)[at])


def test_clients_that_were_not_fitted_are_refused_by_name(fitted: Fitted) -> None:
    x = torch.randn(6, 4)
    strangers = Federation.from_arrays(x, [0, 1, 2] * 2, ["client-0", "stranger"] * 3, test_fraction=0)
    with pytest.raises(DataError, match="no client 'stranger' among the 4 .* ids look like 'client-0'"):
        fitted.evaluate(strangers, "train")
    for ask in (fitted.membership, lambda client: fitted.predict(client, x), lambda client: fitted.models([client])):
        with pytest.raises(DataError, match="no client 'stranger'"):
            ask("stranger")


def test_memberships_are_one_row_per_client(fitted: Fitted) -> None:
    assert fitted.ids == FEDERATION.ids
    torch.testing.assert_close(fitted.memberships.sum(1), torch.ones(4))
    for at, client in enumerate(fitted.ids):
        torch.testing.assert_close(fitted.membership(client), fitted.memberships[at])


def test_by_the_max_rule_a_client_has_one_canonical_model() -> None:
    fitted = fit(Population(make_net(), k=3, mix="predictions"), FEDERATION, PPFL(lr=0.3), rounds=3)
    own = FEDERATION.client("client-1")["test"]
    best = int(fitted.membership("client-1").argmax())
    one = {name: leaf[best] for name, leaf in fitted.state.server.shared.items()}
    expected = torch.func.functional_call(make_net(), one, (own.x,)).softmax(1)
    torch.testing.assert_close(fitted.predict("client-1", own.x, hard=True), expected)
    hard = fitted.evaluate(FEDERATION, hard=True)
    assert float(hard.score[1]) == pytest.approx(float((expected.argmax(1) == own.y).double().mean()))


def test_the_history_has_every_round_and_is_reported_on_the_way() -> None:
    seen = []
    fitted = fit(
        Population(make_net(), k=2), FEDERATION, rounds=4, watch=Watch(every=2), on_round=seen.append, engine="loop"
    )
    assert seen == fitted.history and [record["round"] for record in seen] == [1, 2, 3, 4]
    assert ["accuracy" in record for record in seen] == [False, True, False, True]
    assert fitted.method.lr > 0 and fitted.state.round == 4  # lr = "auto" has become a number


def test_the_network_that_was_given_is_left_as_it_was() -> None:
    net = make_net()
    fit(Population(net, k=2), FEDERATION, PPFL(lr=0.3), rounds=2)
    assert all(a.equal(b) for a, b in zip(net.parameters(), make_net().parameters(), strict=True))


def test_errors_say_what_to_do() -> None:
    federation = make_federation()
    population = Population(make_net(), k=2)
    with pytest.raises(DataError, match="holdout"):
        fit(population, federation, PPFL(lr=0.1), rounds=1).evaluate(federation)
    for rounds in (0, 1.5):
        with pytest.raises(SettingError, match="at least one round"):
            fit(population, federation, rounds=rounds)
    with pytest.raises(SettingError, match="'loop', 'stacked'"):
        fit(population, federation, rounds=1, engine="cluster")
    with pytest.raises(AffinityError):
        fit(population, federation, rounds=1, affinity=affinity.uniform(("a", "b", "c", "d")))


# ---------------------------------------------------------------------- randomness that no key decides


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x.reshape(len(x), 2, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), 2, 2)
        return self.last(self.attention(x, x, x)[0].flatten(1))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(
    ("net", "remedy"),
    [
        (Recurrent, r"'lstm' \(LSTM\) draws random numbers .* set its dropout to 0 and put an nn.Dropout layer"),
        (Attention, r"'attention' \(MultiheadAttention\) draws random numbers .* set its dropout to 0"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.RReLU()), r"'1' \(RReLU\) draws .* use nn.LeakyReLU"),
        (Functional, "draws|random"),
    ],
)
def test_a_network_whose_randomness_cannot_be_keyed_is_refused_with_a_remedy(net, remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy):
        fit(Population(net(), k=2), FEDERATION, PPFL(lr=0.1), rounds=1)
