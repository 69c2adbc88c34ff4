"""Filters: an upload that would harm all others is refused by its client's name, and a clean run keeps its bits."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.cases import CASES
from kit.cases import SIZES as CONTRACT_SIZES
from kit.problems import make_federation, make_net
from kit.training import ENGINES, assert_same, connect, run
from ppfl import fit
from ppfl.algorithms import PPFL, FedAvg, Local, Scaffold
from ppfl.core.draws import name_keys
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.trees import tree_map
from ppfl.data import Samples
from ppfl.server import DivergedError, InProcess, RefusedUpdateWarning, begin, client_states, make_problem, train
from ppfl.server.loop import ask_clients, make_request
from ppfl.sites import BoundedUploads, FiniteUploads, Site, default_filters
from ppfl.sites.filters import FEWEST, TIMES, Norms, refusals

SIZES, BAD = (7, 12, 20, 9, 8), "client-3"
SMALL = {"lr": 0.3, "batch_size": 4}
METHODS = {
    "fedavg": (FedAvg(**SMALL), 1),
    "scaffold": (Scaffold(**SMALL), 1),
    "ppfl": (PPFL(**SMALL), 2),
    "ppfl-private": (PPFL(**SMALL, share_memberships=False), 2),
}


def spoiled(federation, factor: float, *clients: str):
    """The same federation, with the features of these clients times a factor."""
    x, samples = federation.train.x.clone(), federation.train
    for at in federation.positions(clients):
        x[samples.offsets[at] : samples.offsets[at + 1]] *= factor
    return replace(federation, train=Samples(x, samples.y, samples.offsets))


def with_broken_uploads(method, *clients: str):
    """The same method, whose uploads of these clients are not numbers."""
    keys = name_keys(clients)

    class Broken(type(method)):
        def work(self, backend, task, shared, own, client, data):
            work = super().work(backend, task, shared, own, client, data)
            broken = torch.isin(data.keys, keys)

            def spoil(leaf):
                rows = broken.reshape(-1, *(1 for _ in leaf.shape[1:])).expand_as(leaf)
                return leaf.masked_fill(rows, torch.nan) if leaf.is_floating_point() else leaf

            sums = {name: sum_._replace(value=tree_map(spoil, sum_.value)) for name, sum_ in work.upload.sums.items()}
            return work._replace(upload=work.upload._replace(sums=sums, rows=tree_map(spoil, work.upload.rows)))

    return Broken(**method.model_dump())


def with_large_uploads(method, *clients: str, round: int):
    """The same method, whose uploads of these clients are a million times too large in one round."""
    keys = name_keys(clients)

    class Large(type(method)):
        def plan(self, problem, server, at):
            plan = super().plan(problem, server, at)
            return plan._replace(task=(plan.task, 1e6 if at == round else 1.0))

        def work(self, backend, task, shared, own, client, data):
            work = super().work(backend, task[0], shared, own, client, data)
            factor = torch.where(torch.isin(data.keys, keys), task[1], 1.0)
            change = work.upload.sums["change"]
            value = {name: torch.einsum("c,c...->c...", factor, leaf) for name, leaf in change.value.items()}
            return work._replace(upload=work.upload._replace(sums={"change": change._replace(value=value)}))

    return Large(**method.model_dump())


def without(method, client: str):
    """The same method, which asks all clients but this one."""

    class Without(type(method)):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            return plan._replace(who=tuple(name for name in problem.roster.ids if name != client))

    return Without(**method.model_dump())


def quiet(*arguments, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusedUpdateWarning)
        return run(*arguments, **settings)


@pytest.mark.parametrize("engine", ["loop", "threads"])
@pytest.mark.parametrize("harm", ["times 1e30", "times 1e6", "not a number"])
@pytest.mark.parametrize("name", METHODS)
def test_a_harmful_client_is_refused_and_the_others_go_on_as_if_it_were_lost(name: str, harm: str, engine: str) -> None:
    (method, k), federation = METHODS[name], make_federation(SIZES)
    population = Population(make_net(), k=k)
    if harm == "not a number":
        harmful = quiet(with_broken_uploads(method, BAD), population, federation, engine=engine)
    else:
        federation = spoiled(federation, float(harm.removeprefix("times ")), BAD)
        harmful = quiet(method, population, federation, engine=engine)
    lost = quiet(without(method, BAD), population, federation, engine=engine)
    assert_same(harmful.server, lost.server, atol=0, rtol=0)
    others = [at for at, client in enumerate(federation.ids) if client != BAD]
    for name, leaf in harmful.clients[-1].values.items():
        assert leaf[others].equal(lost.clients[-1].values[name][others])
    for one, other in zip(harmful.reports, lost.reports, strict=True):
        assert (one.refused, one.lost, other.refused) == (1, 0, 0)
        assert one.loss == pytest.approx(other.loss, nan_ok=True)


def test_a_refusal_is_a_warning_that_names_the_client_and_a_count_in_the_record() -> None:
    federation = spoiled(make_federation(SIZES), 1e6, BAD)
    with pytest.warns(RefusedUpdateWarning, match=f"client '{BAD}' was left out of a round: its update has norm"):
        fitted = fit(Population(make_net(), k=1), federation, FedAvg(**SMALL), rounds=2)
    assert [record["refused"] for record in fitted.history] == [1, 1]
    assert [record["participants"] for record in fitted.history] == [4, 4]
    clean = fit(Population(make_net(), k=1), make_federation(SIZES), FedAvg(**SMALL), rounds=2)
    assert all("refused" not in record for record in clean.history)
    with pytest.warns(RefusedUpdateWarning, match=f"client '{BAD}' .* not finite; look at its data"):
        fit(Population(make_net(), k=1), spoiled(make_federation(SIZES), 1e30, BAD), FedAvg(**SMALL), rounds=1)


def test_a_client_whose_own_model_would_no_longer_be_finite_keeps_the_one_it_had() -> None:
    federation = spoiled(make_federation(SIZES), 1e30, BAD)
    found = quiet(Local(**SMALL), Population(make_net(), k=1), federation)
    at = federation.ids.index(BAD)
    for name, leaf in found.clients[-1].values.items():
        assert leaf[at].equal(found.clients[0].values[name][at]) and bool(leaf.isfinite().all())
    assert [report.refused for report in found.reports] == [1] * 4


@pytest.mark.parametrize("sizes", [(7, 12, 20, 9), (7, 12, 20, 9, 8, 7, 7, 7)])
def test_one_bad_client_of_four_is_enough_to_tell(sizes) -> None:
    found = quiet(FedAvg(**SMALL), Population(make_net(), k=1), spoiled(make_federation(sizes), 1e6, BAD))
    assert [report.refused for report in found.reports] == [1] * 4


def test_where_the_updates_of_most_clients_are_not_finite_training_has_diverged() -> None:
    population, federation = Population(make_net(), k=1), make_federation(SIZES)
    with pytest.raises(DivergedError, match="3 of 5 clients are not finite; use a smaller lr") as error:
        run(with_broken_uploads(FedAvg(**SMALL), "client-0", "client-1", "client-4"), population, federation)
    assert isinstance(error.value, SettingError)
    with pytest.warns(RefusedUpdateWarning):
        found = run(with_broken_uploads(FedAvg(**SMALL), "client-0", "client-1"), population, federation, rounds=1)
    assert found.reports[0].refused == 2
    with pytest.raises(DivergedError, match="5 of 5"):
        run(with_broken_uploads(FedAvg(**SMALL), *federation.ids), population, federation)


# ---------------------------------------------------------------------- clean runs


def filtered(case, federation, filters, **settings):
    """A run whose site has these filters, and its client states."""
    method, k, mix = case
    population = Population(make_net(), k=k, mix=mix)
    transport = InProcess(Site(federation, population, ENGINES["chunks-of-2"], filters=filters))
    problem = make_problem(population, transport, rounds=4, seed=1)
    *_, (state, _) = train(method, problem, transport, begin(method, problem, transport, **settings))
    return state.server, client_states(transport, state).values


@pytest.mark.parametrize("name", CASES)
def test_a_clean_run_has_the_same_bits_with_and_without_filters(name: str) -> None:
    federation = make_federation(CONTRACT_SIZES)
    with_filters = filtered(CASES[name], federation, default_filters(), dropout=0.3)
    assert_same(with_filters, filtered(CASES[name], federation, (), dropout=0.3), atol=0, rtol=0)


UNEVEN = {"one small client": (200, 200, 200, 200, 2), "one large client": (3, 3, 3, 3, 3, 3, 400)}


@pytest.mark.parametrize("sizes", UNEVEN)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ppfl-outputs", "ppfl-private", "fedem", "cfl"])
def test_an_honest_client_of_another_size_than_the_others_is_not_refused(name: str, sizes: str) -> None:
    method, k, mix = CASES[name]
    found = run(method, Population(make_net(), k=min(k, 3), mix=mix), make_federation(UNEVEN[sizes]), engine="stacked")
    assert [report.refused for report in found.reports] == [0] * 4


# ---------------------------------------------------------------------- what is compared with what


def norms(*upload: float, steps: tuple[float, ...] = (), earlier: tuple[float, ...] = ()) -> Norms:
    """Norms of uploads; those of earlier rounds come from one step each."""
    upload, before = torch.tensor(upload, dtype=torch.float64), torch.tensor(earlier, dtype=torch.float64)
    taken = torch.tensor(steps, dtype=torch.float64) if steps else torch.ones_like(upload)
    return Norms(upload, taken, torch.zeros_like(upload), torch.stack([before, before], dim=1))


def test_rounds_of_few_clients_are_compared_with_earlier_rounds() -> None:
    assert BoundedUploads().refuse(norms(1.0, 1e9)) == {}  # nothing to compare with yet
    before = (1.0, 1.1) * FEWEST
    assert list(BoundedUploads().refuse(norms(1.0, 1e9, earlier=before))) == [1]
    assert list(BoundedUploads().refuse(norms(1e3, earlier=before))) == [0]
    assert BoundedUploads().refuse(norms(5.0, earlier=before)) == {}


def test_a_client_that_takes_many_steps_may_go_far_but_no_farther_than_its_steps() -> None:
    assert BoundedUploads().refuse(norms(1.0, 1.0, 1.0, 1.0, 500.0, steps=(1, 1, 1, 1, 100))) == {}
    assert list(BoundedUploads().refuse(norms(1.0, 1.0, 1.0, 1.0, 500.0, steps=(1, 1, 1, 1, 2)))) == [4]


def run_of_pairs(rounds: int, **settings):
    """Two of eight clients per round, and one upload of the fifth round is a million times too large."""
    federation, population = make_federation((9,) * 8), Population(make_net(), k=1)
    method = FedAvg(**SMALL, participation=0.25)
    problem = make_problem(population, connect(federation, population), rounds=rounds, seed=1)
    bad, _ = method.plan(problem, None, 4).who
    return quiet(with_large_uploads(method, bad, round=4), population, federation, rounds=rounds, **settings)


def test_rounds_of_few_clients_refuse_what_is_large_compared_with_the_rounds_before() -> None:
    assert [report.refused for report in run_of_pairs(rounds=6).reports] == [0, 0, 0, 0, 1, 0]


@given(st.lists(st.floats(0.1, 1e9), min_size=FEWEST, max_size=30), st.integers(-9, 9))
def test_what_is_refused_is_far_above_most_on_any_scale(values, power: int) -> None:
    refused = BoundedUploads().refuse(norms(*values))
    most = sorted(values)[int(0.9 * (len(values) - 1))]
    assert all(values[at] > TIMES * most for at in refused)
    assert all(at in refused for at, value in enumerate(values) if refused and value >= min(values[i] for i in refused))
    far = [*values, 1e6 * max(values) * max(values) / min(values)]
    assert len(values) in BoundedUploads().refuse(norms(*far))
    scaled = norms(*(2.0**power * value for value in far))
    assert BoundedUploads().refuse(scaled).keys() == BoundedUploads().refuse(norms(*far)).keys()


def test_norms_of_zero_refuse_no_one() -> None:
    assert BoundedUploads().refuse(norms(0.0, 0.0, 0.0, 0.0, 1.0)) == {}


def test_what_is_not_finite_is_refused_for_that_reason_alone() -> None:
    found = refusals(default_filters(), norms(1.0, torch.nan, 1.0, torch.inf, 1.0, 1e9, 1.0, 1.0, 1.0))
    assert {at: reason.split()[-2:] for at, reason in found.items() if at < 5} == {
        1: ["not", "finite"],
        3: ["not", "finite"],
    }
    assert found[5].startswith("its update has norm 1e+09")
    rest = norms(1.0, 1.0, 1.0)._replace(rest=torch.tensor([1.0, torch.nan, torch.inf]))
    assert list(FiniteUploads().refuse(rest)) == [1, 2]


def test_what_a_filter_remembers_of_trials_is_not_held_against_the_run() -> None:
    """Short steps of a trial must not make the usual steps of the run look large."""
    federation, population = make_federation((9,) * 4), Population(make_net(), k=1)
    transport = InProcess(Site(federation, population, ENGINES["loop"]))
    problem = make_problem(population, transport, rounds=4, seed=1)
    timid, usual = FedAvg(lr=1e-5, batch_size=4), FedAvg(lr=0.3, batch_size=4)
    for _ in train(timid, problem, transport, begin(timid, problem, transport, session="trial"), "trial"):
        pass
    state = begin(usual, problem, transport)
    plan = usual.plan(problem, state.server, 0)._replace(who=("client-0", "client-1"))
    reply = ask_clients(transport, make_request(usual, problem, state.server, plan, 0, 1))
    assert reply.refused == ()


def test_a_resumed_run_refuses_what_the_run_would_have_refused() -> None:
    """What the rounds before have taught the filters is still known after a restart."""
    resumed = run_of_pairs(5, resume=run_of_pairs(5, until=4))
    assert_same(resumed.everything(), run_of_pairs(5).everything(), atol=0, rtol=0)


def test_a_row_that_a_method_does_not_declare_never_leaves_a_site() -> None:
    class Talkative(FedAvg):
        def work(self, *arguments):
            work = super().work(*arguments)
            return work._replace(upload=work.upload._replace(rows={"secret": work.upload.metrics["loss"]}))

    with pytest.raises(SettingError, match="uploads the row 'secret', which its visible_rows .* do not name"):
        run(Talkative(**SMALL), Population(make_net(), k=1), make_federation(SIZES))


def test_a_client_that_still_moves_when_most_have_come_to_rest_is_not_refused() -> None:
    """SCAFFOLD's control variates settle, and one client's goes on where a unit of its network switches."""
    method, population = (
        Scaffold(lr=0.1, batch_size=None, local_steps=1),
        Population(make_net(dtype=torch.float64), k=1),
    )
    found = run(method, population, make_federation(dtype=torch.float64), rounds=6, seed=3)
    assert [report.refused for report in found.reports] == [0] * 6
