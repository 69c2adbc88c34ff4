"""Filters: an upload that would harm all others is refused by its client's name, and honest clients are not."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.cases import CASES
from kit.networks import make_net
from kit.problems import make_federation
from kit.refusals import SettingError, assert_refused
from kit.training import Trained, assert_same, name_keys, run, tree_map
from ppfl import fit
from ppfl.algorithms import PPFL, FedAvg, Local, Scaffold
from ppfl.core import Population
from ppfl.data import Samples
from ppfl.server import DivergedError, RefusedUpdateWarning
from ppfl.sites import BoundedUploads, Save, Setup, Site, Stacked, Train, default_filters
from ppfl.sites.filters import FEWEST, RECENT, TIMES, Norms, refusals, remember

FEDERATION, BAD = make_federation((7, 12, 20, 9, 8)), "client-3"
SMALL = {"lr": 0.3, "batch_size": 4}
METHODS = [FedAvg(**SMALL), Scaffold(**SMALL), PPFL(**SMALL), PPFL(**SMALL, share_memberships=False)]


def spoiled(factor: float):
    """The federation, with the features of one client times a factor."""
    (at,), samples = FEDERATION.positions([BAD]), FEDERATION.train
    x = samples.x.clone()
    x[samples.offsets[at] : samples.offsets[at + 1]] *= factor
    return replace(FEDERATION, train=Samples(x, samples.y, samples.offsets))


def with_uploads_times(method, factor: float, *clients: str):
    """The same method, whose uploads of these clients are multiplied by a factor; nan makes them no numbers."""
    keys = name_keys(clients)

    class Spoiled(type(method)):
        def work(self, task, shared, own, state, data):
            work = super().work(task, shared, own, state, data)
            factors = torch.where(torch.isin(data.keys, keys), factor, 1.0)

            def spoil(leaf):
                return torch.einsum("c,c...->c...", factors, leaf) if leaf.is_floating_point() else leaf

            sums = {name: sum_._replace(value=tree_map(spoil, sum_.value)) for name, sum_ in work.upload.sums.items()}
            return work._replace(upload=work.upload._replace(sums=sums, rows=tree_map(spoil, work.upload.rows)))

    return Spoiled(**method.model_dump())


def quiet(method, federation, **settings) -> Trained:
    population = Population(make_net(), k=2 if isinstance(method, PPFL) else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusedUpdateWarning)
        return run(method, population, federation, **settings)


@pytest.mark.parametrize("factor", [1e30, 1e6, torch.nan])  # of features, or of uploads
@pytest.mark.parametrize("method", METHODS)
def test_a_harmful_client_is_refused_and_the_others_go_on_as_if_it_were_lost(method, factor):
    class Without(type(method)):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            return plan._replace(who=tuple(name for name in problem.roster.ids if name != BAD))

    federation, harmful = FEDERATION, with_uploads_times(method, factor, BAD)
    if factor == factor:
        federation, harmful = spoiled(factor), method
    found = quiet(harmful, federation, engine="threads")
    lost = quiet(Without(**method.model_dump()), federation, engine="threads")
    others = [at for at, client in enumerate(federation.ids) if client != BAD]
    assert_same(found.server, lost.server, atol=0, rtol=0)
    own, expected = (tree_map(lambda leaf: leaf[others], one.clients[-1].values) for one in (found, lost))
    assert_same(own, expected, atol=0, rtol=0)
    for one, other in zip(found.reports, lost.reports, strict=True):
        assert (one.refused, one.lost, other.refused) == (1, 0, 0)
        assert one.loss == pytest.approx(other.loss, nan_ok=True)


def test_a_refusal_is_a_warning_that_names_the_client_and_a_count_in_the_record():
    def history(factor):
        return fit(Population(make_net(), k=1), spoiled(factor), FedAvg(**SMALL), rounds=2).history

    with pytest.warns(RefusedUpdateWarning, match=f"'{BAD}' .* norm"):
        assert [(record["refused"], record["participants"]) for record in history(1e6)] == [(1, 4), (1, 4)]
    assert all("refused" not in record for record in history(1.0))


def test_a_client_whose_own_model_would_no_longer_be_finite_keeps_the_one_it_had():
    found, (at,) = quiet(Local(**SMALL), spoiled(1e30)), FEDERATION.positions([BAD])
    for name, leaf in found.clients[-1].values.items():
        assert leaf[at].equal(found.clients[0].values[name][at]) and bool(leaf.isfinite().all())
    assert [report.refused for report in found.reports] == [1] * 4


def test_where_the_updates_of_most_clients_are_not_finite_training_has_diverged():
    def trained(*clients):
        return quiet(with_uploads_times(FedAvg(**SMALL), torch.nan, *clients), FEDERATION, rounds=1)

    assert trained("client-0", "client-1").reports[0].refused == 2
    assert_refused(lambda: trained("client-0", "client-1", "client-4"), DivergedError, "3 of 5", "smaller lr")


@pytest.mark.parametrize("sizes", [(200, 200, 200, 200, 2), (3, 3, 3, 3, 3, 3, 400)])  # one small, one large
def test_an_honest_client_of_another_size_than_the_others_is_not_refused(sizes):
    for name in ("fedavg", "scaffold", "ppfl-outputs", "ppfl-private", "fedem", "cfl"):
        method, k, mix = CASES[name]
        found = run(method, Population(make_net(), k=k, mix=mix), make_federation(sizes), engine="stacked")
        assert [report.refused for report in found.reports] == [0] * 4, name


def norms(*upload, steps=(), earlier: Norms | None = None) -> Norms:
    """Norms of uploads, by default from one step each, after those of an earlier round."""
    sent = torch.tensor(upload, dtype=torch.float64)
    taken = torch.tensor(steps, dtype=torch.float64) if steps else torch.ones_like(sent)
    return Norms(sent, taken, torch.zeros_like(sent), *(() if earlier is None else remember(earlier)))


COMPARED = {
    "nothing to compare with yet": (norms(1.0, 1e9), []),
    "one alone, far above earlier rounds": (norms(1e3, earlier=norms(*(1.0, 1.1) * FEWEST)), [0]),
    "many steps go far": (norms(1.0, 1.0, 1.0, 1.0, 500.0, steps=(1, 1, 1, 1, 100)), []),
    "but no farther than steps can": (norms(1.0, 1.0, 1.0, 1.0, 500.0, steps=(1, 1, 1, 1, 2)), [4]),
    "most have come to rest": (norms(0.0, 0.0, 0.0, 0.0, 1.0), []),
    "and one still moves": (norms(*[0.0] * 4, 1.0, earlier=norms(*[0.0] * 4, earlier=norms(*[1.0] * 4))), []),
    "or harms": (norms(*[0.0] * 4, 1e3, earlier=norms(*[0.0] * 4, earlier=norms(*[1.0] * 4))), [4]),
    "as far as in the round before": (norms(*[0.01] * 4, 1.0, earlier=norms(*[1.0] * 4)), []),
}


def test_norms_are_compared_with_others_per_step_and_with_earlier_rounds():
    for name, (found, refused) in COMPARED.items():
        assert list(BoundedUploads().refuse(found)) == refused, name
    found = refusals(default_filters(), norms(1.0, torch.nan, 1.0, torch.inf, 1.0, 1e9, 1.0, 1.0, 1.0))
    assert {at: "not finite" in reason for at, reason in found.items()} == {1: True, 3: True, 5: False}


@given(st.lists(st.floats(0.1, 1e9), min_size=FEWEST, max_size=30), st.integers(-9, 9))
def test_what_is_refused_is_far_above_most_on_any_scale(values, power: int):
    refused = BoundedUploads().refuse(norms(*values))
    most = sorted(values)[int(0.9 * (len(values) - 1))]
    assert all(values[at] > TIMES * most for at in refused)
    assert all(at in refused for at, value in enumerate(values) if refused and value >= min(values[i] for i in refused))
    far = [*values, 1e6 * max(values) * max(values) / min(values)]
    assert len(values) in BoundedUploads().refuse(norms(*far))
    scaled = norms(*(2.0**power * value for value in far))
    assert BoundedUploads().refuse(scaled).keys() == BoundedUploads().refuse(norms(*far)).keys()


def test_rounds_of_few_clients_are_compared_with_the_rounds_before_also_after_a_restart():
    """Two of eight clients per round; in the fifth round the first of them sends a million times too much."""

    class OnceTooLarge(FedAvg):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            return plan._replace(task=(plan.task, 1e6 if round == 4 else 1.0, plan.who[0]))

        def work(self, task, *rest):
            lr, factor, client = task
            return with_uploads_times(FedAvg(**SMALL), factor, client).work(lr, *rest)

    method, federation = OnceTooLarge(**SMALL, participation=0.25), make_federation((9,) * 8)
    whole, half = quiet(method, federation, rounds=6), quiet(method, federation, rounds=6, until=4)
    assert [report.refused for report in whole.reports] == [0, 0, 0, 0, 1, 0]
    resumed = quiet(method, federation, rounds=6, resume=half)
    assert_same(resumed.everything(), whole.everything(), atol=0, rtol=0)


class Late(FedAvg):
    """In the last round one client sends 200 times what it should, about what was usual in the first rounds."""

    def plan(self, problem, server, round):
        plan = super().plan(problem, server, round)
        return plan._replace(task=(plan.task, 200.0 if round == problem.rounds - 1 else 1.0))

    def work(self, task, *rest):
        return with_uploads_times(FedAvg(**SMALL), task[1], BAD).work(task[0], *rest)


def test_the_bound_follows_updates_that_become_smaller():
    """At the end of training, 6.5 is far too much where most updates have a norm of 0.03."""
    found = quiet(Late(**SMALL, schedule="step"), FEDERATION, rounds=80)  # a hundredth in the last 20 rounds
    assert [report.refused for report in found.reports] == [0] * 79 + [1]
    seen = None
    for round in range(100):
        scale = 0.95**round
        seen = norms(5 * scale, 6 * scale, 7 * scale, 5 * scale, 6 * scale, earlier=seen)
        assert not BoundedUploads().refuse(seen)
    assert [*BoundedUploads().refuse(norms(0.03, 0.03, 0.04, 0.03, 6.5, earlier=seen))] == [4]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
@pytest.mark.parametrize("method", [FedAvg, Scaffold])
def test_an_honest_client_that_takes_part_rarely_is_not_refused_at_the_end_of_training(method, schedule):
    """The others hardly move by then, with SCAFFOLD a thousand times less than a client with an old control."""

    class WithAbsentClient(method):
        def plan(self, problem, server, round):
            rest = tuple(client for client in problem.roster.ids if client != "client-3" or round % 13 == 0)
            return super().plan(problem, server, round)._replace(who=rest)

    settings = {"lr": 0.1, "batch_size": 4, "local_epochs": 5, "schedule": schedule}
    for one in (WithAbsentClient(**settings), method(**settings, participation=0.25)):
        found = run(one, Population(make_net(), k=1), make_federation((20,) * 12), engine="stacked", rounds=40)
        assert [report.refused for report in found.reports] == [0] * 40


def test_what_is_remembered_does_not_grow_with_rounds_or_clients():
    seen = None
    for _ in range(5):
        seen = norms(*[1.0] * 100, earlier=seen)
    bound, recent = remember(seen)
    assert len(bound) == 2 and len(recent) == RECENT


def test_a_trial_and_a_run_at_one_site_do_not_share_what_filters_remember():
    federation = make_federation((9,) * 8)
    site = Site(federation, Population(make_net(), k=1), Stacked())
    start = site.backend.population.initial_network()
    for session in ("main", "trial"):
        site.answer(Setup(session, FedAvg(**SMALL), start, 1, float(federation.importance.sum())))
    site.answer(Train("main", 0, 1, 0, federation.ids, 0.1, start, {}))
    found = {
        session: site.answer(Save(session, merged)).by_site["site"] for session, merged in (("main", 1), ("trial", 0))
    }
    assert found["main"] and not found["trial"]


def test_a_row_that_a_method_does_not_declare_never_leaves_a_site():
    class Talkative(FedAvg):
        def work(self, *arguments):
            work = super().work(*arguments)
            return work._replace(upload=work.upload._replace(rows={"secret": work.upload.metrics["loss"]}))

    assert_refused(lambda: quiet(Talkative(**SMALL), FEDERATION), SettingError, "'secret'", "shows")
