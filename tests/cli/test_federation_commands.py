"""The commands for the owner of a site and for a server, from folders of init to predictions."""

import csv
import re
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")
pytest.importorskip("cryptography", reason="cryptography is not installed; pip install ppfl[flower]")

from federation.test_site_check import EXPERIMENT, write_visits
from kit.sites import FakeCarrier, FakeClock
from ppfl.federation.federated_run import run_federated
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import load_site
from ppfl.runs import load_experiment

SITES = ("north", "south")


@pytest.fixture
def clinics(ppfl, tmp_path: Path) -> Path:
    """Folders of init, with data at each site."""
    file = tmp_path / "experiment.toml"
    file.write_text(tomli_w.dumps(EXPERIMENT))
    place = tmp_path / "clinics"
    done = ppfl("federation", "init", file, "--sites", ",".join(SITES), "--server-host", "localhost", "--out", place)
    assert done.code == 0, done
    for name in SITES:
        write_visits(place / "sites" / name)
    return place


def run_here(clinics: Path) -> None:
    """As the server does it, without Flower."""
    services, clock = {}, FakeClock()
    for name in SITES:
        folder = clinics / "sites" / name
        services[name] = SiteService(load_site(folder / "site.toml"), folder)
    experiment = load_experiment(clinics / "server" / "experiment.toml")
    run_federated(
        experiment, clinics / "server" / "runs", FakeCarrier(services, clock), sites=SITES, now=clock.now,
        sleep=clock.sleep,
    )  # fmt: skip
    for service in services.values():
        service.close()


def test_a_site_is_checked_with_nothing_but_its_folder(ppfl, clinics: Path) -> None:
    site = clinics / "sites" / "north"
    done = ppfl("federation", "check", site / "site.toml")
    assert done.code == 0 and "ready: start the site with" in done.out and not done.err
    write_visits(site, cell="")
    done = ppfl("federation", "check", site / "site.toml")
    assert done.code == 2 and re.search(r"would be refused: data: .*columns 'dose' \(1\) have missing values", done.err)
    done = ppfl("federation", "check", site / "site.toml", "--experiment", site / "other.toml")
    assert done.code == 2 and "other.toml" in done.err and "Traceback" not in done.err


def test_before_a_run_the_commands_say_that_there_is_none(ppfl, clinics: Path, tmp_path: Path) -> None:
    config = clinics / "sites" / "north" / "site.toml"
    for command in (
        ("predict", config, "--data", config.parent / "visits.csv", "--out", tmp_path / "p.csv"),
        ("export", config, "--out", tmp_path / "models"),
        ("forget", "p1", "--site", config),
    ):
        done = ppfl("federation", *command)
        assert done.code == 2 and "has taken part in no run yet" in done.err
    assert "has taken part in no run yet" in ppfl("federation", "status", config.parent).out
    assert ppfl("federation", "status", clinics / "server").code == 2


def test_predictions_models_status_and_forgetting(ppfl, clinics: Path, tmp_path: Path) -> None:
    run_here(clinics)
    config = clinics / "sites" / "north" / "site.toml"
    (tmp_path / "new.csv").write_text("dose,patient,age\n1,p1,2\n2,p0,3\n")
    out = tmp_path / "predictions.csv"
    done = ppfl("federation", "predict", config, "--data", tmp_path / "new.csv", "--out", out)
    assert done.code == 0 and "2 predictions" in done.out, done
    with out.open(newline="") as opened:
        heading, *rows = csv.reader(opened)
    assert heading == ["patient", "prediction", "probability of ill", "probability of well"]
    assert [row[0] for row in rows] == ["p1", "p0"]
    done = ppfl("federation", "export", config, "--client", "p1", "--out", tmp_path / "models")
    assert done.code == 0, done
    assert {file.name for file in (tmp_path / "models").iterdir()} == {"north-p1.safetensors", "memberships.csv"}

    done = ppfl("federation", "status", clinics / "server")
    assert done.code == 0 and "finished, round 3 of 3" in done.out and "south" in done.out
    done = ppfl("federation", "forget", "p1", "--site", config)
    assert done.code == 0 and "client north/p1 is deleted from 1 run" in done.out and "cannot be undone" in done.out
    done = ppfl("federation", "status", config.parent)
    assert done.code == 0 and "forgotten clients: north/p1" in done.out
    assert re.search(r"clients +3 ", ppfl("federation", "check", config).out)
    again = ppfl("federation", "predict", config, "--data", tmp_path / "new.csv", "--out", tmp_path / "more.csv")
    assert again.code == 2 and "no client 'p1'; it has 'north/p0'" in again.err
    run = load_run_name(config)
    assert ppfl("federation", "forget", "--run", run, "--site", config).code == 0
    assert "no run" in ppfl("federation", "export", config, "--out", tmp_path / "none").err


def load_run_name(config: Path) -> str:
    service = SiteService(load_site(config), config.parent)
    (run,) = service.store.runs()
    service.close()
    return run


def test_one_thing_is_forgotten_at_a_time(ppfl, clinics: Path) -> None:
    config = clinics / "sites" / "north" / "site.toml"
    for more in ((), ("p1", "--run", "x")):
        done = ppfl("federation", "forget", *more, "--site", config)
        assert done.code == 2 and "name one thing to forget" in done.err


@pytest.mark.parametrize("command", ["check", "status", "predict", "export", "forget"])
def test_every_command_explains_itself(command: str, ppfl) -> None:
    done = ppfl("federation", command, "--help")
    assert done.code == 0 and "Usage" in done.out
