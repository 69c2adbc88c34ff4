"""What a site refuses, whatever a server sends: every attack in one table, each with the code it ends in."""

import pytest
import torch

from kit.sites import (
    PPFL,
    TABLE,
    ColumnPlan,
    InProcess,
    NumberedIds,
    SampleSpec,
    Sites,
    Spread,
    Talk,
    begin,
    hashed,
    ledger_of,
    make_problem,
    make_services,
    name_keys,
    train,
    tree_leaves,
)
from ppfl.algorithms import METHODS as ALL_METHODS
from ppfl.algorithms import FedAvg
from ppfl.federation.messages import Call, ClientTable, Join, PrepareRows, SumColumns, pack, unpack_answer
from ppfl.federation.policy import Policy, experiment_hash, over_sites, rows_shown, what_leaves
from ppfl.federation.service import SiteService
from ppfl.federation.site_settings import ClientNames, SiteSettings
from ppfl.federation.site_tools import approve, check_site
from ppfl.runs import Experiment
from ppfl.sites import Close, Evaluate, Keep, Restore, Save, SavedStates, Site, Stacked

STRICT = {}  # the defaults
GROUPS = {"name": "synthetic_groups", "n_clients": 12, "groups": 2, "dim": 3, "samples": 9, "test_points": 4}
SMALL = {"name": "small", "rounds": 5, "data": GROUPS, "model": {"name": "linear"}}


def strict_experiment(**settings):
    """What a site takes part in by default: sums alone leave it."""
    return Experiment.model_validate({**SMALL, "method": {"name": "fedavg", "lr": 0.1}, **settings})


@pytest.fixture
def talk(tmp_path):
    """A server's conversation with a site of twelve clients under the default policy, after the first setup."""
    experiment = strict_experiment()
    service = make_services(tmp_path, ("a",), experiment, policy=STRICT)["a"]
    conversation = Talk(service, experiment)
    conversation.begin()
    return conversation


def drawn(talk, round, count):
    """The clients whose turn it is."""
    draws = hashed(0, "participants", round, name_keys(talk.ids))
    return tuple(talk.ids[at] for at in sorted(draws.argsort()[:count].tolist()))


def evaluation(talk, **changes):
    return Evaluate("main", ("test",), talk.start, {}, per_client=False)._replace(**changes)


ATTACKS = {  # what a server sends: made from a conversation, with the code of the answer
    "another experiment": (lambda t: [Join("0" * 64, 0)], "not-approved"),
    "another seed": (lambda t: [Join(experiment_hash(t.experiment), 5)], "not-in-experiment"),
    "steps over single samples": (
        lambda t: [t.setup._replace(method=FedAvg(lr=0.1, batch_size=1, local_steps=1))], "not-in-experiment",
    ),
    "work without an end": (
        lambda t: [t.setup._replace(method=FedAvg(lr=0.1, local_steps=10**7))], "not-in-experiment",
    ),
    "another method": (lambda t: [t.setup._replace(method=ALL_METHODS["ditto"](lr=0.1))], "not-in-experiment"),
    "a seed of its own": (lambda t: [t.setup._replace(seed=7)], "not-in-experiment"),
    "a dropout that leaves one client": (lambda t: [t.setup._replace(dropout=0.9)], "not-in-experiment"),
    "weights without bound": (lambda t: [t.setup._replace(importance=1e-9)], "not-in-experiment"),
    "a trial that is not made": (lambda t: [t.setup._replace(session="trial")], "not-in-experiment"),
    "one client": (lambda t: [t.training(who=t.ids[:1])], "not-in-experiment"),
    "all clients but one": (lambda t: [t.training(who=t.ids[1:])], "not-in-experiment"),
    "a client named five times": (lambda t: [t.training(who=(*t.ids[:1] * 5, t.ids[1]))], "not-in-experiment"),
    "numbered clients": (lambda t: [t.training(who=NumberedIds(10**8))], "not-in-experiment"),
    "a client of another site": (lambda t: [t.training(who=("b/x",))], "not-in-experiment"),
    "a step size of its own": (lambda t: [t.training(task=100.0)], "not-in-experiment"),
    "a task of another kind": (lambda t: [t.training(task="everything")], "not-in-experiment"),
    "a round that never comes": (lambda t: [t.training(round=10**6)], "not-in-experiment"),
    "a round that is no number": (lambda t: [t.training(round=torch.zeros(3))], "not-in-experiment"),
    "a measurement": (lambda t: [t.training(keep_states=False)], "not-in-experiment"),
    "scores of each client": (lambda t: [evaluation(t, per_client=True)], "not-in-experiment"),
    "scores on training data": (lambda t: [evaluation(t, splits=("train",))], "not-in-experiment"),
    "scores without one client": (lambda t: [evaluation(t, without=t.ids[:1])], "not-in-experiment"),
    "scores of a drawn share": (lambda t: [evaluation(t, share=0.1)], "not-in-experiment"),
    "scores by the max rule": (lambda t: [evaluation(t, hard=True)], "not-in-experiment"),
    "a metric of its own": (lambda t: [evaluation(t, metrics=("os:system",))], "not-in-experiment"),
    "mean features": (lambda t: [ClientTable("feature_means")], "not-in-experiment"),
    "label counts": (lambda t: [ClientTable("label_counts")], "not-in-experiment"),
    "sums of columns": (lambda t: [SumColumns({"columns": [], "numbers": [], "levels": {}})], "not-in-experiment"),
    "a preparation": (lambda t: [PrepareRows({"columns": []})], "not-in-experiment"),
    "the clients' states": (lambda t: [Save("main", 0)], "not-in-experiment"),
    "states of its own": (lambda t: [Restore("main", 0, SavedStates(t.training().who))], "not-in-experiment"),
    "to keep states": (lambda t: [Keep("main")], "not-in-experiment"),
    "the end of the session": (lambda t: [Close("main")], "not-in-experiment"),
    "a session that is not there": (lambda t: [t.training(session="other")], "unknown-run"),
    "no request at all": (lambda t: ["everything"], "not-in-experiment"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_request_outside_the_experiment_is_refused(attack, talk):
    make, code = ATTACKS[attack]
    before = talk.states() if "main" in talk.service._open("run").site.sessions else {}
    answer = talk.send(make(talk))
    assert (answer.code, answer.replies) == (code, [])
    assert all(leaf.equal(before[name]) for name, leaf in talk.states().items())
    assert ledger_of(talk.service.base)[-1]["refused"] == code
    # and honest work goes on
    assert float(talk.ask(talk.training())[0].metrics["participants"]) == len(talk.ids)


def test_nothing_is_answered_before_an_approved_join(tmp_path):
    experiment = strict_experiment()
    service = make_services(tmp_path, ("a",), experiment, policy=STRICT)["a"]
    stranger = Talk(service, strict_experiment(rounds=6))
    assert stranger.ask(Join(experiment_hash(stranger.experiment), 0)) == "not-approved"
    for request in (ClientTable("label_counts"), SumColumns({}), PrepareRows({}), Close("main")):
        assert stranger.ask(request) == "unknown-run"


@pytest.mark.parametrize("name", sorted(ALL_METHODS))
def test_every_method_says_which_tasks_a_server_may_send(name):
    """The tasks of an honest server are among them, and another step size is not."""
    k = 2 if ALL_METHODS[name].several_models else 1
    mix = "predictions" if name == "fedem" else "weights"
    method = ALL_METHODS[name](method=FedAvg(lr=0.1), lr=0.1) if name == "finetune" else ALL_METHODS[name](lr=0.1)
    asked = {**SMALL, "population": {"k": k, "mix": mix}, "method": method}
    experiment = Experiment.model_validate(asked)
    federation = experiment.build_data()
    population = experiment.build_population(SampleSpec.of(federation), 0)
    transport = InProcess(Site(federation, population, Stacked()))
    problem = make_problem(population, transport, rounds=5)
    seen = []
    plan = type(method).plan

    def noted(self, problem, server, round):
        found = plan(self, problem, server, round)
        seen.append((round, problem.rounds, found.task))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "plan", noted)
        state = begin(method, problem, transport)
        for _ in train(method, problem, transport, state):
            pass
    assert seen
    for round, rounds, task in seen:
        assert task in method.possible_tasks(round, rounds, 0)
        assert 100.0 not in method.possible_tasks(round, rounds, 0)


def test_the_budget_of_an_approval_is_counted_over_all_runs_and_can_be_given_again(tmp_path):
    experiment = strict_experiment(rounds=1)
    service = make_services(tmp_path, ("a",), experiment, policy={"max_exchanges": 1})["a"]
    codes = []
    for run in range(20):
        talk = Talk(service, experiment, run=f"run-{run}")
        talk.begin()
        codes.append(talk.send([talk.training()]).code)
    allowed = codes.index("budget-spent")
    assert codes == [""] * allowed + ["budget-spent"] * (20 - allowed)
    assert allowed == 1 + 12  # its round, and the calls before it
    approve(service.settings, service.base, experiment)
    talk = Talk(service, experiment, run="again")
    talk.begin()
    assert talk.send([talk.training()]).code == ""


def test_calls_that_fail_are_counted_too(talk):
    used = talk.service.store.used(experiment_hash(talk.experiment)).calls
    talk.send([talk.training(task=5.0)])
    assert talk.service.store.used(experiment_hash(talk.experiment)).calls == used + 1


# ---------------------------------------------------------------------- sums over few


def test_fewer_clients_than_min_clients_are_as_if_nobody_took_part(tmp_path):
    experiment = strict_experiment(method={"name": "fedavg", "lr": 0.1, "participation": 1 / 12})
    talk = Talk(make_services(tmp_path, ("a",), experiment, policy=STRICT)["a"], experiment)
    talk.begin()
    for count in range(1, 6):
        (reply,) = talk.ask(talk.training(exchange=count, who=drawn(talk, count - 1, count)))
        assert float(reply.metrics["participants"]) == (5 if count == 5 else 0)
        assert bool(reply.totals) == (count == 5)


def test_other_clients_of_a_round_that_was_asked_before_are_refused(talk):
    assert talk.send([talk.training(who=drawn(talk, 0, 8))]).code == ""
    assert talk.send([talk.training(who=drawn(talk, 0, 7))]).code == "not-in-experiment"


def test_one_client_that_outweighs_the_others_is_no_sum(tmp_path):
    rows = ["client,x,y,z"] + [f"c0,{at % 7},{at % 3},{at % 2}" for at in range(300)]
    rows += [f"c{client},{at},{client},{at % 2}" for client in range(1, 9) for at in range(4)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "visits.csv").write_text("\n".join(rows) + "\n")
    table = {"name": "csv", "file": str(tmp_path / "a" / "visits.csv"), "client": "client", "target": "z"}
    asked = {**SMALL, "data": table | {"classes": ["0", "1"]}, "method": {"name": "fedavg", "lr": 0.1}}
    experiment = Experiment.model_validate(asked)
    service = make_services(tmp_path, ("a",), experiment, policy=STRICT, part=None)["a"]
    assert Talk(service, experiment).ask(Join(experiment_hash(experiment), 0)) == "too-few-clients"
    found = check_site(service.settings, service.base, experiment)
    assert any("equal ones" in problem and "min_clients = 5" in problem for problem in found.problems)


@pytest.mark.parametrize(("mix", "rows"), [("weights", 2), ("predictions", 1)])
def test_a_canonical_model_with_one_clear_member_does_not_expose_it(mix, rows, tmp_path):
    """Whether each model is a row of the sum, or all of them are side by side in one row."""
    method = {"name": "ppfl", "lr": 0.1, "share_memberships": False, "warmup": 0, "momentum": 0.0}
    experiment = strict_experiment(population={"k": 2, "mix": mix}, method=method)
    service = make_services(tmp_path, ("a",), experiment, policy=STRICT)["a"]
    talk = Talk(service, experiment)
    talk.begin()
    site = service._open("run").site
    session = site.sessions["main"]
    everyone = torch.arange(len(talk.ids))
    clear = torch.tensor([[0.999, 0.001]] * (len(talk.ids) - 1) + [[0.001, 0.999]])
    states = session.states.rows(everyone)._replace(membership=clear, placed=torch.ones(len(talk.ids)))
    session.states.begin(-1, 0, 0, len(talk.ids))
    session.states.write(everyone, states)
    task = experiment.method.possible_tasks(0, 5, 0)[-1]._replace(memberships=False)
    shared = {"models": {name: leaf.expand(2, *leaf.shape).clone() for name, leaf in talk.start.items()}}
    reply = site.train(talk.training(task=task, shared=shared))
    moves = reply.totals["moves"]
    for leaf in moves.value.values():
        assert len(leaf) == rows
        of_models = leaf if rows == 2 else leaf[0]
        assert of_models[0].any()
        assert not of_models[1].any()
    assert float(reply.totals["left"].weight[1]) == 0


def test_effective_clients_count_weights_and_not_names():
    equal = Spread.of(torch.ones(10, 1))
    one_heavy = Spread.of(torch.tensor([[1.0]] + [[1e-6]] * 9))
    assert float(equal.clients) == pytest.approx(10)
    for weight in (0.1, 0.3, 1 / 7):
        assert not Spread.of(torch.full((5, 1), weight)).is_few(5)
        assert Spread.of(torch.full((4, 1), weight)).is_few(5)
    assert float(one_heavy.clients) == pytest.approx(1, abs=1e-4)


def test_no_bin_of_a_histogram_tells_of_fewer_clients(talk):
    (reply,) = talk.ask(evaluation(talk))
    counts = reply.metrics["test.score.histogram"][0]
    assert counts.sum() == len(talk.ids)
    assert counts[counts > 0].min() >= 5


def test_the_refusal_of_an_update_tells_no_norm(tmp_path):
    rows = ["client,x,y,z"] + [f"c{client},{at * (1e6 if client == 3 else 1)},{client},{at}" for client in range(12)
                               for at in range(6)]  # fmt: skip
    file = tmp_path / "visits.csv"
    file.write_text("\n".join(rows) + "\n")
    table = {"name": "csv", "file": str(file), "client": "client", "target": "z", "task": "regression"}
    experiment = strict_experiment(data=table, method={"name": "fedavg", "lr": 1e-6})
    service = make_services(tmp_path, ("a",), experiment, policy=STRICT, part=None)["a"]
    talk = Talk(service, experiment)
    talk.begin()
    (reply,) = talk.ask(talk.training())
    assert [reason for _, reason in reply.refused] == ["its update is too large"]


# ---------------------------------------------------------------------- tables

VISITS = {"name": "visits", "rounds": 2, "data": TABLE, **PPFL, "method": {"name": "fedavg", "lr": 0.1},
          "population": {"k": 1}, "preparation": {"levels": {"ward": ["medicine", "surgery"]}}}  # fmt: skip


def visits_service(folder, **changes):
    rows = [
        f"p{at % 8},{at % 5},{['medicine', 'surgery'][at % 3 == 0]},{'ill' if at % 2 else 'well'}" for at in range(64)
    ]
    text = "\n".join(["patient,age,ward,outcome", *rows, "p0,17.25,medicine,ill"]) + "\n"
    (folder / "visits.csv").write_text(text)
    experiment = Experiment.model_validate(VISITS | changes)
    (folder / "names.key").write_text("0" * 64)
    settings = SiteSettings.model_validate({"name": "a", "data": TABLE})
    approve(settings, folder, experiment)
    return SiteService(settings, folder), experiment


PLANS = {
    "a column of numbers as text": {"levels": {"age": ["0", "1", "17.25"]}},
    "values that the experiment does not name": {"levels": {"ward": ["medicine", "surgery", "p0"]}},
    "other rows": {"missing": "drop"},
    "sums of log factorials": {"count_target": True},
}


@pytest.mark.parametrize("attack", PLANS)
def test_columns_are_summed_by_the_plan_of_the_experiment_alone(attack, tmp_path):
    service, experiment = visits_service(tmp_path)
    talk = Talk(service, experiment)
    talk.ask(Join(experiment_hash(experiment), 0))
    honest = {"columns": ["age", "ward"], "numbers": ["age"], "levels": {"ward": ["medicine", "surgery"]}}
    (reply,) = talk.ask(SumColumns(honest))
    assert set(reply.metrics) == set(ColumnPlan.model_validate(honest).sizes(second=False))
    assert talk.ask(SumColumns(honest | PLANS[attack])) == "not-in-experiment"


def test_rows_are_prepared_in_one_way_alone(tmp_path):
    service, experiment = visits_service(tmp_path)
    talk = Talk(service, experiment)
    talk.ask(Join(experiment_hash(experiment), 0))
    agreed = service.data.prepared(experiment.preparation, {}).preparation.model_dump(mode="json")
    assert len(talk.ask(PrepareRows(agreed))) == len(talk.ask(PrepareRows(agreed))) == 1
    other = {**agreed, "columns": [{**agreed["columns"][0], "scale": [1e-9]}, *agreed["columns"][1:]]}
    assert talk.ask(PrepareRows(other)) == "not-in-experiment"
    names = {**agreed, "columns": [*agreed["columns"][:1], {**agreed["columns"][1], "levels": ["p0", "p1"]}]}
    assert talk.ask(PrepareRows(names)) == "not-in-experiment"


def test_no_value_of_text_leaves_a_table(tmp_path):
    service, experiment = visits_service(tmp_path, preparation={})
    assert Talk(service, experiment).ask(Join(experiment_hash(experiment), 0)) == "failed"
    assert "name its levels" in ledger_of(tmp_path)[-1]["text"]


def test_a_level_of_few_clients_is_not_counted(tmp_path):
    service, experiment = visits_service(tmp_path)
    plan = ColumnPlan(columns=("age", "ward"), numbers=("age",), levels={"ward": ("medicine", "surgery")})
    table = service.data._read(experiment.preparation).table
    table.features.loc[table.features["ward"] == "surgery", "ward"] = "medicine"
    table.features.loc[table.clients == "p1", "ward"] = "surgery"
    sums = service.data.sums(experiment.preparation, plan, None, 5)
    assert sums["levels"][1] == 0 < sums["levels"][0]
    assert service.data.sums(experiment.preparation, plan, None, 1)["levels"][1] > 0


# ---------------------------------------------------------------------- what leaves


def test_an_error_leaves_as_a_code_and_its_text_stays(tmp_path):
    service, experiment = visits_service(tmp_path)
    file = tmp_path / "visits.csv"
    file.write_text(file.read_text().replace("surgery", "secret-cell"))
    service = SiteService(service.settings, tmp_path)
    talk = Talk(service, experiment)
    talk.ask(Join(experiment_hash(experiment), 0))
    plan = SumColumns({"columns": ["age", "ward"], "numbers": ["age"], "levels": {"ward": ["medicine", "surgery"]}})
    answer = service.answer(*pack(Call("run", "a", 1, 9, [plan])))
    assert unpack_answer(answer).code == "failed"
    assert b"secret-cell" not in answer
    assert "secret-cell" in ledger_of(tmp_path)[-1]["text"]


@pytest.mark.parametrize("name", ["p1\u001b[2J", "p1"])
def test_names_of_clients_leave_as_codes_that_differ_between_experiments(name, tmp_path):
    (tmp_path / "names.key").write_text("0" * 64)
    settings = SiteSettings.model_validate({"name": "north", "data": {"name": "digits"}})
    one, other = (ClientNames(settings, tmp_path, experiment).outside([name])[0] for experiment in ("x", "y"))
    assert one != other
    assert "p1" not in one
    assert one.startswith("north/") and one.isprintable()
    assert ClientNames(settings, tmp_path, "x").position(name, (other, one)) == 1


def test_a_server_sees_no_names_and_no_scores_of_clients_by_default(tmp_path):
    experiment = strict_experiment(rounds=2)
    sites = Sites(experiment, tmp_path, names=("a", "b"), policy={"min_clients": 3})
    record = sites.run()
    names = set(experiment.build_data().ids)
    written = b"".join(file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert not [name for name in names if f'"{name}"'.encode() in written]
    assert record.per_client() == {}


def test_approving_covers_all_settings_but_the_data():
    experiment = strict_experiment()
    assert experiment_hash(experiment) == experiment_hash(strict_experiment(data=GROUPS | {"n_clients": 5}))
    for change in (
        {"rounds": 6},
        {"seeds": (0, 1)},
        {"watch": {"objective": True}},
        {"watch": {"report_clients": True}},
    ):
        assert experiment_hash(strict_experiment(**change)) != experiment_hash(experiment)


def test_less_is_seen_of_clients_over_sites_unless_the_experiment_says_so():
    asked = {"name": "ppfl", "lr": 0.1}
    quiet = over_sites(strict_experiment(method=asked, population={"k": 2}))
    assert (quiet.watch.report_clients, quiet.method.start) == (False, "sums")
    loud = strict_experiment(method=asked | {"start": "gradients"}, population={"k": 2}, watch={"report_clients": True})
    assert over_sites(loud) == loud
    assert set(rows_shown(loud)) == {"memberships", "sketches", "scores"}
    assert rows_shown(over_sites(strict_experiment())) == ()


def test_the_site_says_in_words_what_leaves_and_what_never_does(tmp_path):
    experiment = strict_experiment(method={"name": "ppfl", "lr": 0.1}, population={"k": 2})
    said = " ".join(what_leaves(experiment, Policy()))
    for words in ("at least 5 clients", "its membership", "does not let out memberships", "Never sent are", "codes"):
        assert words in said
    settings = SiteSettings.model_validate({"name": "a", "data": GROUPS})
    problems = check_site(settings, tmp_path, experiment.model_copy(update={"newcomers": 0.2})).problems
    assert any("newcomers" in problem for problem in problems)
    assert any("names.key" in problem for problem in problems)


# ---------------------------------------------------------------------- bytes

BYTES = {
    "nothing": b"",
    "noise": bytes(range(256)) * 4,
    "deep JSON": b"[" * 100_000,
    "a long header": (2**60).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES)
def test_bytes_that_are_no_call_end_in_a_code(data, talk):
    good = pack(Call("run", "a", 1, 99, [talk.training()]))
    for shared, own in ((data, data), (good.shared, data), (data, good.own)):
        assert unpack_answer(talk.service.answer(shared, own)).code == "other-version"


def test_a_call_that_is_too_large_is_not_read(tmp_path):
    experiment = strict_experiment()
    service = make_services(tmp_path, ("a",), experiment, policy={"max_message_bytes": 1000})["a"]
    assert Talk(service, experiment).ask(Join("0" * 2000, 0)) == "too-large"


def test_work_that_takes_too_long_is_undone(tmp_path):
    experiment = strict_experiment(method={"name": "ditto", "lr": 0.1})
    talk = Talk(make_services(tmp_path, ("a",), experiment, policy={"max_seconds": 1e-3})["a"], experiment)
    assert talk.ask(Join(experiment_hash(experiment), 0)) == "out-of-time"
    assert talk.service.store.joined("run") is None


# ---------------------------------------------------------------------- a server that reads all it gets


def numbers_sent(folder, order, method, k):
    """All numbers that two sites send in a run, where the rows of client i are those of order[i]."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(12, 8, 2, generator=random)
    y = (x[..., 0] * torch.tensor([1.0, -1.0] * 6)[:, None] > 0).long()
    services = {}
    experiment = None
    for site in ("a", "b"):
        place = folder / site
        place.mkdir(parents=True)
        rows = [f"c{client:02d},{x[of, at, 0]},{x[of, at, 1]},{y[of, at]}" for client, of in enumerate(order)
                for at in range(8)]  # fmt: skip
        (place / "visits.csv").write_text("\n".join(["patient,p,q,outcome", *rows]) + "\n")
        table = TABLE | {"file": str(place / "visits.csv"), "classes": ["0", "1"], "test_fraction": 0.0}
        experiment = strict_experiment(data=table, method=method, population={"k": k, "mix": "weights"}, rounds=3)
        services |= make_services(folder, (site,), experiment, policy=STRICT, part=None)
    sites = Sites(experiment, folder, services)
    sent = []
    for name in services:
        sites.faults[name] = lambda answer: sent.extend(unpack_answer(answer).replies) or answer
    sites.run()
    leaves = [leaf for reply in sent for leaf in tree_leaves([reply.totals, reply.metrics])]
    assert not any(reply.rows.values for reply in sent)
    return torch.cat([leaf.double().flatten() for leaf in leaves])


@pytest.mark.parametrize(("method", "k"), [
    ({"name": "fedavg", "lr": 0.1, "batch_size": 1000}, 1),
    ({"name": "ppfl", "lr": 0.1, "batch_size": 1000, "share_memberships": False}, 2),
])  # fmt: skip
def test_what_a_server_reads_does_not_tell_whose_rows_are_whose(method, k, tmp_path):
    """Whatever a server makes of what it reads, it names the client that has some rows no better than by chance: with
    the rows of all clients exchanged it reads the same numbers."""
    one = numbers_sent(tmp_path / "one", range(12), method, k)
    other = numbers_sent(tmp_path / "other", torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist(),
                         method, k)  # fmt: skip
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
