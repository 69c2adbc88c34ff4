"""Scores as sums over clients say what the clients' own scores say; metrics of predictions do so too."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torchmetrics.classification import MulticlassF1Score

from kit.networks import make_linear, make_net
from kit.problems import make_federation
from kit.refusals import ModelError, SettingError, assert_refused
from kit.training import BytesTransport, Recording, connect, luck, run
from ppfl import Federation, Population, Watch, fit
from ppfl.algorithms import PPFL, FedAvg, FineTune, Local
from ppfl.core import LOSSES
from ppfl.data import Samples
from ppfl.server import Scores, Training, begin, evaluate, make_problem
from ppfl.sites import Evaluate, PredictionMetric, Train, as_metrics
from ppfl.sites.evaluation import BINS, SplitScores


def sums_of(values, samples) -> dict[str, torch.Tensor]:
    """Sums over clients, of their squared errors and numbers of samples."""
    values, samples = (torch.as_tensor(row, dtype=torch.float64) for row in (values, samples))
    found = SplitScores({"score": values}, samples, {}).sums(samples, LOSSES["squared"])
    return {name.removeprefix("score."): value for name, value in found.items()}


@given(st.lists(st.tuples(st.floats(0, 1) | st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=40))
def test_sums_say_what_rows_say(clients):
    """Clients without samples do not count, and the sums of two sites are those of all their clients."""
    score, n = torch.tensor(clients, dtype=torch.float64).T
    assume(bool(n.any()))
    score[n == 0] = math.nan
    first, second = (sums_of(score[part], n[part]) for part in (slice(2), slice(2, None)))
    sums = Scores({name: value + second[name] for name, value in first.items()}, None)
    rows = Scores(sums_of(score, n), score)
    score, n = score[n > 0], n[n > 0]
    assert sums.pooled == pytest.approx(float((score * n).sum() / n.sum()), rel=1e-9, abs=1e-12)
    assert sums.mean == pytest.approx(float(score.mean()), rel=1e-9, abs=1e-12)
    assert sums.weighted == pytest.approx(sums.pooled)  # importance is the number of samples here
    metric = score.sqrt()  # squared error becomes its root
    near = max(1e-150, 1e-5 * float(metric.max()))  # smaller squares lose precision
    assert sums.sd == pytest.approx(float(metric.std(correction=0)), rel=1e-5, abs=near)
    for higher_is_better in (True, False):
        worst = score.sort(descending=not higher_is_better).values[: max(1, len(score) // 10)]
        by_rows, by_sums = (one._replace(higher_is_better=higher_is_better) for one in (rows, sums))
        exact, last = by_rows.worst_tenth, float(worst[-1])
        assert exact == pytest.approx(float(worst.mean()))
        bin_width = 1 / (BINS // 2 - 1) if last <= 1 else last * (2**0.25 - 1)
        assert by_sums.worst_tenth == pytest.approx(exact, rel=1e-9, abs=bin_width)


def test_a_client_whose_loss_is_not_finite_is_counted_and_does_not_poison_the_sums():
    others = sums_of([0.1, 0.3], [4, 6])
    assert float(others.pop("not_finite")) == 0
    for loss in (math.nan, math.inf):
        found = sums_of([0.1, loss, 0.3, math.nan], [4, 5, 6, 0])
        assert float(found.pop("not_finite")) == 1  # who has no samples is not counted
        assert all(found[name].equal(value) for name, value in others.items())


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_a_client_whose_loss_is_not_finite_has_no_score():
    """Its accuracy would be one of outputs that are not finite."""
    x = FEDERATION.test.x.clone()
    x[0] = torch.finfo(x.dtype).max  # of the first client; outputs overflow
    population = Population(nn.Sequential(make_linear(), Times(1e3)), k=1)
    federations = replace(FEDERATION, test=replace(FEDERATION.test, x=x)), FEDERATION
    runs = [run(FedAvg(lr=1e-6), population, federation, rounds=1) for federation in federations]
    spoilt, found = (evaluated(ended).splits["test"] for ended in runs)
    for name in ("loss", "score"):
        one, other = getattr(spoilt, name), getattr(found, name)
        assert math.isnan(one.values[0]) and one.values[1:].equal(other.values[1:])
        assert one.sums["not_finite"] == 1 and one.mean == pytest.approx(float(other.values[1:].mean()))


FEDERATION = make_federation((17, 12, 30, 9, 14), test_fraction=0.3)


def evaluated(ended, splits=("test",), **settings):
    return evaluate(ended.method, ended.problem, ended.transport, ended.server, splits, **settings)


@pytest.mark.parametrize("method", [FedAvg(lr=0.3), Local(lr=0.3), PPFL(lr=0.3)])
def test_a_server_that_sees_sums_alone_reads_the_same_scores(method):
    """Also where some clients have no test samples."""
    lengths = torch.tensor([5, 0, 8, 0, 3])
    parts = [(FEDERATION.test.client(at), n) for at, n in enumerate(lengths)]
    x, y = (torch.cat([getattr(part, name)[:n] for part, n in parts]) for name in "xy")
    federation = replace(FEDERATION, test=Samples(x, y, torch.tensor([0, *lengths]).cumsum(0)))
    population = Population(make_net(), k=2 if method.name == "ppfl" else 1)
    ended = run(method, population, federation, rounds=2, kind=BytesTransport, sites=2)
    rows, sums = (evaluated(ended, ("test", "train"), per_client=per_client) for per_client in (True, False))
    assert sums.memberships is None and (rows.memberships is not None) == (method.name == "ppfl")
    for split, size in (("test", lengths), ("train", federation.train.sizes)):
        one, other = rows.splits[split], sums.splits[split]
        for name in ("loss", "score"):
            by_rows, by_sums = getattr(one, name), getattr(other, name)
            assert by_sums.values is None and by_rows.values.isfinite().equal(size > 0)
            for figure in ("pooled", "weighted", "mean", "sd"):
                assert getattr(by_rows, figure) == pytest.approx(getattr(by_sums, figure)), (name, figure)


def test_without_reports_of_clients_no_reply_has_rows():
    federation = make_federation(test_fraction=0.3, validation_fraction=0.2)
    method, population = PPFL(lr=0.3, share_memberships=False), Population(make_net(), k=2)

    def replies_and_ends(watch):
        transport = connect(federation, population, kind=Recording, sites=2)
        ends = list(Training(transport, population, method, rounds=3, watch=watch).begin().rounds())
        return transport.log, ends

    for more in ({}, {"objective": True, "stationarity": True, "output": "best"}):
        log, ends = replies_and_ends(Watch(report_clients=False, **more))
        assert {type(request) for request, _ in log} >= {Train, Evaluate}
        assert all(reply.rows.values == {} for _, reply in log)
        assert not any("per_client" in name for end in ends for name in end.record)
        assert all(end.measured.memberships is None for end in ends)
        assert all(0 <= end.record["accuracy_worst_tenth"] <= end.record["accuracy_mean"] for end in ends)
    reported, _ = replies_and_ends(Watch())
    assert any(reply.rows.values for request, reply in reported if isinstance(request, Evaluate))


@pytest.mark.parametrize("lost", [("client-0",), ("client-1", "client-3")])  # the first, or all of the second site
def test_memberships_are_not_reported_once_some_clients_have_models_of_their_own(lost):
    """Some clients are lost in the round in which all others fine-tune, so they still are mixtures."""

    class Losing(FineTune):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            others = tuple(client for client in problem.roster.ids if client not in lost)
            return plan._replace(who=others) if round == problem.rounds - 1 else plan

    method = Losing(method=PPFL(lr=0.3, batch_size=4))
    found = evaluated(run(method, Population(make_linear(), k=2), FEDERATION, rounds=3, sites=2))
    assert found.memberships is None and bool(found.splits["test"].score.values.isfinite().all())


def test_a_share_of_the_clients_is_evaluated_the_same_ones_every_time_and_without_rows():
    federation = make_federation((5,) * 60, test_fraction=0.4)
    ended = run(PPFL(lr=0.3, participation=0.5), Population(make_net(), k=2), federation, rounds=1)
    whole, some, again = (evaluated(ended, share=share) for share in (1.0, 0.4, 0.4))
    rows, found = whole.splits["test"].score, some.splits["test"].score
    drawn = luck(ended.problem.seed, "evaluated", federation.ids) < 0.4
    assert some.memberships is None and found.values is None and 0 < int(drawn.sum()) < 60
    assert float(found.sums["clients"]) == int(drawn.sum())
    assert found.mean == pytest.approx(float(rows.values[drawn].mean()))
    assert all(again.splits["test"].score.sums[name].equal(value) for name, value in found.sums.items())


def test_sites_of_which_no_client_is_drawn_add_nothing():
    ended = run(FedAvg(lr=0.3), Population(make_net(), k=1), FEDERATION, rounds=1, sites=5)
    drawn = luck(ended.problem.seed, "evaluated", FEDERATION.ids)
    share = float(drawn.median())
    whole, some = (evaluated(ended, share=each).splits["test"].score for each in (1.0, share))
    assert some.values is None and some.mean == pytest.approx(float(whole.values[drawn < share].mean()))


def f1(prediction, target):
    found, true = prediction.argmax(-1) == 1, target == 1  # against all other classes
    return 2 * (found & true).sum() / (found.sum() + true.sum())  # nan where there is neither


MACRO = MulticlassF1Score(3, average="macro")
BY_HAND = {
    "f1": f1,
    "largest_error": lambda prediction, target: (prediction.argmax(-1) - target).abs().max(),
    "macro": lambda *pair: MulticlassF1Score(3, average="macro")(*pair),
}
LOWER = PredictionMetric(BY_HAND["largest_error"], higher_is_better=False)
METRICS = {"f1": f1, "largest_error": LOWER, "macro": MACRO}
POOL = make_federation((30, 40, 21, 33) * 3, test_fraction=0.4)


@cache
def fitted():
    method, watch = PPFL(lr=0.3, batch_size=8), Watch(metrics=METRICS)
    return fit(Population(make_net(), k=2), POOL, method, rounds=2, watch=watch)


def evaluated_by(metrics):
    return fitted().evaluate(POOL, metrics=metrics).metrics


@pytest.mark.parametrize("name", METRICS)
def test_the_record_has_the_pooled_metric_its_mean_and_its_worst_tenth(name):
    """Functions and objects of torchmetrics give what they give by hand, and objects are not touched."""
    tests = [POOL.client(client)["test"] for client in POOL.ids]
    predictions = [fitted().predict(client, part.x) for client, part in zip(POOL.ids, tests, strict=True)]
    targets, metric, record = [part.y for part in tests], BY_HAND[name], fitted().history[-1]
    values = torch.tensor([float(metric(*pair)) for pair in zip(predictions, targets, strict=True)])
    values = values[values.isfinite()].sort(descending=name == "largest_error").values
    assert record[name] == pytest.approx(float(metric(torch.cat(predictions), torch.cat(targets))))
    assert record[f"{name}_mean"] == pytest.approx(float(values.mean()))
    assert record[f"{name}_sd"] == pytest.approx(float(values.std(correction=0)), abs=1e-6)
    assert record[f"{name}_worst_tenth"] == pytest.approx(float(values[: max(1, len(values) // 10)].mean()))
    assert MACRO.update_count == 0


def test_the_objective_of_a_method_without_a_penalty_is_the_training_loss_of_its_clients():
    found = fit(Population(make_net(), k=1), POOL, FedAvg(lr=0.1), rounds=1, watch=Watch(objective=True))
    assert found.history[-1]["objective"] == pytest.approx(found.evaluate(POOL, "train").loss.weighted)


def test_a_metric_over_several_sites_is_weighted_by_their_samples():
    """Without rows the worst tenth comes from a histogram."""
    metrics, population, method = as_metrics({"f1": f1}), Population(make_net(), k=1), FedAvg(lr=0.1)

    def found(federation, sites=1):
        transport = connect(federation, population, kind=BytesTransport, sites=sites, metrics=metrics)
        problem = make_problem(population, transport, rounds=1)
        server = begin(method, problem, transport).server
        scores = evaluate(method, problem, transport, server, per_client=False, metrics=metrics)
        return scores.splits["test"].metrics["f1"]

    parts = [POOL.select(POOL.ids[at::2]) for at in range(2)]
    together, apart = found(POOL), found(POOL, sites=2)
    expected = sum(found(part).pooled * len(part.test) for part in parts) / len(POOL.test)
    assert apart.pooled == pytest.approx(expected) and apart.values is None
    assert (apart.mean, apart.worst_tenth) == pytest.approx((together.mean, together.worst_tenth))


def test_a_metric_of_sequences_sees_no_padding():
    y = torch.tensor([[0, 1, -100], [1, -100, -100], [1, 0, 1], [0, -100, -100]])
    net, seen = nn.Sequential(nn.Linear(2, 6), nn.Unflatten(1, (3, 2))), []
    federation = Federation.from_arrays(torch.arange(8.0).view(4, 2), y, ["a", "a", "b", "b"], test_fraction=0)

    def look(prediction, target):
        seen.append((tuple(prediction.shape), target.tolist()))
        return 0.0

    fit(Population(net, k=1), federation, FedAvg(lr=0.1), rounds=1).evaluate(federation, "train", metrics=[look])
    assert seen == [((3, 2), [0, 1, 1]), ((4, 2), [1, 0, 1, 0]), ((7, 2), [0, 1, 1, 1, 0, 1, 0])]


def test_a_client_where_a_metric_is_not_defined_is_left_out():
    metrics = {"only_large": lambda p, y: math.nan if len(y) < 13 else 2.0, "nowhere": lambda p, y: math.nan}
    found = evaluated_by(metrics)
    assert (found["only_large"].mean, found["only_large"].worst_tenth, found["only_large"].sd) == (2.0, 2.0, 0.0)
    assert math.isnan(found["nowhere"].mean) and math.isnan(found["nowhere"].worst_tenth)


def test_what_cannot_be_measured_is_refused():
    population, taken = Population(make_net(), k=1), Watch(metrics={"accuracy": f1})
    assert_refused(lambda: Watch(every=0), SettingError, "every is 0", "greater than 0")
    assert_refused(lambda: Watch(share=math.nan), SettingError, "share is nan")
    assert_refused(lambda: Watch(metrics={"f1": 3}), SettingError, "give a function")
    assert_refused(lambda: evaluated_by("f1"), SettingError, "metrics is 'f1'", "a dict")
    assert_refused(lambda: evaluated_by([MulticlassF1Score]), SettingError, "the class MulticlassF1Score")
    assert_refused(lambda: Watch(metrics=[f1, f1]), SettingError, "'f1'", "name of its own")
    assert_refused(lambda: fit(population, POOL, FedAvg(), rounds=1, watch=taken), SettingError, "'accuracy'")
    assert_refused(lambda: evaluated_by({"broken": lambda p, y: p @ y}), ModelError, "'broken'", "or nan")
