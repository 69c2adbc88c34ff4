"""The commands for the owner of a site and for a server, from folders of init to predictions."""

import csv
import re
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")
pytest.importorskip("cryptography", reason="cryptography is not installed; pip install ppfl[flower]")

from kit.clinics import CLINICS, run_over_folders, runs_of_site, write_tables
from kit.sites import VISITS, write_visits


@pytest.fixture
def clinics(ppfl, tmp_path: Path) -> Path:
    """Folders of init, with data at each site."""
    file, place = tmp_path / "experiment.toml", tmp_path / "clinics"
    file.write_text(tomli_w.dumps(VISITS))
    done = ppfl("federation", "init", file, "--sites", ",".join(CLINICS), "--server-host", "localhost", "--out", place)
    assert done.code == 0, done
    write_tables(place)
    return place


def test_before_a_run_a_site_is_checked_and_the_other_commands_say_that_there_is_none(ppfl, clinics: Path) -> None:
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
    assert ppfl("federation", "status", clinics / "server").code == 2
    for more in ((), ("p1", "--run", "x")):
        done = ppfl("federation", "forget", *more, "--site", config)
        assert done.code == 2 and "name one thing to forget" in done.err
    write_visits(site, cell="")
    done = ppfl("federation", "check", config)
    assert done.code == 2 and re.search(r"would be refused: data: .*'dose' \(1\) have missing values", done.err)
    done = ppfl("federation", "check", config, "--experiment", site / "other.toml")
    assert done.code == 2 and "other.toml" in done.err and "Traceback" not in done.err


def test_predictions_models_status_and_forgetting(ppfl, clinics: Path, tmp_path: Path) -> None:
    run_over_folders(clinics)
    config = clinics / "sites" / "north" / "site.toml"
    (tmp_path / "new.csv").write_text("dose,patient,age\n1,p1,2\n2,p0,3\n")
    predict = ("federation", "predict", config, "--data", tmp_path / "new.csv", "--out")
    done = ppfl(*predict, tmp_path / "predictions.csv")
    assert done.code == 0 and "2 predictions" in done.out, done
    with (tmp_path / "predictions.csv").open(newline="") as opened:
        heading, *rows = csv.reader(opened)
    assert heading == ["patient", "prediction", "probability of ill", "probability of well"]
    assert [row[0] for row in rows] == ["p1", "p0"]
    assert ppfl("federation", "export", config, "--client", "p1", "--out", tmp_path / "models").code == 0
    assert {file.name for file in (tmp_path / "models").iterdir()} == {"north-p1.safetensors", "memberships.csv"}

    done = ppfl("federation", "status", clinics / "server")
    assert done.code == 0 and "finished, round 3 of 3" in done.out and "south" in done.out
    done = ppfl("federation", "forget", "p1", "--site", config)
    assert done.code == 0 and "client north/p1 is deleted from 1 run" in done.out and "cannot be undone" in done.out
    assert "forgotten clients: north/p1" in ppfl("federation", "status", config.parent).out
    assert re.search(r"clients +3 ", ppfl("federation", "check", config).out)
    again = ppfl(*predict, tmp_path / "more.csv")
    assert again.code == 2 and "no client 'p1'; it has 'north/p0'" in again.err
    (run,) = runs_of_site(clinics, "north")
    assert ppfl("federation", "forget", "--run", run, "--site", config).code == 0
    assert "no run" in ppfl("federation", "export", config, "--out", tmp_path / "none").err


def test_every_command_explains_itself(ppfl) -> None:
    for command in ("init", "revoke", "check", "status", "predict", "export", "forget", "up", "server", "site"):
        done = ppfl("federation", command, "--help")
        assert done.code == 0 and "Usage" in done.out
