"""What the owner of a site or of a server looks at: models, predictions, `check` and `status`."""

import csv
import json
import re
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from kit.refusals import CheckpointError, DataError, SettingError, assert_refused
from kit.sites import SITES, VISITS, Killed, Sites, at_replies, make_experiment, make_services, models_of, write_visits
from ppfl.algorithms import METHODS
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.federation_status import server_status, site_status
from ppfl.federation.provisioning import init_federation
from ppfl.federation.site_check import check_site
from ppfl.federation.site_predictions import export_models, predict_table
from ppfl.federation.site_settings import SiteSettings, load_site
from ppfl.runs import Experiment, load_experiment

X = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))

# ---------------------------------------------------------------------- models and predictions


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """With two runs of which clients' memberships stayed at the site."""
    folder = tmp_path_factory.mktemp("models")
    experiment = make_experiment("ppfl-weights", rounds=2, seeds=[0, 1])
    sites = Sites(experiment, folder)
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


def test_between_two_evaluations_the_models_are_those_of_the_last_one(tmp_path):
    experiment, found = make_experiment("ditto", rounds=5, watch={"every": 2}), {}
    sites = Sites(experiment, tmp_path)

    def look(seed, end):
        if end.state.round >= 2:
            models = models_of(sites.services["a"])
            found[end.state.round] = models.predict(models.ids[0], X)

    sites.run(on_round_end=look)
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[2], found[4]) and not torch.equal(found[4], found[5])


def test_the_latest_run_is_taken_unless_one_is_named(site, tmp_path):
    first, second = site.store.runs()
    assert models_of(site).run == second and models_of(site, first).run == first
    client = site.federation.ids[0]
    assert not torch.equal(*(models_of(site, run).predict(client, X) for run in (first, second)))
    (fresh,) = make_services(tmp_path, ["z"], site.settings.data.model_dump(mode="json")).values()
    assert_refused(lambda: models_of(site, "other"), CheckpointError, "'other'", "seed-0")
    assert_refused(lambda: models_of(fresh), CheckpointError, "no run with models")


def test_a_row_is_predicted_with_the_model_of_its_client_and_stays_in_its_place(site, tmp_path):
    models, out = models_of(site), tmp_path / "predictions.csv"
    clients = [models.ids[at] for at in (1, 0, 1, 2)]
    assert predict_table(models, write_rows(tmp_path / "new.csv", clients), "who", out) == 4
    heading, *rows = read_rows(out)
    assert heading[:2] == ["who", "prediction"] and len(heading) == 2 + 10
    for row, client, x in zip(rows, clients, X, strict=True):
        expected = models.predict(client, x[None])[0]
        assert row[0] == client and row[1] == models.kind.classes[int(expected.argmax())]
        torch.testing.assert_close(torch.tensor([float(p) for p in row[2:]]), expected, rtol=0, atol=1e-6)
    assert_refused(lambda: predict_table(models, tmp_path / "new.csv", "who", out), SettingError, "exists")


def test_rows_that_cannot_be_predicted_leave_no_file(site, tmp_path):
    models, file, out = models_of(site), tmp_path / "new.csv", tmp_path / "out.csv"
    known = models.ids[:1]
    for rows, column, words in [
        ({"clients": ["nobody"]}, "who", ("'nobody'", known[0])),
        ({"clients": known}, "patient", ("'patient'",)),
        ({"clients": known, "columns": 2}, "who", ("(64,)",)),
        ({"clients": known, "first": ""}, "who", ("missing", "row 1")),
        ({"clients": known, "first": "much"}, "who", ("no numbers",)),
    ]:
        write_rows(file, **rows)
        assert_refused(lambda: predict_table(models, file, column, out), DataError, *words)
        assert not out.exists()


def test_exported_models_predict_the_same_and_memberships_are_beside_them(site, tmp_path):
    models, out = models_of(site), tmp_path / "models"
    chosen = models.ids[:2]
    assert export_models(models, out, chosen) == list(chosen)
    _, *rows = read_rows(out / "memberships.csv")
    assert [row[0] for row in rows] == list(chosen)
    for client, row in zip(chosen, rows, strict=True):
        net, saved = models.module(client), load_file(out / f"{client}.safetensors")
        net.load_state_dict(saved)
        torch.testing.assert_close(net(X).softmax(1), models.predict(client, X), rtol=0, atol=1e-6)
        c = torch.tensor([float(value) for value in row[1:]])
        torch.testing.assert_close(c, models.membership(client), rtol=0, atol=1e-6)
    assert_refused(lambda: export_models(models, out), SettingError, "other files")


# ---------------------------------------------------------------------- check


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """A site's folder as init makes it, with data."""
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(VISITS))
    init_federation(tmp_path / "experiment.toml", ["north", "south"], "fl.example.org", tmp_path / "clinics")
    folder = tmp_path / "clinics" / "sites" / "north"
    write_visits(folder)
    return folder


def check(folder: Path, changes=None, **of_site):
    """With changes of the experiment and of the site's config; facts by name, and problems."""
    settings = SiteSettings.model_validate(load_site(folder / "site.toml").model_dump() | of_site)
    asked = load_experiment(folder / "experiment.toml").model_dump(mode="json")
    found = check_site(settings, folder, Experiment.model_validate(asked | (changes or {})))
    return dict(found.facts), found.problems


def assert_problems(found, *patterns: str) -> None:
    """These and no others."""
    _, problems = found
    assert len(problems) == len(patterns), problems
    for pattern in patterns:
        assert any(re.search(pattern, one) for one in problems), (pattern, problems)


def test_a_site_that_is_ready_has_no_problem_and_says_what_its_data_are(clinic):
    facts, problems = check(clinic)
    assert problems == []
    assert facts["clients"] == "4" and facts["columns"] == "2: age, dose" and facts["classes"] == "2: ill, well"
    assert facts["smallest client"].startswith("north/p3: 1 ") and facts["missing values"] == "none"
    assert sum(int(part.split()[0]) for part in facts["samples"].split(", ")) == 31
    assert "north/p3" in facts["one step"]


def test_one_step_works_for_every_method(clinic):
    for method in METHODS:
        population = {"k": 2, "mix": "predictions"} if method in ("cfl", "fedem", "ifca", "ppfl") else {"k": 1}
        _, problems = check(clinic, {"algorithm": {"name": method}, "population": population})
        assert [one for one in problems if "model:" in one] == []


def test_what_leaves_is_what_the_method_and_the_affinity_show(clinic):
    shown, _ = check(clinic, {"algorithm": {"name": "ppfl", "lr": 0.1, "penalty": 0.1}})
    assert all(what in shown["leaves the site"] for what in ("membership", "label counts", "scores"))
    private = {"name": "ppfl", "lr": 0.1, "share_memberships": False}
    hidden, _ = check(clinic, {"algorithm": private, "watch": {"report_clients": False}})
    assert hidden["leaves the site"] == "sums over its clients, names of clients"


def test_data_that_cannot_be_used_are_a_problem_and_the_check_goes_on(clinic, caplog):
    write_visits(clinic, cell="")
    facts, problems = check(clinic, {"model": {"factory": "nowhere:net"}})
    assert_problems((facts, problems), "data: .*'dose'.*missing", "allow: .*'nowhere:net'")
    assert facts["missing values"] == "'dose' 1"
    write_visits(clinic, cell="much")
    assert_problems(check(clinic), "data: .*'dose' are not numeric")
    facts, problems = check(clinic, {"preparation": {}})  # text is no problem where the experiment prepares it
    assert problems == [] and not caplog.records
    assert facts["columns"] == "2: age, dose" and "levels of text" in facts["leaves the site"]


def test_what_differs_from_the_experiment_is_named(clinic):
    write_visits(clinic, columns="years,dose")
    data = {**VISITS["data"], "columns": ["age", "dose"], "classes": ["ill", "well", "dead"]}
    found = check(clinic, {"data": data}, data={**VISITS["data"], "test_fraction": 0})
    assert_problems(found, "columns: .*age, years", "classes: .*dead", r"test data: .*test_fraction = 0\.2")


def test_functions_must_be_allowed_installed_and_fit_the_data(clinic):
    text = "from torch import nn\n\n\ndef net(federation):\n    return nn.Linear({}, federation.n_classes)\n"
    (clinic / "nets.py").write_text(text.format(2))
    (clinic / "narrow.py").write_text(text.format(5))
    named = {"model": {"factory": "nets:net"}}
    assert_problems(check(clinic, named, allow=["nets:net"]))
    assert_problems(check(clinic, named), "allow: the experiment names 'nets:net'")
    assert_problems(check(clinic, allow=["nets:other"]), "allow: .*'nets' has no 'other'")
    assert_problems(check(clinic, allow=["no_such_module:net"]), "allow: .*no module 'no_such_module'")
    assert_problems(check(clinic, {"model": {"factory": "narrow:net"}}, allow=["narrow:net"]), "model: ")


def test_files_and_keys_without_which_the_site_cannot_start_are_named(clinic):
    assert_problems(check(clinic, secure_sums="secure_sums.toml"), "experiment: .*no scores of single clients")
    (clinic / "site.key").unlink()
    keys = clinic / "secure_sums.toml"
    keys.write_text(keys.read_text().replace("north = ", "west = "))
    private = {"algorithm": {"name": "ppfl", "share_memberships": False}, "watch": {"report_clients": False}}
    found = check(clinic, private, secure_sums="secure_sums.toml", superlink=None)
    assert_problems(found, "superlink: ", "private_key: there is no ", "secure_sums: no key of 'north'")


# ---------------------------------------------------------------------- status


def bytes_of(file, direction, key, value):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sum(line["bytes"] for line in lines if line.get("direction") == direction and line[key] == value)


def test_the_status_of_a_run_that_goes_on_stops_and_ends(tmp_path):
    experiment, seen = make_experiment("fedavg", rounds=3), []
    sites = Sites(experiment, tmp_path)
    assert_refused(lambda: server_status(tmp_path / "out"), FederationError, "no run over sites")

    def look(seed, end):
        (status,) = server_status(tmp_path / "out")
        seen.append((status.state, status.round, status.rounds))
        if len(seen) == 2:
            raise Killed

    with pytest.raises(Killed):
        sites.run(on_round_end=look)
    (stopped,) = server_status(tmp_path / "out")
    sites.faults["b"] = [at_replies({2}, lambda reply: b"nonsense")]
    sites.run(on_round_end=look, resume=True)
    (tmp_path / "out" / "sites").mkdir()
    (tmp_path / "out" / "sites" / "west.pub").touch()  # a site that has sent nothing
    (status,) = server_status(tmp_path / "out")
    assert seen == [("running", at, 3) for at in (1, 2, 3)]
    assert (stopped.state, stopped.round, stopped.starts) == ("stopped", 2, 1)
    assert (status.state, status.round, status.starts) == ("finished", 3, 2)
    assert status.run in sites.services["a"].store.runs()
    ledger = tmp_path / "out" / "seed-0.federation" / "ledger.jsonl"
    for name in SITES:
        found = status.sites[name]
        assert found.to_site == bytes_of(ledger, "to site", "site", name)
        assert found.to_server == bytes_of(ledger, "to server", "site", name) > 0 and found.last is not None
    assert {name: found.refused for name, found in status.sites.items()} == {"a": 0, "b": 1, "c": 0, "west": 0}
    assert "no message of ppfl" in status.sites["b"].reason and status.sites["west"].last is None
    with ledger.open("a") as opened:
        opened.write('{"time": 1, "dire')  # a line that is being written does no harm
    assert server_status(tmp_path / "out") == [status]


def test_the_status_of_a_site(site, tmp_path):
    nothing = site_status(site.settings, tmp_path)
    assert nothing.runs == [] and nothing.forgotten == ()
    found = site_status(site.settings, site.base)
    assert [one.run for one in found.runs] == list(site.store.runs())
    for one in found.runs:
        assert one.rounds == 2 and one.has_models and one.stored > 0
        assert one.traffic.to_server == bytes_of(site.ledger.file, "to server", "run", one.run) > 0
