"""Scores as sums over clients say what the clients' own scores say; metrics of predictions do so too."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kit.networks import Recurrent, make_linear, make_net
from kit.problems import make_federation
from kit.refusals import ModelError, SettingError, assert_refused
from kit.training import BytesTransport, Recording, connect, luck, run
from ppfl import Federation, Population, Watch, fit
from ppfl.algorithms import PPFL, FedAvg, FineTune, Local
from ppfl.core import LOSSES
from ppfl.data import Samples
from ppfl.server import Evaluation, begin, evaluate, make_problem, train_and_measure
from ppfl.sites import Evaluate, PredictionMetric, Train, as_metrics
from ppfl.sites.evaluation import ClientScores, score_sums
from ppfl.sites.histogram import BINS


def score_rows(score, samples, loss=None) -> ClientScores:
    score = torch.as_tensor(score, dtype=torch.float64)
    loss = score if loss is None else torch.as_tensor(loss, dtype=torch.float64)
    return ClientScores(loss, score, torch.as_tensor(samples).double())


def sums_of(found: ClientScores) -> dict[str, torch.Tensor]:
    return score_sums(found, found.samples, LOSSES["squared"])


def width_of_bin(score: float) -> float:
    """How far apart two scores in the bin of this one can be."""
    return 1 / (BINS // 2 - 1) if score <= 1 else score * (2**0.25 - 1)


CLIENTS = st.lists(st.tuples(st.floats(0, 1) | st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=40).filter(
    lambda clients: any(samples for _, samples in clients)
)


@given(CLIENTS)
def test_sums_say_what_rows_say(clients) -> None:
    """Clients without samples do not count, and the sums of two sites are those of all their clients."""
    found = score_rows(*zip(*clients, strict=True))
    rows = Evaluation(sums_of(found), *found)
    first, second = (sums_of(ClientScores(*(leaf[part] for leaf in found))) for part in (slice(2), slice(2, None)))
    sums = Evaluation({name: value + second[name] for name, value in first.items()}, None, None, None)
    score, n = found.score[found.samples > 0], found.samples[found.samples > 0]
    assert sums.pooled == pytest.approx(float((score * n).sum() / n.sum()), rel=1e-9, abs=1e-12)
    assert sums.mean == pytest.approx(float(score.mean()), rel=1e-9, abs=1e-12)
    metric = score.sqrt()  # squared error becomes its root
    # below 1e-150 squares are no longer numbers of full precision
    near = max(1e-150, 1e-5 * float(metric.max()))
    assert sums.metric_sd() == pytest.approx(float(metric.std(correction=0)), rel=1e-5, abs=near)
    for higher_is_better in (True, False):
        worst = score.sort(descending=not higher_is_better).values[: max(1, len(score) // 10)]
        exact = rows.worst_tenth(higher_is_better)
        assert exact == pytest.approx(float(worst.mean()))
        near = width_of_bin(float(worst[-1]))
        assert sums.worst_tenth(higher_is_better) == pytest.approx(exact, rel=1e-9, abs=near)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_client_whose_loss_is_not_finite_is_counted_and_does_not_poison_the_sums(bad: float) -> None:
    others = sums_of(score_rows([0.5, 1.0], [4, 6], [0.1, 0.3]))
    assert float(others.pop("not_finite")) == 0
    for loss, score in (([0.1, bad, 0.3], [0.5, 0.25, 1.0]), ([0.1, 0.4, 0.3], [0.5, bad, 1.0])):
        found = sums_of(score_rows(score, [4, 5, 6], loss))
        assert float(found.pop("not_finite")) == 1
        assert all(found[name].equal(value) for name, value in others.items())


# ---------------------------------------------------------------------- through sites and a server

SIZES = (17, 12, 30, 9, 14)
FEDERATION = make_federation(SIZES, test_fraction=0.3)


def lacking_test_samples() -> Federation:
    """Some clients have no test samples."""
    lengths = (5, 0, 8, 0, 3)
    parts = [FEDERATION.test.client(at) for at in range(len(SIZES))]
    x, y = (torch.cat([getattr(part, name)[:n] for part, n in zip(parts, lengths, strict=True)]) for name in "xy")
    return replace(FEDERATION, test=Samples(x, y, torch.tensor([0, *lengths]).cumsum(0)))


def evaluated(ended, splits=("test",), **settings):
    return evaluate(ended.method, ended.problem, ended.transport, ended.server, splits, **settings)


@pytest.mark.parametrize("method", [FedAvg(lr=0.3), Local(lr=0.3), PPFL(lr=0.3)])
def test_a_server_that_sees_sums_alone_reads_the_same_scores(method) -> None:
    population, federation = Population(make_net(), k=2 if method.name == "ppfl" else 1), lacking_test_samples()
    ended = run(method, population, federation, rounds=2, kind=BytesTransport, sites=2)
    rows, sums = (evaluated(ended, ("test", "train"), per_client=per_client) for per_client in (True, False))
    assert sums.memberships is None and (rows.memberships is not None) == (method.name == "ppfl")
    for split, size in (("test", torch.tensor([5.0, 0, 8, 0, 3])), ("train", federation.train.sizes)):
        one, other = rows.splits[split], sums.splits[split]
        assert other.score is other.loss is other.samples is None
        assert one.samples.tolist() == pytest.approx(size.tolist())
        assert one.pooled == pytest.approx(float((one.score * size).sum() / size.sum()))
        assert one.mean == pytest.approx(float(one.score[size > 0].mean()))
        assert one.worst_tenth() == pytest.approx(other.worst_tenth(), abs=width_of_bin(1.0))
        for name in ("pooled", "pooled_loss", "weighted_loss", "mean"):
            assert getattr(one, name) == pytest.approx(getattr(other, name)), name


def replies_and_ends(watch: Watch):
    federation = make_federation(SIZES, test_fraction=0.3, validation_fraction=0.2)
    method, population = PPFL(lr=0.3, share_memberships=False), Population(make_net(), k=2)
    transport = connect(federation, population, kind=Recording, sites=2)
    problem = make_problem(population, transport, rounds=3, seed=0)
    ends = list(train_and_measure(method, problem, transport, watch, begin(method, problem, transport)))
    return transport.log, ends


@pytest.mark.parametrize("more", [{}, {"objective": True, "stationarity": True, "output": "best"}])
def test_without_reports_of_clients_no_reply_has_rows(more: dict) -> None:
    log, ends = replies_and_ends(Watch(report_clients=False, **more))
    assert {type(request) for request, _ in log} >= {Train, Evaluate}
    assert all(reply.rows.values == {} for _, reply in log)
    assert not any("per_client" in name for end in ends for name in end.record)
    assert all(end.measured.memberships is None for end in ends)
    assert all(0 <= end.record["accuracy_worst_tenth"] <= end.record["accuracy_mean"] for end in ends)
    reported, _ = replies_and_ends(Watch())
    assert any(reply.rows.values for request, reply in reported if isinstance(request, Evaluate))


def test_evaluation_by_the_max_rule_is_that_of_the_largest_memberships() -> None:
    ended = run(PPFL(lr=0.3), Population(make_linear(), k=3, mix="predictions"), FEDERATION, rounds=3)
    hard, (models, memberships) = evaluated(ended, hard=True).splits["test"], ended.models()
    for at, client in enumerate(FEDERATION.ids):
        own, best = FEDERATION.client(client)["test"], int(memberships[at].argmax())
        prediction = own.x @ models["weight"][best].T + models["bias"][best]
        assert float(hard.score[at]) == pytest.approx(float((prediction.argmax(1) == own.y).double().mean()))


@pytest.mark.parametrize("lost", [("client-0",), ("client-1", "client-3")])  # the first, or all of the second site
def test_memberships_are_not_reported_once_some_clients_have_models_of_their_own(lost) -> None:
    """Some clients are lost in the round in which all others fine-tune, so they still are mixtures."""

    class Losing(FineTune):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            others = tuple(client for client in problem.roster.ids if client not in lost)
            return plan._replace(who=others) if round == problem.rounds - 1 else plan

    method = Losing(method=PPFL(lr=0.3, batch_size=4))
    found = evaluated(run(method, Population(make_linear(), k=2), FEDERATION, rounds=3, sites=2))
    assert found.memberships is None and bool((found.splits["test"].samples > 0).all())


SEEN: list[int] = []  # samples that run through the network below, in each call


class CountsSamples(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("k", [1, 2])
def test_networks_that_run_one_client_at_a_time_run_no_padding(k: int) -> None:
    sizes = (1, 40, 7, 3)
    population = Population(CountsSamples(), k=k, mix="weights", canonical="out")
    ended = run(FedAvg(lr=0.1) if k == 1 else PPFL(lr=0.1), population, make_federation(sizes), rounds=1)
    SEEN.clear()
    found = evaluated(ended, ("train",)).splits["train"]
    assert sum(SEEN) == sum(sizes) and found.samples.tolist() == pytest.approx(list(sizes))


def test_a_share_of_the_clients_is_evaluated_the_same_ones_every_time_and_without_rows() -> None:
    federation = make_federation((5,) * 60, test_fraction=0.4)
    ended = run(PPFL(lr=0.3, participation=0.5), Population(make_net(), k=2), federation, rounds=1)
    whole, some, again = (evaluated(ended, share=share) for share in (1.0, 0.4, 0.4))
    rows, found = whole.splits["test"], some.splits["test"]
    drawn = luck(ended.problem.seed, "evaluated", federation.ids) < 0.4
    assert some.memberships is None and found.score is None and 0 < int(drawn.sum()) < 60
    assert float(found.sums["clients"]) == int(drawn.sum())
    assert float(found.sums["samples"]) == pytest.approx(float(rows.samples[drawn].sum()))
    assert found.mean == pytest.approx(float(rows.score[drawn].mean()))
    assert all(again.splits["test"].sums[name].equal(value) for name, value in found.sums.items())


# ---------------------------------------------------------------------- metrics of predictions


def f1(prediction, target):
    """Of class 1 against all others, plainly."""
    found, true = prediction.argmax(-1) == 1, target == 1
    both = 2 * (found & true).sum() / (found.sum() + true.sum())
    return both if found.any() or true.any() else math.nan


def largest_error(prediction, target):
    return (prediction.argmax(-1) - target).abs().max()


def macro(prediction, target):
    return torchmetrics.classification.MulticlassF1Score(3, average="macro")(prediction, target)


MACRO = torchmetrics.classification.MulticlassF1Score(3, average="macro")
METRICS = {"f1": f1, "wrong": PredictionMetric(largest_error, higher_is_better=False), "macro": MACRO}
POOL = make_federation((30, 40, 21, 33) * 3, test_fraction=0.4)


@cache
def fitted():
    method, watch = PPFL(lr=0.3, batch_size=8), Watch(metrics=METRICS)
    return fit(Population(make_net(), k=2), POOL, method, rounds=2, watch=watch)


@pytest.mark.parametrize(("name", "metric"), [("f1", f1), ("wrong", largest_error), ("macro", macro)])
def test_the_record_has_the_pooled_metric_its_mean_and_its_worst_tenth(name: str, metric) -> None:
    """Functions and objects of torchmetrics give what they give by hand."""
    test = {client: POOL.client(client)["test"] for client in POOL.ids}
    predictions = {client: fitted().predict(client, part.x) for client, part in test.items()}
    values = torch.tensor([float(metric(predictions[client], part.y)) for client, part in test.items()])
    values = values[values.isfinite()].sort(descending=name == "wrong").values
    everything = torch.cat(list(predictions.values())), torch.cat([part.y for part in test.values()])
    record = fitted().history[-1]
    assert record[name] == pytest.approx(float(metric(*everything)))
    assert record[f"{name}_mean"] == pytest.approx(float(values.mean()))
    assert record[f"{name}_sd"] == pytest.approx(float(values.std(correction=0)), abs=1e-6)
    assert record[f"{name}_worst_tenth"] == pytest.approx(float(values[: max(1, len(values) // 10)].mean()))


def test_a_list_of_metrics_is_named_after_them_and_objects_are_not_touched() -> None:
    found = fitted().evaluate(POOL, metrics=[MACRO]).metrics["MulticlassF1Score"]
    assert found.pooled == pytest.approx(fitted().history[-1]["macro"])
    assert found.values.shape == (POOL.n_clients,) and MACRO.update_count == 0


def test_a_metric_over_several_sites_is_weighted_by_their_samples() -> None:
    """Without rows the worst tenth comes from a histogram."""
    metrics, population, method = as_metrics({"f1": f1}), Population(make_net(), k=1), FedAvg(lr=0.1)

    def found(federation, sites: int = 1):
        transport = connect(federation, population, kind=BytesTransport, sites=sites, metrics=metrics)
        problem = make_problem(population, transport, rounds=1)
        server = begin(method, problem, transport).server
        scores = evaluate(method, problem, transport, server, per_client=False, metrics=metrics)
        return scores.splits["test"].metrics["f1"]

    parts = [POOL.select(POOL.ids[at::2]) for at in range(2)]
    together, apart, each = found(POOL), found(POOL, sites=2), [found(part).pooled for part in parts]
    sizes = [len(part.test) for part in parts]
    assert apart.pooled == pytest.approx((each[0] * sizes[0] + each[1] * sizes[1]) / sum(sizes))
    assert apart.values is None
    assert (apart.mean, apart.worst_tenth) == pytest.approx((together.mean, together.worst_tenth))


def test_a_metric_of_sequences_sees_no_padding() -> None:
    y = torch.tensor([[0, 1, -100], [1, -100, -100], [1, 0, 1], [0, -100, -100]])
    net = nn.Sequential(nn.Linear(2, 6), nn.Unflatten(1, (3, 2)))
    federation = Federation.from_arrays(torch.arange(8.0).view(4, 2), y, ["a", "a", "b", "b"], test_fraction=0)
    seen = []

    def look(prediction, target):
        seen.append((tuple(prediction.shape), target.tolist()))
        return 0.0

    fit(Population(net, k=1), federation, FedAvg(lr=0.1), rounds=1).evaluate(federation, "train", metrics=[look])
    assert seen == [((3, 2), [0, 1, 1]), ((4, 2), [1, 0, 1, 0]), ((7, 2), [0, 1, 1, 1, 0, 1, 0])]


def test_a_client_where_a_metric_is_not_defined_is_left_out() -> None:
    metrics = {"only_large": lambda p, y: math.nan if len(y) < 13 else 2.0, "nowhere": lambda p, y: math.nan}
    found = fitted().evaluate(POOL, metrics=metrics).metrics
    assert (found["only_large"].mean, found["only_large"].worst_tenth, found["only_large"].sd) == (2.0, 2.0, 0.0)
    assert math.isnan(found["nowhere"].mean) and math.isnan(found["nowhere"].worst_tenth)


def fit_with(metrics):
    return fit(Population(make_net(), k=1), POOL, FedAvg(lr=0.1), rounds=1, watch=Watch(metrics=metrics))


REFUSED = {
    "a number": (lambda: Watch(metrics={"f1": 3}), SettingError, "give a function"),
    "a class": (lambda: Watch(metrics=[torchmetrics.classification.BinaryAUROC]), SettingError, "give an object"),
    "one name twice": (lambda: Watch(metrics=[f1, f1]), SettingError, "'f1'", "name of its own"),
    "a text": (lambda: Watch(metrics="f1"), SettingError, "dict of functions"),
    "a name of the loss": (lambda: fit_with({"accuracy": f1}), SettingError, "'accuracy'", "another name"),
    "one that fails": (lambda: fit_with({"broken": lambda p, y: p @ y}), ModelError, "'broken'", "return nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_metric_is_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
