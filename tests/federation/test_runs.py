"""Runs over three sites in memory: the run of one process, resumed with the same bits, each call done once."""

import math

import pytest
import torch

from kit.experiments import stop_after
from kit.refusals import assert_refused
from kit.sites import (
    METHODS,
    SITES,
    Killed,
    Sites,
    Talk,
    assert_same_bits,
    assert_same_run,
    at_answers,
    ledger_of,
    make_experiment,
    make_services,
    models_of,
    opened,
    restarted,
)
from ppfl.federation.exchange import Timeouts
from ppfl.federation.ledger import verify
from ppfl.federation.messages import Call, FederationError, pack, unpack_answer
from ppfl.federation.service import SiteService
from ppfl.runs import run
from ppfl.sites import Evaluate, Train


def private_start(case):
    """The start over sites, which is found from sums, as one process does it when it is asked to."""
    method = {"lr": 0.3, "batch_size": 20, **METHODS[case][0]}
    return method | {"start": "sums"} if case.startswith("ppfl") else method


@pytest.mark.parametrize("case", METHODS)
def test_three_sites_are_one_process(case, tmp_path):
    experiment = make_experiment(case, method=private_start(case))
    here = run(experiment, tmp_path / "here")[0]
    there = Sites(experiment, tmp_path).run()
    assert_same_run(here, there, experiment)


def test_eight_sites_are_one_process_too(tmp_path):
    experiment = make_experiment("fedavg", rounds=3)
    there = Sites(experiment, tmp_path, names=tuple("abcdefgh")).run()
    assert_same_run(run(experiment, tmp_path / "here")[0], there, experiment)


def test_lr_is_found_as_in_one_process(tmp_path):
    experiment = make_experiment("fedavg", method={"name": "fedavg", "lr": "auto"})
    assert_same_run(run(experiment, tmp_path / "here")[0], Sites(experiment, tmp_path).run(), experiment)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The experiment of the faults, and its run without any."""
    experiment = make_experiment("ppfl-weights", rounds=4)
    return experiment, Sites(experiment, tmp_path_factory.mktemp("untouched")).run()


@pytest.mark.parametrize("round", [1, 2, 3])
def test_a_server_that_is_killed_goes_on_with_the_same_bits(round, untouched, tmp_path):
    experiment, whole = untouched
    sites = Sites(experiment, tmp_path)
    with pytest.raises(Killed):
        sites.run(on_round_end=stop_after(round, Killed))
    assert_same_bits(sites.run(), whole)


@pytest.mark.parametrize("call", [3, 8, 14])
def test_a_site_that_is_killed_before_its_answer_arrives_answers_it_again(call, untouched, tmp_path):
    experiment, whole = untouched
    sites = Sites(experiment, tmp_path)

    def kill(answer):
        sites.restart("b")
        return "the relay was killed"

    sites.faults["b"] = at_answers({call}, kill)
    record = sites.run()
    assert_same_bits(record, whole)
    assert sum(row.get("sites_resent", 0) for row in record.metrics) == 1


def test_a_site_that_is_started_anew_is_sent_the_call_again_and_a_silent_one_is_not(untouched, tmp_path):
    experiment, whole = untouched
    sites = Sites(experiment, tmp_path)

    def restart(answer):
        sites.since["b"] = "later"
        return

    sites.faults = {"b": at_answers({9}, restart), "c": at_answers({9}, lambda answer: 100.0)}
    assert_same_bits(sites.run(), whole)
    numbers = [opened(packed).number for name, packed in sites.pushed if name == "c"]
    assert len(set(numbers)) == len(numbers)


def test_a_late_answer_is_undone_at_its_site(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    sites = Sites(experiment, tmp_path)
    sites.faults["a"] = at_answers({4}, lambda answer: 700.0)
    record = sites.run(timeouts=Timeouts(deadline=600))
    asked = [one for name, packed in sites.pushed if name == "a" for one in opened(packed).requests]
    trained = [one for one in asked if isinstance(one, Train)]
    lost = next(at for at, one in enumerate(trained[1:], 1) if one.merged < one.exchange - 1)
    assert trained[lost].merged == trained[lost - 2].exchange if lost > 1 else 0
    assert any("a" in row.get("absent", {}) for row in record.metrics)


def test_an_absent_site_is_named_in_every_figure_that_lacks_it(tmp_path):
    experiment = make_experiment("fedavg", rounds=3)
    sites = Sites(experiment, tmp_path)

    def gone(answer):
        sites.since["c"] = ""
        return "the SuperNode is gone"

    sites.faults["c"] = at_answers({3}, gone)
    record = sites.run(timeouts=Timeouts(deadline=600))
    assert sites.time < 300  # it is waited for once, and then the run goes on without it
    assert "c" in record.metrics[-1]["absent"]
    assert "c" in record.scores["unscored"]
    assert all("c" in row["unscored"] for row in record.metrics)  # those of the first round came with the second
    here = sum(not math.isnan(value) for value in record.per_client().values())
    assert here == len(record.per_client()) < len(record.ids)
    assert record.metrics[-1]["lost"] == len(record.ids) - here


def test_a_site_that_is_away_for_rounds_comes_back_as_it_was(tmp_path):
    experiment = make_experiment("ditto", rounds=8)
    sites = Sites(experiment, tmp_path)

    def leave_and_return(round, end):
        sites.since["c"] = "" if 2 <= end.state.round < 5 else "later"

    record = sites.run(on_round_end=leave_and_return)
    without = [row["round"] for row in record.metrics if "c" in row.get("absent", ())]
    assert 3 <= len(without) <= 4
    assert record.finished
    assert not record.scores.get("unscored")


def test_fewer_than_a_majority_stop_the_run_which_can_be_resumed(untouched, tmp_path):
    experiment, whole = untouched
    sites = Sites(experiment, tmp_path)

    def leave(round, end):
        sites.since |= {"a": "", "b": ""} if end.state.round == 2 else {}

    with pytest.raises(FederationError, match="1 of 3 sites answered, at least 2 are needed"):
        sites.run(on_round_end=leave, timeouts=Timeouts(deadline=60))
    sites.since |= {"a": "again", "b": "again"}
    assert_same_bits(sites.run(), whole)


def test_a_run_never_begins_without_all_of_its_sites(tmp_path):
    sites = Sites(make_experiment("fedavg"), tmp_path)
    sites.since["b"] = ""
    assert_refused(sites.run, FederationError, "2 sites are online", "3 are needed", "--sites")


def test_the_same_call_gets_the_same_bytes_and_an_older_one_nothing(tmp_path):
    experiment = make_experiment("ditto")
    talk = Talk(make_services(tmp_path, ("a",), experiment)["a"], experiment)
    talk.begin()
    call = Call("run", "a", 1, 7, [talk.training()])
    first, before = talk.service.answer(*pack(call)), talk.states()
    assert talk.service.answer(*pack(call)) == first
    talk.service = restarted(talk.service)
    assert talk.service.answer(*pack(call)) == first
    for older in (call._replace(number=6), call._replace(start=0, number=9), call._replace(requests=[])):
        assert unpack_answer(talk.service.answer(*pack(older))).code == "old-call"
    assert all(leaf.equal(before[name]) for name, leaf in talk.states().items())


def test_a_store_that_is_lost_begins_anew_and_the_log_says_so(tmp_path, caplog):
    sites = Sites(make_experiment("ditto", rounds=3), tmp_path)

    def lose(round, end):
        if end.state.round == 1:
            service = sites.services["b"]
            service.close()
            for file in service.base.glob("state.sqlite*"):
                file.unlink()
            sites.services["b"] = SiteService(service.settings, service.base)

    record = sites.run(on_round_end=lose)
    assert record.finished
    assert "'b' does not know the run; its clients begin anew" in caplog.text


def test_changed_data_are_refused(tmp_path):
    experiment = make_experiment("fedavg")
    service = make_services(tmp_path, ("a",), experiment)["a"]
    talk = Talk(service, experiment)
    talk.begin()
    other = service.settings.model_copy(update={"part": service.settings.part.model_copy(update={"of": 2})})
    service.close()
    talk.service = SiteService(other, service.base)
    assert talk.ask(talk.training()) == "data-changed"


def test_the_models_of_a_run_are_at_its_sites(tmp_path):
    experiment = make_experiment("ditto", rounds=2)
    sites = Sites(experiment, tmp_path)
    record = sites.run()
    for service in sites.services.values():
        models = models_of(service).personal
        federation = service.data.plain()
        for client in federation.ids:
            test = federation.client(client)["test"]
            right = (models.predict(client, test.x).argmax(1) == test.y).double().mean()
            assert float(right) == pytest.approx(record.per_client()[client], abs=1e-6)


def test_the_ledger_is_chained_and_tells_what_left(tmp_path):
    sites = Sites(make_experiment("fedavg", rounds=2), tmp_path)
    sites.run()
    file = sites.services["a"].base / "ledger.jsonl"
    assert verify(file) == len(ledger_of(file.parent))
    sums = [
        one for line in ledger_of(file.parent) for one in line["fields"] if one["field"].startswith("totals.change")
    ]
    assert sums
    assert {(one["clients"], one["readers"]) for one in sums} == {
        (len(sites.services["a"].data.ids), "sum over clients")
    }
    text = file.read_text()
    file.write_text(text.replace('"bytes":', '"bytes": ', 1))
    with pytest.raises(ValueError, match="line 2 that does not follow"):
        verify(file)


def test_scores_travel_with_the_training_of_the_next_round(tmp_path):
    sites = Sites(make_experiment("fedavg", rounds=4), tmp_path)
    sites.run()
    calls = [[type(one) for one in opened(packed).requests] for name, packed in sites.pushed if name == "a"]
    assert sum([Evaluate, Train] == call for call in calls) == 3
    assert len(calls) == 1 + 1 + 3 + 1  # join, the first round, rounds with scores of the one before, the last scores


def test_numbers_of_all_sites_are_added_and_nothing_is_lost_on_the_way(tmp_path):
    sites = Sites(make_experiment("fedavg", rounds=1), tmp_path)
    answers = {}
    for name in SITES:
        sites.faults[name] = lambda answer, name=name: answers.setdefault(name, []).append(answer) or answer
    record = sites.run()
    said = [unpack_answer(data[1]).replies[-1] for data in answers.values()]
    assert record.metrics[0]["participants"] == sum(int(reply.metrics["participants"]) for reply in said)
    weights = torch.stack([reply.totals["change"].weight for reply in said])
    assert float(weights.sum()) == pytest.approx(1.0)
