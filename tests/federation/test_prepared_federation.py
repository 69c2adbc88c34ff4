"""Sites with tables of text and gaps prepare their rows as one process with all rows does."""

import json

import pandas as pd
import pytest
import torch

from data.test_preparation import make_table, with_gaps
from federation.test_federated_run import SITES, run_over_sites, server_of
from federation.test_secure_federation import SECURE, SUMS_ALONE
from kit.masked_sites import PAIRS
from kit.sites import FakeCarrier, FakeClock
from ppfl.core.errors import DataError
from ppfl.data.column_sums import make_plan
from ppfl.data.preparation_settings import PreparationSettings
from ppfl.data.sample_kind import SampleKind
from ppfl.data.table_rows import TableRows
from ppfl.federation.column_agreement import agree_on_columns, plan_to_json
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.reply_checks import ReplyChecks
from ppfl.federation.site_requests import SumColumns
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import SiteSettings
from ppfl.report.page import render
from ppfl.runs import run
from ppfl.runs.experiment import Experiment
from ppfl.runs.run import read_data
from ppfl.runs.storage import read_json, write_toml
from ppfl.server import DivergedError
from ppfl.sites import Reply

TABLE = {"name": "csv", "file": "table.csv", "client": "client", "target": "y"}
PLACES = dict(zip(SITES, ("east", "nort", "sout"), strict=True))  # how the clients of each site are called


def make_experiment(method="fedavg", rounds=3, preparation=None, **settings):
    algorithm = {"name": method, "lr": 0.1, "batch_size": 20}
    if method == "ppfl":
        algorithm |= {"share_memberships": False}
        settings |= {"population": {"k": 2}}
    return Experiment.model_validate(
        {
            "name": "prepared", "rounds": rounds, "data": TABLE, "model": {"name": "linear"}, "algorithm": algorithm,
            "preparation": preparation or {"missing": "fill", "text": ["code"]}, **settings,
        }
    )  # fmt: skip


def make_sites(folder, frame, **settings):
    """Each site has a file with its own rows, read as such."""
    services = {}
    for site, place in PLACES.items():
        (folder / site).mkdir(parents=True, exist_ok=True)
        frame[frame.client.str.startswith(place)].to_csv(folder / site / "table.csv", index=False)
        one = SiteSettings.model_validate({"name": site, "data": TABLE} | settings)
        services[site] = SiteService(one, folder / site)
    return services


def as_one_table(folder, frame):
    """The rows of all sites in one file, with clients as the server knows them."""
    folder.mkdir(parents=True)
    site = {place: name for name, place in PLACES.items()}
    whole = frame.assign(client=[f"{site[client[:4]]}/{client}" for client in frame.client])
    whole.to_csv(folder / "table.csv", index=False)
    return folder


def run_prepared(folder, experiment, frame, services=None, faults=None, **options):
    clock = FakeClock()
    carrier = FakeCarrier(services or make_sites(folder / "sites", frame), clock)
    carrier.faults.update(faults or {})
    return run_over_sites(experiment, folder, carrier=carrier, clock=clock, **options), carrier


def preparation_of(folder):
    return read_json(folder / "out" / "seed-0" / "clients.json")["kind"]["preparation"]


def fields_of(line):
    return [field for message in line.get("messages", ()) for field in message["fields"]]


@pytest.mark.parametrize("method", ["fedavg", "ppfl"])
def test_three_sites_with_text_and_gaps_train_as_one_process_does(method, tmp_path):
    """One site has a level that no other has, another one has no value in a column, and one column is constant."""
    # which rows are held out depends on a client's name, and sites put their own name before it after that
    frame, data = with_gaps(make_table()), {**TABLE, "test_fraction": 0.0}
    experiment = make_experiment(method, data=data)
    (there,), carrier = run_prepared(tmp_path, experiment, frame, make_sites(tmp_path / "sites", frame, data=data))
    base = as_one_table(tmp_path / "whole", frame)
    together = read_data(experiment, base)
    assert there.finished and set(there.ids) == set(together.ids)
    for site in carrier.services.values():
        federation = site._opened.site.federation
        assert federation.features == together.features
        for client in federation.ids:
            here, pooled = federation.client(client)["train"], together.client(client)["train"]
            torch.testing.assert_close(here.x, pooled.x, rtol=0, atol=1e-6)
    (alone,) = run(experiment, tmp_path / "alone", base=base)
    pooled = server_of(alone.folder)
    shared = {name: leaf for name, leaf in server_of(there.folder).items() if name.startswith("server.shared")}
    assert shared
    for name, leaf in shared.items():
        torch.testing.assert_close(leaf, pooled[name], rtol=0, atol=1e-5)
    assert [one["loss"] for one in there.metrics] == pytest.approx([one["loss"] for one in alone.metrics], abs=1e-5)


def test_secure_sums_give_the_same_preparation_and_show_no_sum_of_a_site(tmp_path):
    frame = with_gaps(make_table()).drop(columns="tiny")
    keys = {name: key.decode().strip() for name, key in SECURE.public_keys.items()}
    for name in SITES:
        (tmp_path / "sites" / name).mkdir(parents=True)
        (tmp_path / "sites" / name / "site.key").write_bytes(PAIRS[name].private_key)
        secure = {"settings": SECURE.settings.model_dump(), "public_keys": keys}
        write_toml(tmp_path / "sites" / name / "secure_sums.toml", secure)
    masked = make_sites(tmp_path / "sites", frame, private_key="site.key", secure_sums="secure_sums.toml")
    run_prepared(tmp_path, make_experiment(**SUMS_ALONE), frame, masked, secure=SECURE)
    run_prepared(tmp_path / "open", make_experiment(), frame)
    here, there = preparation_of(tmp_path), preparation_of(tmp_path / "open")
    assert here["rows"] == there["rows"]
    for one, other in zip(here["columns"], there["columns"], strict=True):
        assert one["levels"] == other["levels"] and one["missing"] == other["missing"]
        assert one["mean"] == pytest.approx(other["mean"], rel=1e-5, abs=1e-5)
        assert one["scale"] == pytest.approx(other["scale"], rel=1e-3)
    lines = map(json.loads, (tmp_path / "sites" / "a" / "ledger.jsonl").read_text().splitlines())
    sent = [field for line in lines if line.get("direction") == "to server" for field in fields_of(line)]
    assert not {"metrics.sum", "metrics.levels", "metrics.missing"} & {field["field"] for field in sent}


def test_the_ledger_names_the_levels_that_leave_a_site_and_named_levels_do_not(tmp_path):
    def fields_sent(folder, preparation):
        run_prepared(folder, make_experiment(rounds=1, preparation=preparation), make_table())
        lines = map(json.loads, (folder / "sites" / "a" / "ledger.jsonl").read_text().splitlines())
        return {field["field"] for line in lines if line.get("direction") == "to server" for field in fields_of(line)}

    found = fields_sent(tmp_path / "found", {"text": ["code"]})
    assert {"facts.levels.ward", "facts.levels.code", "metrics.levels", "metrics.sum", "metrics.square"} <= found
    named = {"levels": {"ward": ["a", "b", "only-east"]}}
    assert not any(name.startswith("facts.levels") for name in fields_sent(tmp_path / "named", named))


def test_a_run_that_resumes_keeps_its_preparation(tmp_path):
    """It is not summed again, and every row becomes the same numbers as before."""
    frame, whole = make_table(), tmp_path / "whole"
    run_prepared(whole, make_experiment(rounds=4), frame)
    services = make_sites(tmp_path / "sites", frame)
    stopped = []

    def stop(seed, end):
        if end.state.round == 2 and not stopped:
            stopped.append(end)
            raise FederationError("the server is gone")

    with pytest.raises(FederationError, match="gone"):
        run_prepared(tmp_path, make_experiment(rounds=4), frame, services, on_round_end=stop)
    again = {name: SiteService(one.settings, tmp_path / "sites" / name) for name, one in services.items()}
    (record,), carrier = run_prepared(tmp_path, make_experiment(rounds=4), frame, again, resume=True)
    assert record.finished and preparation_of(tmp_path) == preparation_of(whole)
    assert not any(b"SumColumns" in message for _, message in carrier.pushed)
    for name, leaf in server_of(record.folder).items():
        torch.testing.assert_close(leaf, server_of(whole / "out" / "seed-0")[name], rtol=0, atol=0)


def test_a_table_to_predict_is_prepared_as_the_sites_did(tmp_path):
    frame = with_gaps(make_table())
    (record,), carrier = run_prepared(tmp_path, make_experiment(), frame)
    kind = SampleKind.from_json(read_json(record.folder / "clients.json")["kind"])
    site = carrier.services["a"]._opened.site.federation
    mine = frame[frame.client == "east-0"]
    held = {split: part.x for split, part in site.client("a/east-0").items()}
    rows = torch.cat([*held.values()])
    found = kind.batch(mine)
    assert len(found) == len(rows)
    torch.testing.assert_close(found.sort(0).values, rows.sort(0).values, rtol=0, atol=1e-6)


def test_sites_whose_columns_do_not_fit_are_refused_by_name(tmp_path):
    frame = make_table()
    services = make_sites(tmp_path / "sites", frame)
    odd = pd.read_csv(tmp_path / "sites" / "b" / "table.csv").assign(age="old")
    odd.to_csv(tmp_path / "sites" / "b" / "table.csv", index=False)
    services["b"] = SiteService(services["b"].settings, tmp_path / "sites" / "b")
    with pytest.raises(DataError, match="'age' has text at site 'b' and numbers at site 'a'"):
        run_prepared(tmp_path, make_experiment(), frame, services)


def test_a_site_that_did_not_sum_its_columns_stops_the_run_before_it_begins(tmp_path):
    def lose_sums(reply):
        return None if b"square" in reply or b"known" in reply else reply

    with pytest.raises(FederationError, match="2 of 3 sites have summed their columns"):
        run_prepared(tmp_path, make_experiment(), make_table(), faults={"c": [lose_sums]})


def test_a_site_with_text_starts_and_says_what_an_experiment_without_preparation_lacks(tmp_path):
    experiment = make_experiment().model_copy(update={"preparation": None})
    with pytest.raises(FederationError):
        run_prepared(tmp_path, experiment, make_table())
    assert "[preparation]" in (tmp_path / "sites" / "a" / "ledger.jsonl").read_text()


def test_the_report_shows_how_columns_were_prepared(tmp_path):
    (record,), _ = run_prepared(tmp_path, make_experiment(), with_gaps(make_table()))
    page, _ = render([record], "prepared")
    assert "How the columns were prepared" in page and "only-east" in page and "one value" in page


@pytest.mark.parametrize("fits", [True, False])
def test_a_site_that_joins_later_uses_the_preparation_as_it_is_or_is_turned_away(fits, tmp_path):
    frame, clock = make_table(), FakeClock()
    services = make_sites(tmp_path / "sites", frame)
    if not fits:
        file = tmp_path / "sites" / "c" / "table.csv"
        pd.read_csv(file).assign(age="old").to_csv(file, index=False)
        services["c"] = SiteService(services["c"].settings, tmp_path / "sites" / "c")
    carrier = FakeCarrier(services, clock)
    carrier.since["c"] = ""

    def come_online(seed, end):
        carrier.since["c"] = "later"

    experiment = make_experiment(rounds=4)
    options = {"carrier": carrier, "clock": clock, "sites": ("a", "b"), "on_round_end": come_online}
    (record,) = run_over_sites(experiment, tmp_path, **options)
    assert record.finished and any(client.startswith("c/") for client in record.ids) == fits
    agreed = preparation_of(tmp_path)
    assert agreed["rows"] == sum(len(services[name]._opened.site.federation.train) for name in ("a", "b"))
    if fits:
        assert services["c"]._opened.site.federation.preparation.to_json() == agreed
    else:
        ledger = (tmp_path / "out" / "seed-0.federation" / "ledger.jsonl").read_text()
        assert "column 'age' has text, expected numbers" in ledger


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sums: sums | {"sum": sums["sum"] * torch.nan}, "not finite"),
        (lambda sums: sums | {"sum": sums["sum"][:-1]}, "expected sizes"),
        (lambda sums: sums | {"levels": -sums["levels"]}, "levels of columns are negative"),
        (lambda sums: sums | {"rows": 0 * sums["rows"]}, "of no rows"),
    ],
)
def test_sums_of_a_site_that_make_no_sense_are_refused(change, reason):
    rows = TableRows.of(make_table(), "client", "y", PreparationSettings())
    plan = make_plan({"a": rows.describe()}, PreparationSettings())
    request = SumColumns({}, plan_to_json(plan))
    checks, good = ReplyChecks(), Reply(metrics=rows.sums(plan))
    checks.check_alone([request], [good], (), {})
    with pytest.raises(FederationError, match=reason):
        checks.check_alone([request], [good._replace(metrics=change(good.metrics))], (), {})


def test_a_sum_that_secure_sums_cannot_carry_is_one_of_a_column():
    def too_large(requests):
        raise DivergedError("training diverged")

    described = {"a": Reply(facts=TableRows.of(make_table(), "client", "y", PreparationSettings()).describe())}
    with pytest.raises(DataError, match="column's sum is too large.*larger unit"):
        agree_on_columns(too_large, described, PreparationSettings())
