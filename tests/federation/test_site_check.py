"""`ppfl federation check`: what would be refused in a run is said at the site, with what to do, and nothing else is."""

import re
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("cryptography", reason="cryptography is not installed; pip install ppfl[flower]")

from ppfl.algorithms import METHODS
from ppfl.federation.provisioning import init_federation
from ppfl.federation.site_check import check_site
from ppfl.federation.site_settings import SiteSettings, load_site
from ppfl.runs import load_experiment
from ppfl.runs.experiment import Experiment

CSV = {"name": "csv", "file": "visits.csv", "client": "patient", "target": "outcome", "classes": ["ill", "well"]}
EXPERIMENT = {
    "name": "visits",
    "rounds": 3,
    "data": CSV,
    "model": {"name": "linear"},
    "population": {"k": 2},
    "algorithm": {"name": "ppfl", "lr": 0.1},
}


def write_visits(folder: Path, cell: str = "1.5", columns: str = "age,dose") -> None:
    rows = [f"p{at % 3},{at % 5},{at % 7 / 2},{'ill' if at % 2 else 'well'}" for at in range(30)]
    rows[4] = f"p1,4,{cell},well"
    rows.append("p3,1,2,ill")  # the smallest client
    (folder / "visits.csv").write_text("\n".join([f"patient,{columns},outcome", *rows]) + "\n")


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """A site's folder as init makes it, with data."""
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(EXPERIMENT))
    init_federation(tmp_path / "experiment.toml", ["north", "south"], "fl.example.org", tmp_path / "clinics")
    folder = tmp_path / "clinics" / "sites" / "north"
    write_visits(folder)
    return folder


def check(folder: Path, changes=None, **of_site):
    """With changes of the experiment and of the site's config."""
    settings = SiteSettings.model_validate(load_site(folder / "site.toml").model_dump() | of_site)
    asked = load_experiment(folder / "experiment.toml").model_dump(mode="json")
    return check_site(settings, folder, Experiment.model_validate(asked | (changes or {})))


def test_a_site_that_is_ready_has_no_problem_and_says_what_its_data_are(clinic):
    found = check(clinic)
    assert found.problems == []
    facts = dict(found.facts)
    assert facts["clients"] == "4" and facts["columns"] == "2: age, dose" and facts["classes"] == "2: ill, well"
    assert facts["smallest client"].startswith("north/p3: 1 ") and facts["missing values"] == "none"
    train, test = (int(part.split()[0]) for part in facts["samples"].split(", "))
    assert train + test == 31
    assert "north/p3" in facts["one step"]


@pytest.mark.parametrize("method", METHODS)
def test_the_step_works_for_every_method(method, clinic):
    population = {"k": 2, "mix": "predictions"} if method in ("cfl", "fedem", "ifca", "ppfl") else {"k": 1}
    found = check(clinic, {"algorithm": {"name": method}, "population": population})
    assert [one for one in found.problems if "model:" in one] == []


def test_what_leaves_is_what_the_method_and_the_affinity_show(clinic):
    shown = dict(check(clinic, {"algorithm": {"name": "ppfl", "lr": 0.1, "penalty": 0.1}}).facts)["leaves the site"]
    assert all(what in shown for what in ("membership", "label counts", "scores"))
    private = {"name": "ppfl", "lr": 0.1, "share_memberships": False}
    hidden = dict(check(clinic, {"algorithm": private, "watch": {"report_clients": False}}).facts)["leaves the site"]
    assert hidden == "sums over its clients, names of clients"


@pytest.mark.parametrize(
    ("cell", "columns", "said"),
    [
        ("", "age,dose", "data: .*'dose'.*missing values"),
        ("much", "age,dose", "data: .*'dose' are not numeric"),
    ],
)
def test_data_that_cannot_be_used_are_a_problem_and_the_check_goes_on(cell, columns, said, clinic):
    write_visits(clinic, cell, columns)
    found = check(clinic, {"model": {"factory": "nowhere:net"}})
    assert_problems(found, said, "allow: the experiment names 'nowhere:net'")
    if not cell:
        assert dict(found.facts)["missing values"] == "'dose' 1"


def test_text_is_no_problem_where_the_experiment_prepares_it(clinic, caplog):
    write_visits(clinic, "much")
    found = check(clinic, {"preparation": {}})
    assert found.problems == [] and not caplog.records
    facts = dict(found.facts)
    assert facts["columns"] == "2: age, dose" and "levels of text" in facts["leaves the site"]


def test_columns_classes_and_splits_that_differ_from_the_experiment_are_named(clinic):
    write_visits(clinic, columns="years,dose")
    data = {**CSV, "columns": ["age", "dose"], "classes": ["ill", "well", "dead"]}
    site = {"data": {**CSV, "test_fraction": 0}}
    assert_problems(
        check(clinic, {"data": data}, **site),
        "columns: they differ in age, years", "classes: they differ in dead",
        r"test data: this site has no test samples; set test_fraction = 0\.2",
    )  # fmt: skip


def test_functions_must_be_allowed_and_installed(clinic):
    (clinic / "nets.py").write_text(
        "from torch import nn\n\ndef net(federation):\n    return nn.Linear(2, federation.n_classes)\n"
    )
    named = {"model": {"factory": "nets:net"}}
    assert check(clinic, named, allow=["nets:net"]).problems == []
    assert_problems(check(clinic, named), "allow: the experiment names 'nets:net'")
    assert_problems(check(clinic, allow=["nets:other"]), "allow: .*'nets' has no 'other'")
    assert_problems(check(clinic, allow=["no_such_module:net"]), "allow: .*no module 'no_such_module'")


def test_a_network_that_does_not_fit_the_data_is_a_problem(clinic):
    (clinic / "narrow.py").write_text("from torch import nn\n\ndef net(federation):\n    return nn.Linear(5, 2)\n")
    assert_problems(check(clinic, {"model": {"factory": "narrow:net"}}, allow=["narrow:net"]), "model: ")


def test_files_and_settings_without_which_the_site_cannot_start_are_named(clinic):
    (clinic / "site.key").unlink()
    assert_problems(check(clinic, superlink=None), "superlink: it is not set", "private_key: there is no ")


def test_secure_sums_are_checked_against_the_experiment_and_the_keys(clinic):
    found = check(clinic, secure_sums="secure_sums.toml")
    assert_problems(found, "experiment: secure sums show no scores of single clients")
    text = (clinic / "secure_sums.toml").read_text().replace("north = ", "west = ")
    (clinic / "secure_sums.toml").write_text(text)
    private = {
        "algorithm": {"name": "ppfl", "share_memberships": False, "lr": 0.1},
        "watch": {"report_clients": False},
    }
    assert_problems(check(clinic, private, secure_sums="secure_sums.toml"), "secure_sums: no key of 'north'")


def assert_problems(found, *patterns: str) -> None:
    """These and no others."""
    assert len(found.problems) == len(patterns), found.problems
    for pattern in patterns:
        assert any(re.search(pattern, one) for one in found.problems), (pattern, found.problems)
