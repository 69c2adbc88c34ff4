"""The commands for the owner of a site and for a server, from folders of init to predictions."""

import re

import pytest
import tomli_w

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")
pytest.importorskip("cryptography", reason="cryptography is not installed; pip install ppfl[flower]")

from kit.clinics import CLINICS, run_over_folders

from kit.sites import VISITS, write_visits


@pytest.fixture
def clinics(ppfl, tmp_path):
    """Folders of init, with data at each site."""
    file, place = tmp_path / "experiment.toml", tmp_path / "clinics"
    file.write_text(tomli_w.dumps(VISITS))
    done = ppfl("federation", "init", file, "--sites", ",".join(CLINICS), "--server-host", "localhost", "--out", place)
    assert done.code == 0, done
    for name in CLINICS:
        write_visits(place / "sites" / name)
    return place


def test_before_a_run_a_site_is_checked_and_the_other_commands_say_that_there_is_none(ppfl, clinics):
    site = clinics / "sites" / "north"
    config = site / "site.toml"
    done = ppfl("federation", "check", config)
    assert done.code == 0 and "ready: start the site with" in done.out and not done.err
    for command in (
        ("predict", config, "--data", site / "visits.csv", "--out", site / "p.csv"),
        ("export", config, "--out", site / "models"),
        ("forget", "p1", "--site", config),
    ):
        done = ppfl("federation", *command)
        assert done.code == 2 and "has taken part in no run yet" in done.err
    assert "has taken part in no run yet" in ppfl("federation", "status", site).out
    write_visits(site, cell="")
    done = ppfl("federation", "check", config)
    assert done.code == 2 and re.search(r"would be refused: data: .*'dose' \(1\) have missing values", done.err)


def test_predictions_models_status_and_forgetting(ppfl, clinics, tmp_path):
    run = run_over_folders(clinics)
    config = clinics / "sites" / "north" / "site.toml"
    (tmp_path / "new.csv").write_text("dose,patient,age\n1,p1,2\n2,p0,3\n")
    predict = ("federation", "predict", config, "--data", tmp_path / "new.csv", "--out")
    done = ppfl(*predict, tmp_path / "predictions.csv")
    assert done.code == 0 and "2 predictions" in done.out, done
    heading, *rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert heading == "patient,prediction,probability of ill,probability of well"
    assert [row.split(",")[0] for row in rows] == ["p1", "p0"]
    assert ppfl("federation", "export", config, "--client", "p1", "--out", tmp_path / "models").code == 0
    assert {file.name for file in (tmp_path / "models").iterdir()} == {"north-p1.safetensors", "memberships.csv"}
    done = ppfl("federation", "status", clinics / "server")
    assert done.code == 0 and "finished, round 3 of 3" in done.out and "south" in done.out
    done = ppfl("federation", "forget", "p1", "--site", config)
    assert done.code == 0 and "client north/p1 is deleted from 1 run" in done.out and "cannot be undone" in done.out
    assert "forgotten clients: north/p1" in ppfl("federation", "status", config.parent).out
    assert "no client 'p1'" in ppfl(*predict, tmp_path / "more.csv").err
    assert ppfl("federation", "forget", "--run", run, "--site", config).code == 0
    assert "no run" in ppfl("federation", "export", config, "--out", tmp_path / "none").err
