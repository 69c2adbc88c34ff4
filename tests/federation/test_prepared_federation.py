"""Sites with tables of text and gaps prepare their rows as one process with all rows does."""

import json

import pandas as pd
import pytest
import torch

from kit.experiments import StopError, stop_after
from kit.files import make_table, with_gaps
from kit.messages import payload_of, with_payload
from kit.refusals import DataError, assert_refused
from kit.sites import SITES, SUMS_ALONE, Sites, assert_same_bits, make_services, models_of, sent_fields, server_of
from kit.sites import make_experiment as make_site_experiment
from ppfl import load
from ppfl.federation.federation_errors import FederationError
from ppfl.runs import run
from ppfl.sites import predict_table

TABLE = {"name": "csv", "file": "table.csv", "client": "client", "target": "y", "test_fraction": 0.0}
PLACES = dict(zip(SITES, ("east", "nort", "sout"), strict=True))  # how the clients of each site are called
FILLED = {"missing": "fill", "text": ["code"], "standardise_target": True}


def make_experiment(method="fedavg", rounds=3, preparation=FILLED, **settings):
    return make_site_experiment(method, rounds, data=TABLE, preparation=preparation, **settings)


def start_sites(experiment, folder, frame, secure=False, **changes):
    """Each site has a file with its own rows; `changes` are columns that a site has otherwise."""
    for site, place in PLACES.items():
        (folder / "sites" / site).mkdir(parents=True, exist_ok=True)
        mine = frame[frame.client.str.startswith(place)].assign(**changes.get(site, {}))
        mine.to_csv(folder / "sites" / site / "table.csv", index=False)
    services = make_services(folder / "sites", SITES, TABLE, part=None, secure=secure)
    return Sites(experiment, folder, services, secure=secure)


def data_of(sites, site):
    """As the site has prepared them for the run."""
    return sites.services[site]._opened.site.federation


def preparation_of(folder):
    return json.loads((folder / "out" / "seed-0" / "clients.json").read_text())["spec"]["preparation"]


def sent_by_a(folder):
    """The names of what site a sent to the server."""
    return {name for _, _, name, _ in sent_fields(folder / "sites" / "a")}


@pytest.mark.parametrize("method", ["fedavg", "ppfl-weights"])
def test_three_sites_with_text_and_gaps_train_and_predict_as_one_process_does(method, tmp_path):
    """One site has a level that no other has, another one has no value in a column, and one column is constant."""
    frame = with_gaps(make_table())
    frame["y"] += 100
    experiment = make_experiment(method)
    sites = start_sites(experiment, tmp_path, frame)
    there = sites.run()
    names = {place: f"{site}/" for site, place in PLACES.items()}  # the server knows clients with their site's name
    whole = frame.assign(client=[names[client[:4]] + client for client in frame.client])
    whole.to_csv(tmp_path / "table.csv", index=False)
    (alone,) = run(experiment, tmp_path / "alone", base=tmp_path)
    assert there.finished and {*there.ids} == {*alone.ids}
    assert [one["loss"] for one in there.metrics] == pytest.approx([one["loss"] for one in alone.metrics], abs=1e-5)
    pooled, federated = server_of(alone), server_of(there)
    shared = [name for name in pooled if name.startswith("state.server.shared")]
    assert shared
    for name in shared:
        torch.testing.assert_close(federated[name], pooled[name], rtol=0, atol=1e-5)

    models, mine = models_of(sites.services["a"]), frame[frame.client == "east-0"].drop(columns="y")
    mine.to_csv(tmp_path / "new.csv", index=False)  # a new table is prepared as the site's own was
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    assert predict_table(models.personal, new, "client", out, models.name_of) == len(mine)
    found = pd.read_csv(tmp_path / "out.csv")["prediction"].tolist()
    assert found == pytest.approx(load(alone.folder).predict("a/east-0", mine).reshape(-1), abs=1e-3)
    assert 90 < min(found) < max(found) < 110  # as the targets were before they were standardised


def test_secure_sums_give_the_same_preparation_and_show_no_sum_of_a_site(tmp_path):
    frame = with_gaps(make_table()).drop(columns="tiny")
    start_sites(make_experiment(**SUMS_ALONE), tmp_path, frame, secure=True).run()
    start_sites(make_experiment(), tmp_path / "open", frame).run()
    here, there = preparation_of(tmp_path), preparation_of(tmp_path / "open")
    assert here["rows"] == there["rows"]
    for one, other in zip(here["columns"], there["columns"], strict=True):
        assert one["levels"] == other["levels"] and one["missing"] == other["missing"]
        assert one["mean"] == pytest.approx(other["mean"], rel=1e-5, abs=1e-5)
        assert one["scale"] == pytest.approx(other["scale"], rel=1e-3)
    sums = {"metrics.sum", "metrics.square", "metrics.levels"}
    assert not sums & sent_by_a(tmp_path) and sums <= sent_by_a(tmp_path / "open")
    assert {"facts.levels.ward", "facts.levels.code"} <= sent_by_a(tmp_path / "open")

    named = make_experiment(rounds=1, preparation={"levels": {"ward": ["a", "b", "only-east"]}})
    start_sites(named, tmp_path / "named", make_table()).run()  # so no names of levels leave a site
    assert not any(name.startswith("facts.levels") for name in sent_by_a(tmp_path / "named"))
    large = make_table().assign(age=1e30)
    sites = start_sites(make_experiment(**SUMS_ALONE), tmp_path / "large", large, secure=True)
    assert_refused(sites.run, DataError, "too large", "larger unit")


def test_a_run_that_resumes_keeps_its_preparation(tmp_path):
    """It is not summed again, and every row becomes the same numbers as before."""
    experiment, frame = make_experiment(rounds=4), make_table()
    whole = start_sites(experiment, tmp_path / "whole", frame).run()
    sites = start_sites(experiment, tmp_path, frame)
    with pytest.raises(StopError):
        sites.run(on_round_end=stop_after(2))
    for name in SITES:
        sites.restart(name)
    sites.pushed.clear()
    record = sites.run(resume=True)
    assert record.finished and preparation_of(tmp_path) == preparation_of(tmp_path / "whole")
    assert not any(b"SumColumns" in message for _, message in sites.pushed)
    assert_same_bits(record, whole)


@pytest.mark.parametrize("fits", [True, False])
def test_a_site_that_joins_later_uses_the_preparation_as_it_is_or_is_turned_away(fits, tmp_path):
    sites = start_sites(make_experiment(), tmp_path, make_table(), c={} if fits else {"age": "old"})
    sites.since["c"] = None

    def come_online(seed, end):
        sites.since["c"] = "later"

    record = sites.run(sites=("a", "b"), on_round_end=come_online)
    assert record.finished and any(client.startswith("c/") for client in record.ids) == fits
    agreed = preparation_of(tmp_path)
    assert agreed["rows"] == sum(len(data_of(sites, name).train) for name in ("a", "b"))
    if fits:
        assert data_of(sites, "c").preparation.model_dump(mode="json") == agreed
    else:
        ledger = (tmp_path / "out" / "seed-0.federation" / "ledger.jsonl").read_text()
        assert "column 'age' has text, expected numbers" in ledger
        sites.folder = tmp_path / "from the start"
        assert_refused(sites.run, DataError, "'age'", "'c'", "'a'")


def test_sums_of_a_site_that_make_no_sense_stop_the_run_before_it_begins(tmp_path, caplog):
    sites = start_sites(make_experiment(), tmp_path, make_table())

    def change(sealed):
        (reply, *_) = payload_of(sealed)
        if "levels" not in reply.metrics:
            return sealed
        wrong = {"levels": -1 - reply.metrics["levels"]}
        return with_payload(sealed, [reply._replace(metrics=reply.metrics | wrong)])

    sites.faults["c"] = change
    assert_refused(sites.run, FederationError, "2 of 3 sites")
    assert "negative" in caplog.text
