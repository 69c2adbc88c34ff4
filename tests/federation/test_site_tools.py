"""What the owner of a site does: tables are prepared alike, clients are forgotten, a config is made and checked."""

import os
import runpy
import shutil
import stat
from pathlib import Path

import pytest
import torch

from kit.experiments import call_ppfl
from kit.refusals import assert_refused
from kit.sites import OPEN, PPFL, SITES, TABLE, Sites, make_experiment, make_services, models_of, read_json, write_toml
from ppfl.errors import CheckpointError, DataError, SettingError
from ppfl.federation.secure_sums import SiteMasks, public_key
from ppfl.federation.service import SiteService
from ppfl.federation.site_settings import SiteSettings, init_site, load_site
from ppfl.federation.site_tools import approve, check_site, forget_in_store
from ppfl.federation.store import forget_run
from ppfl.runs import Experiment, RunFolder, load_experiment, run

VISITS = {"name": "visits", "rounds": 3, "data": TABLE, **PPFL, "watch": {"report_clients": True},
          "preparation": {"missing": "fill", "levels": {"ward": ["medicine", "surgery", "other"]}},
          "method": {"name": "ppfl", "lr": 0.1, "share_memberships": False, "penalty": 0}}  # fmt: skip
FILES = ("names.key", "secure.key", "site.toml")


def write_tables(folder, sites=SITES):
    """The table of each site below `folder`, and one with all rows; client names differ between sites."""
    header, together = "patient,age,dose,ward,outcome", []
    for number, site in enumerate(sites):
        rows = []
        for at in range(48):
            age = "" if at % 11 == 5 else str(20 + (7 * at + 13 * number) % 60)
            ward = ("medicine", "surgery", "heart")[(at + number) % 3]
            rows.append(f"{site}{at % 6},{age},{at % 5 + number / 2},{ward},{('ill', 'well')[at * at % 3 > 0]}")
        (folder / site).mkdir(parents=True)
        (folder / site / "visits.csv").write_text("\n".join([header, *rows]) + "\n")
        together += rows
    (folder / "visits.csv").write_text("\n".join([header, *together]) + "\n")


def visits_services(folder, experiment, policy=OPEN, **settings):
    services = {}
    for site in SITES:
        own = SiteSettings.model_validate({"name": site, "data": TABLE, "policy": policy} | settings)
        (folder / site / "names.key").write_text(site * 64)
        approve(own, folder / site, experiment)
        services[site] = SiteService(own, folder / site)
    return services


def test_three_tables_are_prepared_as_one(tmp_path):
    experiment = Experiment.model_validate(VISITS)
    write_tables(tmp_path)
    services = visits_services(tmp_path, experiment)
    record = Sites(experiment, tmp_path, services).run()
    spec = read_json(RunFolder(record.folder).clients_file)["spec"]["preparation"]
    whole = experiment.build_data(tmp_path).preparation.model_dump(mode="json")
    assert [column["name"] for column in spec["columns"]] == [column["name"] for column in whole["columns"]]
    for one, other in zip(spec["columns"], whole["columns"], strict=True):
        for key in ("mean", "scale"):
            torch.testing.assert_close(torch.tensor(one[key]), torch.tensor(other[key]), rtol=1e-6, atol=1e-6)
    assert record.finished


def test_a_private_column_is_agreed_on_with_secure_sums_too(tmp_path):
    experiment = Experiment.model_validate(VISITS | {"watch": {"report_clients": False}})
    write_tables(tmp_path)
    keys = {}
    for site in SITES:
        init_site(tmp_path / site, site)
        keys[site] = public_key(tmp_path / site / "secure.key")
    services = {}
    for site in SITES:
        peers = {peer: key for peer, key in keys.items() if peer != site}
        own = SiteSettings.model_validate({"name": site, "data": TABLE, "policy": {"min_clients": 3},
                                           "secure_sums": {"peers": peers}})  # fmt: skip
        approve(own, tmp_path / site, experiment)
        services[site] = SiteService(own, tmp_path / site)
    sites = Sites(experiment, tmp_path, services, secure={})
    assert sites.run().finished
    assert services["a"].settings.fewest == 1  # the set of three sites stands in for three clients


# ---------------------------------------------------------------------- forgetting


def test_a_forgotten_client_is_gone_from_the_server_after_the_next_round(tmp_path):
    method = {"name": "ppfl", "lr": 0.3, "start": "sums"}
    experiment = make_experiment("ppfl-outputs", rounds=4, method=method)
    sites = Sites(experiment, tmp_path)
    gone = sites.services["b"].data.ids[0]

    def forget(round, end):
        service = sites.services["b"]
        if end.state.round == 1:
            assert forget_in_store(service.store, service.settings, service.base, gone)

    record = sites.run(on_round_end=forget)
    folder = RunFolder(record.folder)
    assert record.finished
    assert gone not in record.ids
    assert len(record.memberships) == len(record.ids)
    assert gone.encode() not in folder.clients_file.read_bytes()
    assert gone not in models_of(sites.services["b"]).personal.ids
    assert [sorted(row.get("unscored", ())) for row in record.metrics] == [[], ["b"], [], []]
    assert [row["participants"] for row in record.metrics] == [8, 8, 7, 7]


def test_what_is_forgotten_is_overwritten_in_the_store(tmp_path):
    experiment = make_experiment("ditto", rounds=2)
    sites = Sites(experiment, tmp_path)
    sites.run()
    service = sites.services["a"]
    client = service.data.ids[0]
    (run,) = service.store.runs()
    rows = service.store.states_at(run, "main", 10)[1].rows
    largest = max(rows.values.values(), key=torch.numel)
    piece = largest[0].flatten()[-16:].numpy().tobytes()
    assert piece.strip(b"\0")
    file = service.base / "state.sqlite"
    assert forget_in_store(service.store, service.settings, service.base, client) == list(service.store.runs())
    assert client in service.store.forgotten()
    service.close()
    for left in service.base.glob("state.sqlite*"):
        assert piece not in left.read_bytes()
    assert file.exists()


def test_names_that_are_not_known_are_refused(tmp_path):
    service = make_services(tmp_path, ("a",), make_experiment("fedavg"))["a"]
    assert_refused(lambda: forget_in_store(service.store, service.settings, service.base, "nobody"), DataError,
                   "no client 'nobody'")  # fmt: skip
    assert_refused(lambda: forget_run(service.store, "none"), CheckpointError, "no run 'none'")


# ---------------------------------------------------------------------- commands


def modes(folder):
    return {file: stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*")}


def test_the_commands_of_a_site_write_files_that_are_its_owners_alone(tmp_path, capsys, monkeypatch):
    before = os.umask(0o022)
    try:
        monkeypatch.chdir(tmp_path)
        assert call_ppfl(capsys, "site", "init", "north", "--name", "north").code == 0
        write_tables(tmp_path / "tables")
        place = tmp_path / "north"
        (place / "visits.csv").write_bytes((tmp_path / "tables" / "a" / "visits.csv").read_bytes())
        (place / "visits.csv").chmod(0o600)
        write_toml(place / "site.toml", {"name": "north", "data": TABLE, "policy": {"rows": ["scores"]}})
        write_toml(tmp_path / "visits.toml", VISITS)
        site = ("--site", place / "site.toml")
        shown = call_ppfl(capsys, "site", "check", "visits.toml", *site)
        assert shown.code == 0, shown
        assert "Never sent are" in shown.out
        assert not list((place / "approved").iterdir())
        approved = call_ppfl(capsys, "site", "check", "visits.toml", *site, "--approve")
        assert approved.code == 0
        service = SiteService(load_site(place / "site.toml"), place)
        service.close()
        assert call_ppfl(capsys, "site", "forget", "a0", *site).code == 0
        assert call_ppfl(capsys, "federation", "status", place).code == 0
    finally:
        os.umask(before)
    wrong = {file: oct(mode) for file, mode in modes(place).items() if mode & 0o077}
    assert not wrong


def test_check_names_what_would_be_refused(tmp_path, capsys):
    write_tables(tmp_path)
    init_site(tmp_path / "a", "a")
    write_toml(tmp_path / "a" / "site.toml", {"name": "a", "data": TABLE})
    write_toml(tmp_path / "visits.toml", VISITS)
    shown = call_ppfl(
        capsys, "site", "check", tmp_path / "visits.toml", "--site", tmp_path / "a" / "site.toml", "--approve"
    )
    assert shown.code == 2
    assert "shows scores of each client" in shown.err
    assert not list((tmp_path / "a" / "approved").iterdir())


def test_models_of_a_site_are_files_of_its_owner(tmp_path, capsys):
    experiment = Experiment.model_validate(VISITS)
    write_tables(tmp_path)
    services = visits_services(tmp_path, experiment, policy={"min_clients": 3, "rows": ["scores"]})
    for site in SITES:
        write_toml(tmp_path / site / "site.toml", {"name": site, "data": TABLE, "policy": {"min_clients": 3}})
    Sites(experiment, tmp_path, services).run()
    out = tmp_path / "predictions.csv"
    done = call_ppfl(capsys, "predict", tmp_path / "a" / "site.toml", tmp_path / "a" / "visits.csv", "--out", out)
    assert done.code == 0, done
    lines = out.read_text().splitlines()
    assert lines[0] == "patient,prediction,probability of ill,probability of well"
    assert len(lines) == 49
    done = call_ppfl(capsys, "export", tmp_path / "a" / "site.toml", "--out", tmp_path / "models", "--client", "a1")
    assert done.code == 0, done
    assert len(list((tmp_path / "models").glob("*.safetensors"))) == 1
    wrong = call_ppfl(capsys, "export", tmp_path / "a" / "site.toml", "--out", tmp_path / "no", "--client", "b1")
    assert (wrong.code, (tmp_path / "no").exists()) == (2, False)


def test_the_config_of_a_site_is_checked(tmp_path):
    file = init_site(tmp_path, "north")
    keys = [(tmp_path / name).read_text() for name in FILES]
    init_site(tmp_path, "north")
    assert keys == [(tmp_path / name).read_text() for name in FILES]  # what is there stays
    settings = load_site(file)
    assert settings.policy.min_clients == 5
    file.write_text(file.read_text().replace("min_clients", "minimum"))
    assert_refused(lambda: load_site(file), SettingError, "policy.minimum")
    peers = {"north": "0" * 64}
    secure = SiteSettings.model_validate({"name": "north", "data": TABLE, "secure_sums": {"peers": peers}}).secure_sums
    assert_refused(lambda: SiteMasks("north", secure, tmp_path), SettingError, "its own name")
    low_order = secure.model_copy(update={"peers": {"south": "0" * 64}})
    assert_refused(lambda: SiteMasks("north", low_order, tmp_path), SettingError, "no public key")


@pytest.mark.parametrize(("changes", "words"), [
    ({"newcomers": 0.2}, ("newcomers", "leave")),
    ({"watch": {"output": "best"}}, ("output", "'last'")),
])  # fmt: skip
def test_what_cannot_be_done_over_sites_is_refused_first(changes, words, tmp_path):
    sites = Sites(make_experiment("fedavg"), tmp_path)
    sites.experiment = make_experiment("fedavg", **changes)
    assert_refused(sites.run, SettingError, *words)
    assert not sites.pushed


def test_a_population_glm_runs_over_sites_as_in_one_process(tmp_path):
    asked = {"name": "glm", "rounds": 3, "data": TABLE, "preparation": {"levels": VISITS["preparation"]["levels"],
             "missing": "drop"}, "estimator": {"kind": "classifier", "k": 2}}  # fmt: skip
    experiment = Experiment.model_validate(asked)
    write_tables(tmp_path)
    policy = OPEN | {"rows": ("memberships", "sketches", "scores")}
    record = Sites(experiment, tmp_path, visits_services(tmp_path, experiment, policy=policy)).run()
    assert record.memberships.shape == (18, 2)


def test_the_clinics_of_the_guide_score_as_well_under_the_strict_policy(tmp_path):
    """The example under examples/clinics, with the default policy at each clinic, and in one process."""
    folder = Path(__file__).parents[2] / "examples" / "clinics"
    copy = tmp_path / "clinics"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("tables"))
    runpy.run_path(str(copy / "make_tables.py"), run_name="__main__")
    experiment = load_experiment(copy / "clinics.toml")
    services = {}
    for site in ("north", "south", "east"):
        place = copy / "tables" / site
        init_site(place, site)
        settings = load_site(place / "site.toml")
        assert not check_site(settings, place, experiment).problems
        approve(settings, place, experiment)
        services[site] = SiteService(settings, place)
    strict = Sites(experiment, tmp_path, services).run()
    together = run(experiment, tmp_path / "together", base=copy)[0]
    assert strict.scores["accuracy"] > 0.7
    assert strict.scores["accuracy"] == pytest.approx(together.scores["accuracy"], abs=0.03)
