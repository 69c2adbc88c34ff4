"""Scores as sums over clients say what the clients' own scores say."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kit.problems import make_federation, make_linear, make_net
from kit.training import BytesTransport, connect, run
from ppfl.algorithms import PPFL, FedAvg, FineTune, Local
from ppfl.core.draws import name_keys, uniform
from ppfl.core.errors import SettingError
from ppfl.core.losses import LOSSES
from ppfl.core.population import Population
from ppfl.data import Federation, Samples
from ppfl.server import Evaluation, Watch, begin, evaluate, make_problem, train_and_measure
from ppfl.server.evaluation import summary
from ppfl.sites import Evaluate, Train
from ppfl.sites.evaluation import ClientScores, score_sums
from ppfl.sites.histogram import BINS, bin_of

NOT_FINITE = [float("nan"), float("inf")]


def scores(score, samples=None, loss=None) -> ClientScores:
    score = torch.as_tensor(score, dtype=torch.float64)
    samples = torch.ones(len(score)) if samples is None else torch.as_tensor(samples)
    return ClientScores(score if loss is None else torch.as_tensor(loss).double(), score, samples.double())


def from_rows(found: ClientScores, name: str = "squared") -> Evaluation:
    return Evaluation(score_sums(found, found.samples, LOSSES[name]), *found)


def from_sums(found: ClientScores, name: str = "squared") -> Evaluation:
    return from_rows(found, name)._replace(loss=None, score=None, samples=None)


def width_of_bin(score: float) -> float:
    """How far apart two scores in the bin of this one can be."""
    return 1 / (BINS // 2 - 1) if score <= 1 else score * (2**0.25 - 1)


CLIENTS = st.lists(st.tuples(st.floats(0, 1) | st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=40).filter(
    lambda clients: any(samples for _, samples in clients)
)


@given(CLIENTS)
def test_sums_say_what_rows_say(clients) -> None:
    found = scores(*zip(*clients, strict=True))
    sums = from_sums(found)
    here = found.samples > 0
    score, n = found.score[here], found.samples[here]
    assert sums.pooled == pytest.approx(float((score * n).sum() / n.sum()), rel=1e-9, abs=1e-12)
    assert sums.mean == pytest.approx(float(score.mean()), rel=1e-9, abs=1e-12)
    metric = score.sqrt()  # squared error becomes its root
    # below 1e-150 squares are no longer numbers of full precision
    near = max(1e-150, 1e-5 * float(metric.max()))
    assert sums.metric_sd() == pytest.approx(float(metric.std(correction=0)), rel=1e-5, abs=near)
    for higher_is_better in (True, False):
        last = score.sort(descending=not higher_is_better).values[max(1, len(score) // 10) - 1]  # of the worst tenth
        exact = from_rows(found).worst_tenth(higher_is_better)
        assert sums.worst_tenth(higher_is_better) == pytest.approx(exact, rel=1e-9, abs=width_of_bin(float(last)))


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=20))
def test_bins_grow_with_the_score(values) -> None:
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    bins = bin_of(ordered)
    assert bool((bins.diff() >= 0).all()) and int(bins.min()) >= 0 and int(bins.max()) < BINS


def test_the_worst_tenth_is_the_mean_of_the_worst() -> None:
    score = torch.linspace(0, 1, 30)
    found = from_rows(scores(score))
    assert found.worst_tenth() == pytest.approx(float(score[:3].mean()))
    assert found.worst_tenth(higher_is_better=False) == pytest.approx(float(score[-3:].mean()))


@pytest.mark.parametrize("evaluation", [from_rows, from_sums])
def test_clients_without_test_samples_do_not_count(evaluation) -> None:
    found = evaluation(scores([0.5, 0.0], samples=[4, 0]))
    assert found.pooled == found.mean == 0.5 and found.metric_sd() == 0
    assert found.worst_tenth() == pytest.approx(0.5, abs=width_of_bin(0.5))


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("part", ["loss", "score"])
def test_a_client_whose_loss_is_not_finite_is_counted_and_does_not_poison_the_sums(bad: float, part: str) -> None:
    loss, score = [0.1, 0.4, 0.3], [0.5, 0.25, 1.0]
    (loss if part == "loss" else score)[1] = bad
    found = score_sums(scores(score, [4, 5, 6], loss), torch.tensor([4.0, 5.0, 6.0]), LOSSES["squared"])
    others = score_sums(scores([0.5, 1.0], [4, 6], [0.1, 0.3]), torch.tensor([4.0, 6.0]), LOSSES["squared"])
    assert float(found.pop("not_finite")) == 1 and float(others.pop("not_finite")) == 0
    for name, value in others.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_the_sums_of_sites_are_the_sums_of_all_their_clients(cut: int) -> None:
    found = scores(torch.rand(5, generator=torch.Generator().manual_seed(0)), [3, 0, 4, 5, 9])
    halves = [ClientScores(*(leaf[part] for leaf in found)) for part in (slice(cut), slice(cut, None))]
    whole = score_sums(found, found.samples, LOSSES["squared"])
    for name, value in whole.items():
        parts = [score_sums(half, half.samples, LOSSES["squared"])[name] for half in halves]
        torch.testing.assert_close(sum(parts), value)


# ---------------------------------------------------------------------- through sites and a server

SIZES = (17, 12, 30, 9, 14)
LACKING = (5, 0, 8, 0, 3)  # test samples


def lacking_test_samples():
    """A federation in which some clients have no test samples."""
    federation = make_federation(SIZES, test_fraction=0.3)
    test = federation.test
    kept = [test.client(at) for at in range(len(SIZES))]
    parts = [(part.x[:n], part.y[:n]) for part, n in zip(kept, LACKING, strict=True)]
    offsets = torch.tensor([0, *(len(y) for _, y in parts)]).cumsum(0)
    return replace(federation, test=Samples(*(torch.cat(part) for part in zip(*parts, strict=True)), offsets))


@pytest.mark.parametrize("federation", [make_federation(SIZES, test_fraction=0.3), lacking_test_samples()])
@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("method", [FedAvg(lr=0.3), Local(lr=0.3), PPFL(lr=0.3)])
def test_a_server_that_sees_sums_alone_reads_the_same_scores(federation, method, sites: int) -> None:
    population = Population(make_net(), k=2 if method.name == "ppfl" else 1)
    ended = run(method, population, federation, rounds=2, kind=BytesTransport, sites=sites)
    asked = method, ended.problem, ended.transport, ended.server, ("test", "train")
    rows, sums = evaluate(*asked), evaluate(*asked, per_client=False)
    assert sums.memberships is None and (rows.memberships is not None) == (method.name == "ppfl")
    for split in ("test", "train"):
        one, other = rows.splits[split], sums.splits[split]
        assert other.score is other.loss is other.samples is None
        said = [summary(evaluation, split, population.loss) for evaluation in (one, other)]
        assert len(said[0].pop(next(name for name in said[0] if name.endswith("per_client")))) == len(SIZES)
        (worst,) = (name for name in said[0] if name.endswith("worst_tenth"))
        assert said[0].pop(worst) == pytest.approx(said[1].pop(worst), abs=width_of_bin(1.0))
        assert said[0] == pytest.approx(said[1])
        here = one.samples > 0
        assert one.pooled == pytest.approx(float((one.score * one.samples).sum() / one.samples.sum()))
        assert one.mean == pytest.approx(float(one.score[here].mean()))
        assert (one.samples > 0).tolist() == [n > 0 for n in federation.split(split).sizes.tolist()]


class Listening(BytesTransport):
    """Keeps every reply of a site, with its request."""

    def __init__(self, *sites, **settings) -> None:
        self.heard = []
        super().__init__(*sites, **settings)

    def deliver(self, site, requests):
        replies = super().deliver(site, requests)
        self.heard += zip(requests, replies, strict=True)
        return replies


def heard_replies(method, watch, k=2):
    federation = make_federation(SIZES, test_fraction=0.3, validation_fraction=0.2)
    population = Population(make_net(), k=k)
    transport = connect(federation, population, kind=Listening, sites=2)
    problem = make_problem(population, transport, rounds=3, seed=0)
    ends = list(train_and_measure(method, problem, transport, watch, begin(method, problem, transport)))
    return transport.heard, ends


@pytest.mark.parametrize(
    "watch",
    [Watch(report_clients=False), Watch(report_clients=False, objective=True, stationarity=True, output="best")],
)
def test_without_reports_of_clients_no_reply_has_rows(watch: Watch) -> None:
    heard, ends = heard_replies(PPFL(lr=0.3, share_memberships=False), watch)
    assert {type(request) for request, _ in heard} >= {Train, Evaluate}
    for _, reply in heard:
        assert reply.rows.values == {}
    assert not any("per_client" in name for end in ends for name in end.record)
    assert all(end.measured.memberships is None for end in ends)
    assert all(0 <= end.record["accuracy_worst_tenth"] <= end.record["accuracy_mean"] for end in ends)
    reported, _ = heard_replies(PPFL(lr=0.3, share_memberships=False), Watch())
    assert any(reply.rows.values for request, reply in reported if isinstance(request, Evaluate))


def test_evaluation_by_the_max_rule_is_that_of_the_largest_memberships() -> None:
    federation = make_federation(SIZES, test_fraction=0.3)
    method, population = PPFL(lr=0.3), Population(make_linear(), k=3, mix="predictions")
    ended = run(method, population, federation, rounds=3)
    hard = evaluate(method, ended.problem, ended.transport, ended.server, hard=True).splits["test"]
    models, memberships = ended.models()
    for at, client in enumerate(federation.ids):
        own, best = federation.client(client)["test"], int(memberships[at].argmax())
        prediction = own.x @ models["weight"][best].T + models["bias"][best]
        assert float(hard.score[at]) == pytest.approx(float((prediction.argmax(1) == own.y).double().mean()))


def test_a_client_whose_model_is_not_finite_is_left_out_of_the_figures_of_all() -> None:
    federation = make_federation(SIZES, test_fraction=0.3)
    population = Population(make_net(), k=1)
    method = Local(lr=0.3)
    ended = run(method, population, federation, rounds=1)
    for leaf in ended.transport.sites[0].sessions["main"].states._now.states.tree.values():
        leaf[1] = torch.nan
    found = evaluate(method, ended.problem, ended.transport, ended.server).splits["test"]
    assert float(found.sums["not_finite"]) == 1 and float(found.sums["clients"]) == len(SIZES) - 1
    others = [0, 2, 3, 4]
    expected = float((found.score * found.samples)[others].sum() / found.samples[others].sum())
    assert found.pooled == pytest.approx(expected)


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("lost", [("client-0",), ("client-1", "client-3")])  # the first, or all of the second site
def test_memberships_are_not_reported_once_some_clients_have_models_of_their_own(lost, sites: int) -> None:
    """Some clients are lost in the round in which all others fine-tune, so they still are mixtures."""
    federation = make_federation(SIZES, test_fraction=0.3)

    class Losing(FineTune):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            others = tuple(client for client in problem.roster.ids if client not in lost)
            return plan._replace(who=others) if round == problem.rounds - 1 else plan

    method = Losing(method=PPFL(lr=0.3, batch_size=4))
    ended = run(method, Population(make_linear(), k=2), federation, rounds=3, sites=sites)
    found = evaluate(method, ended.problem, ended.transport, ended.server)
    assert found.memberships is None and bool((found.splits["test"].samples > 0).all())


class CountsSamples(nn.LSTM):
    """Counts the samples that run through it."""

    seen: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor, hx: Any = None) -> Any:
        self.seen.append(len(x))
        return super().forward(x, hx)


class CountingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = CountsSamples(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x.reshape(len(x), 2, 2))[0][:, -1])


@pytest.mark.parametrize("k", [1, 2])
def test_networks_that_run_one_client_at_a_time_run_no_padding(k: int) -> None:
    sizes = (1, 40, 7, 3)
    x, clients = torch.randn(sum(sizes), 4), [f"c{i}" for i, size in enumerate(sizes) for _ in range(size)]
    federation = Federation.from_arrays(x, torch.arange(len(x)) % 3, clients, test_fraction=0)
    method = FedAvg(lr=0.1) if k == 1 else PPFL(lr=0.1)
    ended = run(method, Population(CountingNetwork(), k=k, mix="weights", canonical="out"), federation, rounds=1)
    CountsSamples.seen.clear()
    found = evaluate(method, ended.problem, ended.transport, ended.server, ("train",)).splits["train"]
    assert sum(CountsSamples.seen) == sum(sizes)
    assert found.samples.tolist() == list(map(float, sizes))


def test_a_share_of_the_clients_is_evaluated_the_same_ones_every_time_and_without_rows() -> None:
    federation = make_federation((5,) * 60, test_fraction=0.4)
    method, population = PPFL(lr=0.3, participation=0.5), Population(make_net(), k=2)
    ended = run(method, population, federation, rounds=1)
    setting = method, ended.problem, ended.transport, ended.server
    whole, some = evaluate(*setting).splits["test"], evaluate(*setting, share=0.4)
    drawn = uniform(ended.problem.seed, "evaluated", name_keys(federation.ids)) < 0.4
    sums, chosen = some.splits["test"].sums, whole.score[drawn]
    assert some.memberships is None and some.splits["test"].score is None and 0 < int(drawn.sum()) < 60
    assert float(sums["clients"]) == int(drawn.sum()) and float(sums["samples"]) == float(whole.samples[drawn].sum())
    assert some.splits["test"].mean == pytest.approx(float(chosen.mean()))
    expected = whole._replace(loss=None, score=None, samples=None)
    assert summary(evaluate(*setting, share=1.0, per_client=False).splits["test"], "test", population.loss) == summary(
        expected, "test", population.loss
    )
    again = evaluate(*setting, share=0.4).splits["test"].sums
    assert all(again[name].equal(value) for name, value in sums.items())


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_of_clients_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(SettingError, match="0 < share <= 1"):
        Watch(share=share)
