"""Sites that are slow, dead, started anew, or send what cannot be used: one log line, a count, and the run goes on."""

import logging
from contextlib import suppress

import pytest
import torch

from kit.messages import payload_of, tree_map, with_payload
from kit.refusals import DataError, PPFLError, assert_refused
from kit.sites import SITES, Killed, Sites, assert_same_bits, at_replies, make_experiment, make_services, server_of
from ppfl.algorithms import Rows
from ppfl.federation.envelope import seal, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.site_mail import Patience


def counted(record, name):
    """The sum over rounds of something that is left out where it is 0."""
    return sum(one.get(name, 0) for one in record.metrics)


def replies(change):
    """Each reply in a message is changed."""
    return lambda sealed: with_payload(sealed, [change(reply) for reply in payload_of(sealed)])


def totals(change):
    return replies(lambda reply: reply._replace(totals=tree_map(change, reply.totals)))


def off_the_simplex(reply):
    rows = reply.rows
    return reply._replace(rows=Rows(rows.ids, {n: 2 * x if n == "membership" else x for n, x in rows.values.items()}))


BAD_REPLIES = {  # by a word of the log line
    "not finite": totals(lambda leaf: leaf * torch.nan),
    "expected": totals(lambda leaf: leaf[..., None]),
    "norm": totals(lambda leaf: leaf * 1e9),
    "missing": replies(lambda reply: reply._replace(totals={f"my {n}": x for n, x in reply.totals.items()})),
    "not one of its own": replies(lambda reply: reply._replace(rows=Rows(("nobody",), {"x": torch.ones(1, 3)}))),
    "does not show": replies(lambda reply: reply._replace(rows=Rows((), {"x": torch.zeros(0, 5)}))),
    "simplex": replies(off_the_simplex),
    "no message of ppfl": lambda sealed: b"",
    "'b'": lambda sealed: sealed[: len(sealed) // 2],
    "another run": lambda sealed: seal(unseal(sealed)._replace(run="another run")),
    "'a'": lambda sealed: seal(unseal(sealed)._replace(site="a")),
    "one reply for each": lambda sealed: with_payload(sealed, {"not": "a list"}),
}


@pytest.mark.parametrize("reason", BAD_REPLIES)
def test_a_bad_reply_is_refused_and_the_run_goes_on(reason, tmp_path, caplog):
    method, seen = "ppfl-outputs" if reason == "simplex" else "fedavg", []
    sites = Sites(make_experiment(method, rounds=3), tmp_path)

    def change_the_second_training(sealed):
        if any(reply.totals for reply in payload_of(sealed)):
            seen.append(sealed)
            return BAD_REPLIES[reason](sealed) if len(seen) == 2 else sealed
        return sealed

    sites.faults["b"] = change_the_second_training
    with caplog.at_level(logging.WARNING, "ppfl.federation"):
        record = sites.run()
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 1 and "'b'" in said[0] and reason in said[0]
    assert record.finished and counted(record, "sites_refused") == 1
    if method == "fedavg":  # which has one exchange in every round
        here = len(sites.services["b"].federation.ids)
        assert [one["participants"] for one in record.metrics] == [len(record.ids) - lost for lost in (0, here, 0)]
    assert all(bool(leaf.isfinite().all()) for leaf in server_of(record).values())


def test_a_straggler_is_left_out_and_too_few_sites_are_an_error_that_names_those_missing(tmp_path):
    sites = Sites(make_experiment("ditto", rounds=4), tmp_path)
    sites.faults["a"] = lambda sealed: 6.0  # so that time goes on
    sites.faults["c"] = at_replies({4}, lambda sealed: 70.0)
    record = sites.run(patience=Patience(deadline=60, resend=1000))
    assert record.finished and (counted(record, "sites_lost"), counted(record, "sites_late")) == (1, 1)
    assert counted(record, "lost") == len(sites.services["c"].federation.ids)
    sites.folder, sites.faults["c"] = tmp_path / "second", at_replies(range(4, 100), lambda sealed: None)
    with pytest.raises(FederationError, match="2 of 3 sites answered, at least 3 .* 'c'"):
        sites.run(patience=Patience(deadline=60, at_least=3))


def kill(sealed):
    """After the sites have worked, before the server has heard of it."""
    raise Killed


@pytest.mark.parametrize("method", ["ditto", "scaffold", "ppfl-weights", "ppfl-outputs", "fedem"])
def test_a_site_or_a_server_that_is_killed_and_started_again_ends_with_the_same_bits(method, tmp_path):
    experiment = make_experiment(method, rounds=4)
    undisturbed = Sites(experiment, tmp_path / "undisturbed").run()
    sites = Sites(experiment, tmp_path / "site killed")

    def die(sealed):
        """The reply is lost with the process that did the work; another one comes up."""
        sites.restart("b")
        sites.since["b"] = f"message {len(sites.pushed)}"

    sites.faults["b"] = at_replies({4, 7}, die)
    record = sites.run()
    assert counted(record, "sites_resent") == 2
    assert_same_bits(record, undisturbed)

    sites = Sites(experiment, tmp_path / "server killed")
    sites.faults["b"] = at_replies({4, 9}, kill)
    for resume in (False, True):
        with pytest.raises(Killed):
            sites.run(resume=resume)
        for name in SITES:
            sites.restart(name)
    assert_same_bits(sites.run(resume=True), undisturbed)


def test_a_server_resumes_with_a_site_missing(tmp_path):
    sites = Sites(make_experiment("ditto", rounds=4), tmp_path)
    sites.faults["a"] = at_replies({5}, kill)
    with pytest.raises(Killed):
        sites.run()
    sites.faults["c"] = at_replies(range(2, 100), lambda sealed: None)  # away after it has described its data
    record = sites.run(resume=True, patience=Patience(deadline=5))
    assert record.finished and counted(record, "sites_lost") > 0


def test_a_site_that_lost_its_store_is_set_up_again(tmp_path):
    sites = Sites(make_experiment("ditto", rounds=4), tmp_path)

    def delete_store(sealed):
        for file in sites.services["b"].base.glob("state.sqlite*"):
            file.unlink()
        sites.restart("b")
        return sealed

    sites.faults["b"] = at_replies({6}, delete_store)
    record = sites.run()
    assert record.finished and not counted(record, "sites_refused") + counted(record, "sites_lost")


def test_sites_that_do_not_fit_are_refused_by_name_before_the_first_round(tmp_path):
    tables, units, data = {}, {}, {"name": "csv", "file": "t.csv", "client": "who", "target": "y"}
    for name, column, unit in [("a", "age", "mg/dl"), ("b", "age", "mmol/l"), ("c", "weight", "mg/dl")]:
        (tmp_path / name).mkdir()
        rows = [f"p{at % 3},{40 + at * at % 7},{at % 2}" for at in range(12)]
        (tmp_path / name / "t.csv").write_text("\n".join([f"who,{column},y", *rows]))
        tables |= make_services(tmp_path, [name], data, part=None)
        units |= make_services(tmp_path, [name], data, part=None, units={"age": unit})
    experiment = make_experiment("fedavg")
    foreign_code = make_experiment("fedavg", model={"name": "os:getcwd"})
    for asked, services, error, words in [
        (experiment, tables, DataError, ("'c'", "lacks 'age'", "has 'weight'")),
        (experiment, {name: units[name] for name in "ab"}, DataError, ("age", "mmol/l", "mg/dl", "'a'")),
        (foreign_code, None, PPFLError, ("getcwd",)),
    ]:
        assert_refused(Sites(asked, tmp_path / words[0], services).run, error, *words)


def run_with_a_late_site(folder, stops=()):
    """Site c comes after round 2; the server is killed after some rounds, and resumes."""
    sites = Sites(make_experiment("ppfl-outputs", rounds=5), folder)
    sites.since["c"] = None
    for resume, stop in enumerate([*stops, None]):

        def arrive_and_die(seed, end):
            if end.state.round == 2:
                sites.since["c"] = "now"
            if end.state.round == stop:
                raise Killed

        with suppress(Killed):
            record = sites.run(sites=("a", "b"), on_round_end=arrive_and_die, resume=bool(resume))
    return record, sites


def test_a_site_that_joins_late_is_onboarded_and_its_clients_are_scored(tmp_path):
    record, sites = run_with_a_late_site(tmp_path / "whole")
    assert record.ids == tuple(client for name in SITES for client in sites.services[name].federation.ids)
    new = len(sites.services["c"].federation.ids)
    assert [one["participants"] for one in record.metrics] == [len(record.ids) - new] * 2 + [len(record.ids)] * 3
    per_client = record.metrics[-1]["per_client"]
    assert len(per_client) == len(record.memberships) == len(record.ids) and None not in per_client
    c = record.memberships[-new:]
    assert not torch.allclose(c, torch.full_like(c, 1 / 3)), "its memberships have moved"
    resumed, _ = run_with_a_late_site(tmp_path / "resumed", stops=(3, 4))
    assert_same_bits(resumed, record)


def test_the_membership_of_a_site_that_left_goes_on_to_count(tmp_path):
    sites, kept = Sites(make_experiment("ppfl-outputs", rounds=5), tmp_path), []

    def leave(seed, end):
        if end.state.round == 3:
            sites.since["b"] = None
        if end.state.round == 4:  # its work for this round had come with the scores of the one before
            kept.append(end.state.server.memberships.clone())

    record = sites.run(on_round_end=leave)
    left = torch.tensor([client in sites.services["b"].federation.ids for client in record.ids])
    memberships = server_of(record)["state.server.memberships"]
    assert torch.equal(memberships[left], kept[0][left])
    assert not torch.equal(memberships[~left], kept[0][~left])
