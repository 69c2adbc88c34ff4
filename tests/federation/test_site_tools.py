"""What the owner of a site or of a server looks at: models, predictions, `check` and `status`."""

import csv
import json
import re

import pandas as pd
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from kit.refusals import CheckpointError, DataError, SettingError, assert_refused
from kit.sites import SITES, VISITS, Killed, Sites, at_replies, make_experiment, models_of, write_visits
from ppfl.algorithms import METHODS
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.federation_status import server_status, site_status
from ppfl.federation.provisioning import init_federation
from ppfl.federation.site_check import check_site
from ppfl.federation.site_data import SiteData
from ppfl.federation.site_settings import SiteSettings, load_site
from ppfl.runs import Experiment, load_experiment
from ppfl.sites import export_models, predict_table

X = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """With two runs of which clients' memberships stayed at the site."""
    experiment = make_experiment("ppfl-weights", rounds=2, seeds=[0, 1])
    sites = Sites(experiment, tmp_path_factory.mktemp("models"))
    sites.run()
    return sites.services["a"]


def write_rows(file, clients, columns=64, first=None):
    """A table with rows of X for these clients; `first` replaces the first cell."""
    rows = [[client, *x[:columns]] for client, x in zip(clients, X.tolist(), strict=False)]
    rows[0][1] = rows[0][1] if first is None else first
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["who", *(f"pixel {at}" for at in range(columns))], *rows])
    return file


def read_rows(file):
    with file.open(newline="") as opened:
        return list(csv.reader(opened))


def test_the_latest_run_is_taken_unless_one_is_named(site):
    first, second = site.store.runs()
    assert models_of(site).run == second and models_of(site, first).run == first
    client = site.federation.ids[0]
    assert not torch.equal(*(models_of(site, run).personal.predict(client, X) for run in (first, second)))
    assert_refused(lambda: models_of(site, "other"), CheckpointError, "'other'", "seed-0")


def test_a_row_is_predicted_with_the_model_of_its_client_and_stays_in_its_place(site, tmp_path):
    models, file, out = models_of(site), tmp_path / "new.csv", tmp_path / "predictions.csv"
    clients = [models.personal.ids[at] for at in (1, 0, 1, 2)]
    for rows, words in [
        ({"clients": ["nobody"]}, ("'nobody'", models.personal.ids[0])),
        ({"clients": clients, "columns": 2}, ("(64,)",)),
        ({"clients": clients, "first": ""}, ("missing", "row 1")),
        ({"clients": clients, "first": "much"}, ("has text", "'much'")),
    ]:
        write_rows(file, **rows)
        assert_refused(lambda: predict_table(models.personal, file, "who", out, models.name_of), DataError, *words)
        assert not out.exists()
    numbered = tmp_path / "numbered.parquet"  # ids are compared as text, and 7.0 is the client 7
    pd.DataFrame({"who": [7.0, 8.0]}).to_parquet(numbered)
    assert_refused(
        lambda: predict_table(models.personal, numbered, "who", out, models.name_of), DataError, "no client '7'"
    )
    assert predict_table(models.personal, write_rows(file, clients), "who", out, models.name_of) == 4
    heading, *rows = read_rows(out)
    assert heading[:2] == ["who", "prediction"] and len(heading) == 2 + 10
    for row, client, x in zip(rows, clients, X, strict=True):
        expected = models.personal.predict(client, x[None])[0]
        assert row[0] == client and row[1] == models.personal.spec.classes[int(expected.argmax())]
        assert [float(p) for p in row[2:]] == pytest.approx(expected, abs=1e-6)
    assert_refused(lambda: predict_table(models.personal, file, "who", out, models.name_of), SettingError, "exists")


def test_exported_models_predict_the_same_and_memberships_are_beside_them(site, tmp_path):
    models, out = models_of(site), tmp_path / "models"
    chosen = models.personal.ids[:2]
    assert export_models(models.personal, out, chosen, name_of=models.name_of) == list(chosen)
    _, *rows = read_rows(out / "memberships.csv")
    for client, row in zip(chosen, rows, strict=True):
        net = models.personal.module(client)
        net.load_state_dict(load_file(out / f"{client}.safetensors"))
        torch.testing.assert_close(net(X).softmax(1), models.personal.predict(client, X), rtol=0, atol=1e-6)
        (membership,) = models.personal.memberships([client])
        assert row[0] == client and [float(c) for c in row[1:]] == pytest.approx(membership, abs=1e-6)
    assert_refused(lambda: export_models(models.personal, out), SettingError, "exists")


@pytest.fixture
def clinic(tmp_path):
    """A site's folder as init makes it, with data."""
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(VISITS))
    init_federation(tmp_path / "experiment.toml", ["north", "south"], "fl.example.org", tmp_path / "clinics")
    folder = tmp_path / "clinics" / "sites" / "north"
    write_visits(folder)
    return folder


def check(folder, *problems, changes=None, **of_site):
    """With changes of the experiment and of the site's config there are these problems and no others; the facts."""
    settings = SiteSettings.model_validate(load_site(folder / "site.toml").model_dump() | of_site)
    asked = load_experiment(folder / "experiment.toml").model_dump(mode="json")
    found = check_site(settings, folder, Experiment.model_validate(asked | (changes or {})))
    assert len(found.problems) == len(problems), found.problems
    for pattern in problems:
        assert any(re.search(pattern, one) for one in found.problems), (pattern, found.problems)
    return dict(found.facts)


PRIVATE = {"method": {"name": "ppfl", "lr": 0.1, "share_memberships": False}, "watch": {"report_clients": False}}


def test_a_site_that_is_ready_says_what_its_data_are_and_what_leaves_it(clinic, monkeypatch):
    reads, read_csv = [], pd.read_csv
    monkeypatch.setattr(pd, "read_csv", lambda *given, **more: reads.append(given) or read_csv(*given, **more))
    SiteData(load_site(clinic / "site.toml"), clinic)
    once = len(reads)
    facts = check(clinic)
    assert len(reads) == 2 * once > 0, "the check reads the table more often than the site itself does"
    assert facts["clients"] == "4" and facts["columns"] == "2: age, dose" and facts["classes"] == "2: ill, well"
    assert sum(int(part.split()[0]) for part in facts["samples"].split(", ")) == 31
    assert facts["smallest client"].startswith("north/p3: 1 ")
    shown = check(clinic, changes={"method": {"name": "ppfl", "lr": 0.1, "penalty": 0.1}})["leaves the site"]
    assert all(what in shown for what in ("membership", "label counts", "scores"))
    assert check(clinic, changes=PRIVATE)["leaves the site"] == "sums over its clients, names of clients"
    for method in METHODS:
        population = {"k": 2, "mix": "predictions"} if method in ("cfl", "fedem", "ifca", "ppfl") else {"k": 1}
        facts = check(clinic, changes={"method": {"name": method}, "population": population})
        assert "north/p3" in facts["one step"]
    write_visits(clinic, cell="much")
    prepared = check(clinic, changes={"preparation": {"missing": "fill"}})  # bad cells are no problem there
    assert "levels of text" in prepared["leaves the site"]


def test_all_that_would_be_refused_later_is_named_at_once(clinic):
    secure = {"secure_sums": "secure_sums.toml"}
    check(clinic, "experiment: .*no scores of single clients", **secure)
    (clinic / "narrow.py").write_text("import torch\n\n\ndef net(spec):\n    return torch.nn.Linear(5, 2)\n")
    check(clinic, "model: ", changes={"model": {"name": "narrow:net"}}, allow=["narrow:net"])
    write_visits(clinic, cell="much")
    check(clinic, "data: .*'dose' .1, such as 'much'. have missing values")
    write_visits(clinic, cell="")
    missing = ("data: .*'dose'.*missing", "allow: .*'nowhere:net'")  # the check goes on after the first problem
    assert check(clinic, *missing, changes={"model": {"name": "nowhere:net"}})["missing values"] == "'dose' 1"
    write_visits(clinic, columns="years,dose")
    data = {**VISITS["data"], "columns": ["age", "dose"], "classes": ["ill", "well", "dead"]}
    differs = ("columns: .*age, years", "classes: .*dead", r"test data: .*test_fraction = 0\.2")
    check(clinic, *differs, changes={"data": data}, data={**VISITS["data"], "test_fraction": 0})
    (clinic / "site.key").unlink()
    keys = clinic / "secure_sums.toml"
    keys.write_text(keys.read_text().replace("north = ", "west = "))
    files = ("superlink: ", "private_key: there is no ", "secure_sums: no key of 'north'")
    check(clinic, *files, changes=PRIVATE, superlink=None, **secure)


def bytes_of(file, direction, key, value):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sum(line["bytes"] for line in lines if line.get("direction") == direction and line[key] == value)


def test_the_status_of_a_run_that_goes_on_stops_and_ends(tmp_path):
    sites, out, seen = Sites(make_experiment("fedavg", rounds=3), tmp_path), tmp_path / "out", []
    assert_refused(lambda: server_status(out), FederationError, "no run over sites")

    def look(seed, end):
        (status,) = server_status(out)
        seen.append((status.state, status.round, status.rounds))
        if len(seen) == 2:
            raise Killed

    with pytest.raises(Killed):
        sites.run(on_round_end=look)
    (stopped,) = server_status(out)
    sites.faults["b"] = at_replies({2}, lambda reply: b"nonsense")
    sites.run(on_round_end=look, resume=True)
    (status,) = server_status(out)
    assert seen == [("running", at, 3) for at in (1, 2, 3)]
    assert (stopped.state, stopped.round, stopped.starts) == ("stopped", 2, 1)
    assert (status.state, status.round, status.starts) == ("finished", 3, 2)
    ledger = out / "seed-0.federation" / "ledger.jsonl"
    for name in SITES:
        found = status.sites[name]
        assert found.to_site == bytes_of(ledger, "to site", "site", name)
        assert found.to_server == bytes_of(ledger, "to server", "site", name) > 0 and found.last is not None
    assert {name: found.refused for name, found in status.sites.items()} == {"a": 0, "b": 1, "c": 0}
    with ledger.open("a") as opened:
        opened.write('{"time": 1, "dire')  # a line that is being written does no harm
    assert server_status(out) == [status]


def test_the_status_of_a_site(site, tmp_path):
    assert site_status(site.settings, tmp_path).runs == []
    found = site_status(site.settings, site.base).runs
    assert [one.run for one in found] == list(site.store.runs())
    for one in found:
        assert one.rounds == 2 and one.has_models and one.stored > 0
        assert one.traffic.to_server == bytes_of(site.ledger.file, "to server", "run", one.run) > 0
