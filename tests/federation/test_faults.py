"""Sites that are slow, dead, started anew, or send what cannot be used: one log line, a count, and the run goes on."""

import logging

import pytest
import torch

from federation.test_federated_run import SITES, make_experiment, run_over_sites, server_of
from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl.algorithms import Rows
from ppfl.core.errors import DataError
from ppfl.core.trees import tree_map
from ppfl.federation.envelope import ERROR, seal, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.site_mail import Patience
from ppfl.sites.wire import decode, encode


def federation(experiment, folder):
    clock = FakeClock()
    data = experiment.model_dump(mode="json")["data"]
    return FakeCarrier(make_services(folder / "sites", SITES, data), clock), clock


def changed_train(change, rounds=(2,)):
    """A fault that changes a site's first reply to training in which anything was sent, after so many others."""
    seen = []

    def fault(sealed):
        envelope = unseal(sealed)
        if envelope.kind == ERROR:
            return sealed
        replies = decode(envelope.payload)
        if not any(reply.totals for reply in replies):
            return sealed
        seen.append(True)
        if len(seen) not in rounds:
            return sealed
        return seal(envelope._replace(payload=encode([change(reply) for reply in replies])))

    return fault


def with_totals(reply, change):
    return reply._replace(totals={name: change(name, total) for name, total in reply.totals.items()})


def not_finite(reply):
    return with_totals(reply, lambda name, total: tree_map(lambda leaf: leaf * float("nan"), total))


def other_shape(reply):
    return with_totals(reply, lambda name, total: tree_map(lambda leaf: leaf[..., None], total))


def other_names(reply):
    return reply._replace(totals={f"my {name}": total for name, total in reply.totals.items()})


def huge(reply):
    return with_totals(reply, lambda name, total: tree_map(lambda leaf: leaf * 1e9, total))


def strange_clients(reply):
    return reply._replace(rows=Rows(("nobody",), {"membership": torch.ones(1, 3) / 3}))


def rows_that_are_not_shown(reply):
    return reply._replace(rows=Rows((), {"x": torch.zeros(0, 5)}))


BAD_REPLIES = {
    "not finite": not_finite,
    "expected": other_shape,
    "missing": other_names,
    "norm": huge,
    "not one of its own": strange_clients,
    "does not show": rows_that_are_not_shown,
}


@pytest.mark.parametrize("reason", BAD_REPLIES)
def test_a_bad_reply_is_refused_and_the_run_goes_on(reason, tmp_path, caplog):
    experiment = make_experiment("fedavg", rounds=4)
    carrier, clock = federation(experiment, tmp_path)
    carrier.faults["b"] = [changed_train(BAD_REPLIES[reason])]
    with caplog.at_level(logging.WARNING, "ppfl.federation"):
        (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 1 and "'b'" in said[0] and reason in said[0]
    assert [one.get("sites_refused", 0) for one in record.metrics] == [0, 1, 0, 0]
    assert [one["participants"] for one in record.metrics][1] < record.metrics[0]["participants"]
    assert all(bool(leaf.isfinite().all()) for leaf in server_of(record.folder).values())


def test_memberships_off_the_simplex_are_refused(tmp_path, caplog):
    experiment = make_experiment("ppfl-outputs", rounds=4)
    carrier, clock = federation(experiment, tmp_path)

    def off(reply):
        rows = {name: leaf * 2 if name == "membership" else leaf for name, leaf in reply.rows.values.items()}
        return reply._replace(rows=Rows(reply.rows.ids, rows))

    carrier.faults["a"] = [changed_train(off, rounds=range(100))]
    with caplog.at_level(logging.WARNING, "ppfl.federation"):
        (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    assert any("simplex" in line.getMessage() for line in caplog.records)
    c = record.memberships
    torch.testing.assert_close(c.sum(1), torch.ones(len(c)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda sealed: b"",
        lambda sealed: sealed[: len(sealed) // 2],
        lambda sealed: seal(unseal(sealed)._replace(run="another run")),
        lambda sealed: seal(unseal(sealed)._replace(site="a")),
        lambda sealed: seal(unseal(sealed)._replace(number=unseal(sealed).number - 1)),
        lambda sealed: seal(unseal(sealed)._replace(payload=encode([{"not": "a reply"}]))),
    ],
)
def test_a_message_that_is_none_or_of_another_run_is_refused(damage, tmp_path):
    experiment = make_experiment("fedavg", rounds=2)
    carrier, clock = federation(experiment, tmp_path)
    count = []
    carrier.faults["b"] = [lambda sealed: count.append(1) or (damage(sealed) if len(count) == 4 else sealed)]
    (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    assert sum(one.get("sites_refused", 0) for one in record.metrics) == 1
    assert record.finished


def test_a_straggler_is_left_out_and_its_late_reply_is_dropped(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    carrier, clock = federation(experiment, tmp_path)
    count = []
    carrier.faults["a"] = [lambda sealed: 6.0]  # so that time goes on
    carrier.faults["c"] = [lambda sealed: count.append(1) or (70.0 if len(count) == 4 else sealed)]
    patience = Patience(deadline=60, resend=1000)
    (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, patience=patience)
    lost, late = (sum(one.get(f"sites_{what}", 0) for one in record.metrics) for what in ("lost", "late"))
    assert (lost, late) == (1, 1)
    assert record.finished
    assert sum(one.get("lost", 0) for one in record.metrics) == len(carrier.services["c"].federation.ids)


def test_too_few_sites_stop_the_run_with_an_error_that_names_them(tmp_path):
    experiment = make_experiment("fedavg", rounds=4)
    carrier, clock = federation(experiment, tmp_path)
    count = []
    carrier.faults["c"] = [lambda sealed: count.append(1) or (None if len(count) >= 4 else sealed)]
    with pytest.raises(FederationError, match="2 of 3 sites answered, at least 3 .* 'c'"):
        run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, patience=Patience(deadline=60, at_least=3))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "scaffold", "ppfl-weights"])
def test_a_site_that_is_killed_in_a_round_and_started_again_changes_nothing(method, tmp_path):
    experiment = make_experiment(method, rounds=4)
    (undisturbed,) = run_over_sites(experiment, tmp_path / "undisturbed")
    carrier, clock = federation(experiment, tmp_path / "disturbed")
    count = []

    def die(sealed):
        """The reply of a message is lost with the process, before or after it was done; another one comes up."""
        count.append(1)
        if len(count) not in (4, 7):
            return sealed
        old = carrier.services["b"]
        old.close()
        carrier.services["b"] = type(old)(old.settings, old.base)
        carrier.since["b"] = f"start {len(count)}"
        return None

    carrier.faults["b"] = [die]
    (record,) = run_over_sites(experiment, tmp_path / "disturbed", carrier=carrier, clock=clock)
    assert sum(one.get("sites_resent", 0) for one in record.metrics) == 2
    expected = server_of(undisturbed.folder)
    for name, leaf in server_of(record.folder).items():
        assert torch.equal(leaf, expected[name]), name


class Killed(BaseException):
    """Ends the server without any of its clean-up."""


@pytest.mark.parametrize("method", ["ditto", "scaffold", "ppfl-outputs", "fedem"])
def test_a_server_that_is_killed_and_resumes_ends_with_the_same_bits(method, tmp_path):
    experiment = make_experiment(method, rounds=5)
    (undisturbed,) = run_over_sites(experiment, tmp_path / "undisturbed")
    carrier, clock = federation(experiment, tmp_path / "disturbed")
    count = []

    def kill(sealed):
        """After the sites have worked, before the server has heard of it."""
        count.append(1)
        if len(count) in (6, 12):
            raise Killed
        return sealed

    carrier.faults["b"] = [kill]
    for resume in (False, True, True):
        try:
            (record,) = run_over_sites(experiment, tmp_path / "disturbed", carrier=carrier, clock=clock, resume=resume)
            break
        except Killed:
            carrier.services = {
                name: type(old)(old.settings, old.base) for name, old in carrier.services.items() if not old.close()
            }
    assert resume, "the server was killed at least once"
    expected = server_of(undisturbed.folder)
    for name, leaf in server_of(record.folder).items():
        assert torch.equal(leaf, expected[name]), name


def test_a_server_resumes_with_a_site_missing(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    carrier, clock = federation(experiment, tmp_path)
    count = []

    def kill(sealed):
        count.append(1)
        if len(count) == 5:
            raise Killed
        return sealed

    carrier.faults["a"] = [kill]
    with pytest.raises(Killed):
        run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    count.append(1)
    gone = iter([None])

    def away_after_describing(sealed):
        return sealed if next(gone, "away") is None else None

    carrier.faults["c"] = [away_after_describing]
    (record,) = run_over_sites(
        experiment, tmp_path, carrier=carrier, clock=clock, resume=True, patience=Patience(deadline=5)
    )
    assert record.finished and sum(one.get("sites_lost", 0) for one in record.metrics) > 0


def test_a_site_that_lost_its_store_is_set_up_again(tmp_path):
    experiment = make_experiment("ditto", rounds=4)
    carrier, clock = federation(experiment, tmp_path)
    count = []

    def forget(sealed):
        count.append(1)
        if len(count) == 6:
            old = carrier.services["b"]
            old.close()
            for file in old.base.glob("state.sqlite*"):
                file.unlink()
            carrier.services["b"] = type(old)(old.settings, old.base)
        return sealed

    carrier.faults["b"] = [forget]
    (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    assert record.finished
    assert not sum(one.get("sites_refused", 0) + one.get("sites_lost", 0) for one in record.metrics)


# ---------------------------------------------------------------------- before the first round


def test_a_site_with_other_columns_is_refused_by_name(tmp_path):
    clock, services = FakeClock(), {}
    for name, column in {"a": "age", "b": "age", "c": "weight"}.items():
        (tmp_path / name).mkdir()
        rows = [f"p{i % 3},{i},{i % 2}" for i in range(12)]
        (tmp_path / name / "t.csv").write_text("\n".join([f"who,{column},y", *rows]))
        data = {"name": "csv", "file": "t.csv", "client": "who", "target": "y", "task": "classification"}
        services |= make_services(tmp_path, [name], data, part=None)
    experiment = make_experiment("fedavg", data={"name": "digits"})
    with pytest.raises(DataError, match="'c' does not fit: features .* lacks 'age' and it has 'weight'"):
        run_over_sites(experiment, tmp_path, carrier=FakeCarrier(services, clock), clock=clock)


def test_clients_of_sites_have_names_of_their_own(tmp_path):
    data = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}
    services = make_services(tmp_path, ["a", "b"], data, part=None)
    ids = [services[name].federation.ids for name in ("a", "b")]
    assert all(client.startswith("a/") for client in ids[0]) and not set(ids[0]) & set(ids[1])


def test_units_that_differ_are_named(tmp_path):
    data = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}
    services = make_services(tmp_path, ["a"], data, part=None, units={"glucose": "mg/dl"})
    services |= make_services(tmp_path, ["b"], data, part=None, units={"glucose": "mmol/l"})
    clock = FakeClock()
    with pytest.raises(DataError, match="units of 'glucose' is 'mmol/l', at site 'a' it is 'mg/dl'"):
        run_over_sites(make_experiment("fedavg"), tmp_path, carrier=FakeCarrier(services, clock), clock=clock)


def test_a_function_that_the_server_names_is_refused_unless_the_site_allows_it(tmp_path):
    experiment = make_experiment("fedavg", rounds=1, model={"factory": "os:getcwd"})
    carrier, clock = federation(make_experiment("fedavg"), tmp_path)
    with pytest.raises(Exception, match="getcwd"):
        run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)


# ---------------------------------------------------------------------- sites that come and go


def test_a_site_that_joins_late_is_onboarded_and_its_clients_are_scored(tmp_path):
    experiment = make_experiment("ppfl-outputs", rounds=6)
    carrier, clock = federation(experiment, tmp_path)
    carrier.since["c"] = None  # it is not there at the beginning

    def arrive(seed, end):
        if end.state.round == 2:
            carrier.since["c"] = "now"

    (record,) = run_over_sites(
        experiment, tmp_path, carrier=carrier, clock=clock, sites=("a", "b"), on_round_end=arrive
    )
    services = carrier.services
    assert record.ids == tuple(client for name in SITES for client in services[name].federation.ids)
    new = len(services["c"].federation.ids)
    assert [one["participants"] for one in record.metrics] == [len(record.ids) - new] * 2 + [len(record.ids)] * 4
    per_client = record.metrics[-1]["per_client"]
    assert len(per_client) == len(record.ids) and None not in per_client
    c = record.memberships
    assert c.shape[0] == len(record.ids)
    assert not torch.allclose(c[-new:], torch.full_like(c[-new:], 1 / 3)), "its memberships have moved"


def test_a_run_with_a_site_that_joined_can_be_resumed(tmp_path):
    experiment = make_experiment("ppfl-outputs", rounds=6)

    def go(folder, stop_at):
        carrier, clock = federation(experiment, folder)
        carrier.since["c"] = None

        def arrive_and_die(seed, end):
            if end.state.round == 2:
                carrier.since["c"] = "now"
            if end.state.round in stop_at:
                stop_at.remove(end.state.round)
                raise Killed

        resume = False
        while True:
            try:
                (record,) = run_over_sites(
                    experiment, folder, carrier=carrier, clock=clock, sites=("a", "b"), on_round_end=arrive_and_die,
                    resume=resume,
                )  # fmt: skip
                return record
            except Killed:
                resume = True

    expected, found = (server_of(go(tmp_path / str(at), [3, 5][:at]).folder) for at in (0, 2))
    for name, leaf in found.items():
        assert torch.equal(leaf, expected[name]), name


def test_a_late_site_that_does_not_fit_is_turned_away_and_the_run_goes_on(tmp_path):
    experiment = make_experiment("fedavg", rounds=4)
    carrier, clock = federation(experiment, tmp_path)
    other = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}
    carrier.services |= make_services(tmp_path / "sites", ["z"], other, part=None, units={"ink": "ml"})
    carrier.since["z"] = "late"
    (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock)
    assert record.finished and sum(one.get("sites_refused", 0) for one in record.metrics) == 1
    assert not any(client.startswith("z/") for client in record.ids)


def test_the_membership_of_a_site_that_left_goes_on_to_count(tmp_path):
    experiment = make_experiment("ppfl-outputs", rounds=5)
    carrier, clock = federation(experiment, tmp_path)
    kept = {}

    def leave(seed, end):
        if end.state.round == 3:
            carrier.since["b"] = None
        if end.state.round == 4:  # its work for this round had come with the scores of the one before
            kept["memberships"] = end.state.server.memberships.clone()

    (record,) = run_over_sites(experiment, tmp_path, carrier=carrier, clock=clock, on_round_end=leave)
    rows = [record.ids.index(client) for client in carrier.services["b"].federation.ids]
    memberships = server_of(record.folder)["server.memberships"]
    assert torch.equal(memberships[rows], kept["memberships"][rows])
    others = [at for at in range(len(record.ids)) if at not in rows]
    assert not torch.equal(memberships[others], kept["memberships"][others])
