"""Metrics of predictions: per client on its own, together at a site, and combined over sites."""

import math

import pytest
import torch
import torchmetrics
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import BytesTransport
from ppfl import Federation, Population, Watch, fit
from ppfl.algorithms import PPFL, FedAvg
from ppfl.core import ModelError, SettingError
from ppfl.server import InProcess, begin, evaluate, make_problem
from ppfl.sites import PredictionMetric, Site, as_metrics


def f1(prediction, target):
    """Of class 1 against all others, plainly."""
    found, true = prediction.argmax(-1) == 1, target == 1
    both = 2 * (found & true).sum() / (found.sum() + true.sum())
    return both if found.any() or true.any() else math.nan


def largest_error(prediction, target):
    return (prediction.argmax(-1) - target).abs().max()


WRONG = PredictionMetric(largest_error, higher_is_better=False)
TORCHMETRICS = torchmetrics.classification.MulticlassF1Score(3, average="macro")


@pytest.fixture(scope="module")
def federation():
    return make_federation((30, 40, 21, 33) * 3, test_fraction=0.4)


@pytest.fixture(scope="module")
def fitted(federation):
    watch = Watch(metrics={"f1": f1, "wrong": WRONG, "macro": TORCHMETRICS})
    return fit(Population(make_net(), k=2), federation, PPFL(lr=0.3, batch_size=8), rounds=2, watch=watch)


def by_hand(fitted, federation, metric):
    test = {c: federation.client(c)["test"] for c in federation.ids}
    predictions = {c: fitted.predict(c, part.x) for c, part in test.items()}
    values = torch.tensor([float(metric(predictions[c], test[c].y)) for c in test])
    pooled = metric(torch.cat(list(predictions.values())), torch.cat([part.y for part in test.values()]))
    return values[values.isfinite()].sort().values, float(pooled)


@pytest.mark.parametrize(("name", "metric", "higher"), [("f1", f1, True), ("wrong", largest_error, False)])
def test_the_record_has_the_pooled_metric_its_mean_and_its_worst_tenth(fitted, federation, name, metric, higher):
    values, pooled = by_hand(fitted, federation, metric)
    record = fitted.history[-1]
    assert record[name] == pytest.approx(pooled)
    assert record[f"{name}_mean"] == pytest.approx(float(values.mean()))
    assert record[f"{name}_sd"] == pytest.approx(float(values.std(correction=0)), abs=1e-6)
    worst = values if higher else values.flip(0)
    assert record[f"{name}_worst_tenth"] == pytest.approx(float(worst[: max(1, len(values) // 10)].mean()))


def test_torchmetrics_objects_give_what_they_give_alone(fitted, federation):
    def plainly(prediction, target):
        fresh = torchmetrics.classification.MulticlassF1Score(3, average="macro")
        return fresh(prediction, target)

    values, pooled = by_hand(fitted, federation, plainly)
    assert fitted.history[-1]["macro"] == pytest.approx(pooled)
    assert fitted.history[-1]["macro_mean"] == pytest.approx(float(values.mean()))
    found = fitted.evaluate(federation, metrics=[TORCHMETRICS]).metrics["MulticlassF1Score"]
    assert found.pooled == pytest.approx(pooled)
    assert found.values.shape == (federation.n_clients,)
    assert TORCHMETRICS.update_count == 0  # the user's own object is not touched


def test_sums_and_several_sites(fitted, federation):
    """Without rows the worst tenth comes from a histogram; pooled over sites is the mean weighted by samples."""
    metrics = as_metrics({"f1": f1})
    parts = [federation.select(federation.ids[at::2]) for at in range(2)]
    population = Population(make_net(), k=1)

    def found(*federations, kind=BytesTransport):
        sites = [
            Site(part, population, fitted.engine, name=f"site-{at}", metrics=metrics)
            for at, part in enumerate(federations)
        ]
        transport = kind(*sites, order=federation.ids)
        method = FedAvg(lr=0.1)
        problem = make_problem(population, transport, None, rounds=1, seed=0)
        state = begin(method, problem, transport)
        return evaluate(method, problem, transport, state.server, per_client=False, metrics=metrics).splits["test"]

    together, apart = found(federation, kind=InProcess).metrics["f1"], found(*parts).metrics["f1"]
    each = [found(part, kind=lambda site, order: InProcess(site)).metrics["f1"].pooled for part in parts]
    sizes = [len(part.test) for part in parts]
    assert apart.pooled == pytest.approx((each[0] * sizes[0] + each[1] * sizes[1]) / sum(sizes))
    assert apart.values is None
    assert apart.mean == pytest.approx(together.mean)
    assert apart.worst_tenth == pytest.approx(together.worst_tenth)


def test_a_metric_of_sequences_sees_no_padding():
    y = torch.tensor([[0, 1, -100], [1, -100, -100], [1, 0, 1], [0, -100, -100]])
    net = nn.Sequential(nn.Linear(2, 6), nn.Unflatten(1, (3, 2)))
    federation = Federation.from_arrays(torch.randn(4, 2), y, ["a", "a", "b", "b"], test_fraction=0)
    fitted = fit(Population(net, k=1), federation, FedAvg(lr=0.1), rounds=1)
    seen = []

    def look(prediction, target):
        seen.append((tuple(prediction.shape), target.tolist()))
        return 0.0

    fitted.evaluate(federation, "train", metrics={"look": look})
    assert seen == [((3, 2), [0, 1, 1]), ((4, 2), [1, 0, 1, 0]), ((7, 2), [0, 1, 1, 1, 0, 1, 0])]


def test_a_client_where_a_metric_is_not_defined_is_left_out(fitted, federation):
    def only_large(prediction, target):
        return math.nan if len(target) < 13 else 2.0

    found = fitted.evaluate(federation, metrics=[only_large]).metrics["only_large"]
    assert (found.mean, found.worst_tenth, found.sd) == (2.0, 2.0, 0.0)
    nowhere = fitted.evaluate(federation, metrics={"no": lambda p, y: math.nan}).metrics["no"]
    assert math.isnan(nowhere.mean)
    assert math.isnan(nowhere.worst_tenth)


def test_what_cannot_be_a_metric_is_refused(fitted, federation):
    with pytest.raises(SettingError, match="give a function"):
        Watch(metrics={"f1": 3})
    with pytest.raises(SettingError, match="give an object"):
        Watch(metrics=[torchmetrics.classification.BinaryAUROC])
    with pytest.raises(SettingError, match="name of its own"):
        Watch(metrics=[f1, f1])
    with pytest.raises(SettingError, match="dict of functions"):
        Watch(metrics="f1")
    with pytest.raises(ModelError, match="'broken' failed on predictions.*return nan"):
        fitted.evaluate(federation, metrics={"broken": lambda prediction, target: prediction @ target})
    with pytest.raises(SettingError, match="'accuracy', as the loss's own"):
        fit(Population(make_net(), k=1), federation, FedAvg(lr=0.1), rounds=1, watch=Watch(metrics={"accuracy": f1}))
