"""Sites that are slow, dead, started anew, or send what cannot be used: one log line, a count, and the run goes on."""

import logging

import pytest
import torch

from kit.messages import payload_of, with_payload, with_totals
from kit.refusals import DataError, PPFLError, assert_refused
from kit.sites import SITES, Killed, Sites, assert_same_bits, at_replies, make_experiment, make_services, server_of
from ppfl.algorithms import Rows
from ppfl.federation.envelope import seal, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.site_mail import Patience


def counted(record, name):
    """The sum over rounds of something that is left out where it is 0."""
    return sum(one.get(name, 0) for one in record.metrics)


# ---------------------------------------------------------------------- replies that cannot be used


def second_training(change):
    """A fault that changes a site's reply with the sums of round 2."""
    seen = []

    def fault(sealed):
        replies = payload_of(sealed)
        if isinstance(replies, str) or not any(reply.totals for reply in replies):
            return sealed
        seen.append(sealed)
        return with_payload(sealed, [change(reply) for reply in replies]) if len(seen) == 2 else sealed

    return fault


def off_the_simplex(reply):
    rows = reply.rows
    return reply._replace(rows=Rows(rows.ids, {n: 2 * x if n == "membership" else x for n, x in rows.values.items()}))


BAD_REPLIES = {
    "not finite": ("fedavg", lambda reply: with_totals(reply, lambda leaf: leaf * float("nan"))),
    "expected": ("fedavg", lambda reply: with_totals(reply, lambda leaf: leaf[..., None])),
    "missing": ("fedavg", lambda reply: reply._replace(totals={f"my {n}": x for n, x in reply.totals.items()})),
    "norm": ("fedavg", lambda reply: with_totals(reply, lambda leaf: leaf * 1e9)),
    "not one of its own": ("fedavg", lambda reply: reply._replace(rows=Rows(("nobody",), {"x": torch.ones(1, 3)}))),
    "does not show": ("fedavg", lambda reply: reply._replace(rows=Rows((), {"x": torch.zeros(0, 5)}))),
    "for 0 clients": ("fedavg", lambda reply: reply._replace(rows=Rows((), {"x": torch.zeros(3, 5)}))),
    "simplex": ("ppfl-outputs", off_the_simplex),
    "a client twice": ("fedavg", lambda reply: reply._replace(rows=Rows(("x", "x"), {"x": torch.ones(2, 3)}))),
}


@pytest.mark.parametrize("reason", BAD_REPLIES)
def test_a_bad_reply_is_refused_and_the_run_goes_on(reason, tmp_path, caplog):
    method, change = BAD_REPLIES[reason]
    experiment = make_experiment(method, rounds=3)
    sites = Sites(experiment, tmp_path)
    sites.faults["b"] = [second_training(change)]
    with caplog.at_level(logging.WARNING, "ppfl.federation"):
        record = sites.run()
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 1 and "'b'" in said[0] and reason in said[0]
    assert record.finished and counted(record, "sites_refused") == 1
    if method == "fedavg":  # which has one exchange in every round
        here = len(sites.services["b"].federation.ids)
        assert [one["participants"] for one in record.metrics] == [len(record.ids) - lost for lost in (0, here, 0)]
    assert all(bool(leaf.isfinite().all()) for leaf in server_of(record).values())


DAMAGES = {
    "empty": lambda sealed: b"",
    "half": lambda sealed: sealed[: len(sealed) // 2],
    "another run": lambda sealed: seal(unseal(sealed)._replace(run="another run")),
    "another site": lambda sealed: seal(unseal(sealed)._replace(site="a")),
    "another number": lambda sealed: seal(unseal(sealed)._replace(number=unseal(sealed).number - 1)),
    "no reply": lambda sealed: with_payload(sealed, [{"not": "a reply"}]),
    "no list": lambda sealed: with_payload(sealed, {"not": "a list"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_message_that_is_none_or_of_another_run_is_refused(damage, tmp_path):
    experiment = make_experiment("fedavg", rounds=2)
    sites = Sites(experiment, tmp_path)
    sites.faults["b"] = [at_replies({4}, DAMAGES[damage])]
    record = sites.run()
    assert record.finished and counted(record, "sites_refused") == 1


def test_a_straggler_is_left_out_and_its_late_reply_is_dropped(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    sites = Sites(experiment, tmp_path)
    sites.faults["a"] = [lambda sealed: 6.0]  # so that time goes on
    sites.faults["c"] = [at_replies({4}, lambda sealed: 70.0)]
    record = sites.run(patience=Patience(deadline=60, resend=1000))
    assert record.finished and (counted(record, "sites_lost"), counted(record, "sites_late")) == (1, 1)
    assert counted(record, "lost") == len(sites.services["c"].federation.ids)


def test_too_few_sites_stop_the_run_with_an_error_that_names_them(tmp_path):
    experiment = make_experiment("fedavg", rounds=4)
    sites = Sites(experiment, tmp_path)
    sites.faults["c"] = [at_replies(range(4, 100), lambda sealed: None)]
    patience = Patience(deadline=60, at_least=3)
    with pytest.raises(FederationError, match="2 of 3 sites answered, at least 3 .* 'c'"):
        sites.run(patience=patience)


# ---------------------------------------------------------------------- processes that end


@pytest.mark.parametrize("method", ["ditto", "scaffold", "ppfl-weights"])
def test_a_site_that_is_killed_in_a_round_and_started_again_changes_nothing(method, tmp_path):
    experiment = make_experiment(method, rounds=4)
    undisturbed = Sites(experiment, tmp_path / "undisturbed").run()
    sites = Sites(experiment, tmp_path / "disturbed")

    def die(sealed):
        """The reply is lost with the process that did the work; another one comes up."""
        sites.restart("b")
        sites.since["b"] = f"message {len(sites.pushed)}"

    sites.faults["b"] = [at_replies({4, 7}, die)]
    record = sites.run()
    assert counted(record, "sites_resent") == 2
    assert_same_bits(record, undisturbed)


def kill(sealed):
    """After the sites have worked, before the server has heard of it."""
    raise Killed


@pytest.mark.parametrize("method", ["ditto", "scaffold", "ppfl-outputs", "fedem"])
def test_a_server_that_is_killed_and_resumes_ends_with_the_same_bits(method, tmp_path):
    experiment = make_experiment(method, rounds=4)
    undisturbed = Sites(experiment, tmp_path / "undisturbed").run()
    sites, deaths = Sites(experiment, tmp_path / "disturbed"), 0
    sites.faults["b"] = [at_replies({4, 9}, kill)]
    while True:
        try:
            record = sites.run(resume=deaths > 0)
            break
        except Killed:
            deaths += 1
            for name in SITES:
                sites.restart(name)
    assert deaths == 2
    assert_same_bits(record, undisturbed)


def test_a_server_resumes_with_a_site_missing(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    sites = Sites(experiment, tmp_path)
    sites.faults["a"] = [at_replies({5}, kill)]
    with pytest.raises(Killed):
        sites.run()
    sites.faults["c"] = [at_replies(range(2, 100), lambda sealed: None)]  # away after it has described its data
    record = sites.run(resume=True, patience=Patience(deadline=5))
    assert record.finished and counted(record, "sites_lost") > 0


def test_a_site_that_lost_its_store_is_set_up_again(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    sites = Sites(experiment, tmp_path)

    def delete_store(sealed):
        for file in sites.services["b"].base.glob("state.sqlite*"):
            file.unlink()
        sites.restart("b")
        return sealed

    sites.faults["b"] = [at_replies({6}, delete_store)]
    record = sites.run()
    assert record.finished and not counted(record, "sites_refused") + counted(record, "sites_lost")


# ---------------------------------------------------------------------- sites that do not fit, come late, or leave


def test_sites_that_do_not_fit_are_refused_by_name_before_the_first_round(tmp_path):
    tables, table = {}, {"name": "csv", "file": "t.csv", "client": "who", "target": "y", "task": "classification"}
    for name, column in {"a": "age", "b": "age", "c": "weight"}.items():
        (tmp_path / name).mkdir()
        rows = [f"p{i % 3},{i},{i % 2}" for i in range(12)]
        (tmp_path / name / "t.csv").write_text("\n".join([f"who,{column},y", *rows]))
        tables |= make_services(tmp_path, [name], table, part=None)
    experiment = make_experiment("fedavg")
    data = experiment.model_dump(mode="json")["data"]
    units = {}
    for name, unit in {"a": "mg/dl", "b": "mmol/l"}.items():
        units |= make_services(tmp_path / "units", [name], data, part=None, units={"glucose": unit})
    assert not {*units["a"].federation.ids} & {*units["b"].federation.ids}  # clients of sites have names of their own
    wrong = {"factory": "os:getcwd"}
    cases = [
        (tables, {}, DataError, ("'c'", "lacks 'age'", "has 'weight'")),
        (units, {}, DataError, ("glucose", "mmol/l", "mg/dl", "'a'")),
        (Sites(experiment, tmp_path).services, {"model": wrong}, PPFLError, ("getcwd",)),
    ]
    for at, (services, changes, error, words) in enumerate(cases):
        asked, folder = make_experiment("fedavg", **changes), tmp_path / str(at)
        assert_refused(Sites(asked, folder, services).run, error, *words)


def run_with_a_late_site(folder, stops=()):
    """Site c comes after round 2; the server is killed after some rounds, and resumes."""
    experiment, stops, resume = make_experiment("ppfl-outputs", rounds=5), [*stops], False
    sites = Sites(experiment, folder)
    sites.since["c"] = None

    def arrive_and_die(seed, end):
        if end.state.round == 2:
            sites.since["c"] = "now"
        if end.state.round in stops:
            stops.remove(end.state.round)
            raise Killed

    options = {"sites": ("a", "b"), "on_round_end": arrive_and_die}
    while True:
        try:
            return sites.run(resume=resume, **options), sites
        except Killed:
            resume = True


def test_a_site_that_joins_late_is_onboarded_and_its_clients_are_scored(tmp_path):
    record, sites = run_with_a_late_site(tmp_path / "whole")
    assert record.ids == tuple(client for name in SITES for client in sites.services[name].federation.ids)
    new = len(sites.services["c"].federation.ids)
    assert [one["participants"] for one in record.metrics] == [len(record.ids) - new] * 2 + [len(record.ids)] * 3
    per_client = record.metrics[-1]["per_client"]
    assert len(per_client) == len(record.ids) and None not in per_client
    c = record.memberships
    assert len(c) == len(record.ids)
    assert not torch.allclose(c[-new:], torch.full_like(c[-new:], 1 / 3)), "its memberships have moved"
    resumed, _ = run_with_a_late_site(tmp_path / "resumed", stops=(3, 4))
    assert_same_bits(resumed, record)


def test_a_late_site_that_does_not_fit_is_turned_away_and_the_run_goes_on(tmp_path):
    experiment = make_experiment("fedavg", rounds=3)
    sites = Sites(experiment, tmp_path)
    data = experiment.model_dump(mode="json")["data"]
    sites.services |= make_services(tmp_path / "sites", ["z"], data, part=None, units={"ink": "ml"})
    sites.since["z"] = "late"
    record = sites.run()
    assert record.finished and counted(record, "sites_refused") == 1
    assert not any(client.startswith("z/") for client in record.ids)


def test_the_membership_of_a_site_that_left_goes_on_to_count(tmp_path):
    experiment, kept = make_experiment("ppfl-outputs", rounds=5), []
    sites = Sites(experiment, tmp_path)

    def leave(seed, end):
        if end.state.round == 3:
            sites.since["b"] = None
        if end.state.round == 4:  # its work for this round had come with the scores of the one before
            kept.append(end.state.server.memberships.clone())

    record = sites.run(on_round_end=leave)
    left = torch.tensor([client in sites.services["b"].federation.ids for client in record.ids])
    memberships = server_of(record)["server.memberships"]
    assert torch.equal(memberships[left], kept[0][left])
    assert not torch.equal(memberships[~left], kept[0][~left])
