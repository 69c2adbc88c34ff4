"""Evaluation is every client's own model on its own data, counted by hand."""

import pytest
import torch
from ppfl.engines import Watch, fit
from ppfl.engines.evaluate import Evaluation, client_losses

from ppfl.algorithms import PPFL, Local
from ppfl.core.errors import DataError, SettingError
from ppfl.core.population import Population
from support import make_federation, make_net

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)


@pytest.mark.parametrize(
    ("method", "k", "mix"), [(Local(), 1, "outputs"), (PPFL(), 3, "predictions"), (PPFL(), 3, "weights")]
)
def test_scores_are_counted_client_by_client(method, k: int, mix: str) -> None:
    fitted = fit(Population(make_net(), k=k, mix=mix), FEDERATION, method, rounds=3)
    result = fitted.evaluate(FEDERATION)
    right = total = 0
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["test"]
        hits = int((fitted.predict(client, own.x).argmax(1) == own.y).sum())
        assert float(result.score[i]) == pytest.approx(hits / len(own))
        right, total = right + hits, total + len(own)
    assert result.pooled == pytest.approx(right / total)
    assert fitted.history[-1]["accuracy"] == pytest.approx(right / total)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_training_losses_are_means_over_each_clients_data(mix: str) -> None:
    population = Population(make_net(), k=2, mix=mix)
    fitted = fit(population, FEDERATION, PPFL(), rounds=2)
    losses = client_losses(fitted.problem, fitted.personal, FEDERATION)
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["train"]
        alone = population.losses_one(fitted.personal.shared, fitted.membership(client), own.x, own.y).mean()
        torch.testing.assert_close(losses[i], alone.double(), rtol=1e-5, atol=1e-6)


def test_worst_tenth_is_the_mean_of_the_worst() -> None:
    score = torch.linspace(0, 1, 30)
    result = Evaluation(score, score.flip(0), torch.ones(30))
    assert result.worst_tenth() == pytest.approx(float(score[:3].mean()))
    assert result.worst_tenth(higher_is_better=False) == pytest.approx(float(score[-3:].mean()))


def test_clients_without_test_samples_do_not_count() -> None:
    result = Evaluation(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0]), torch.tensor([4.0, 0.0]))
    assert result.pooled == 0.5
    assert result.mean == 0.5


def test_errors_say_what_to_do() -> None:
    federation = make_federation()
    fitted = fit(Population(make_net(), k=2), federation, rounds=1)
    with pytest.raises(DataError, match="holdout"):
        fitted.evaluate(federation)
    with pytest.raises(SettingError, match="ids look like 'client-0'"):
        fitted.membership("nobody")
    with pytest.raises(SettingError, match="at least one round"):
        fit(Population(make_net(), k=2), federation, rounds=0)
    with pytest.raises(SettingError, match="'loop', 'stacked'"):
        fit(Population(make_net(), k=2), federation, rounds=1, engine="cluster")
    with pytest.raises(SettingError, match="every >= 1"):
        Watch(every=0)
