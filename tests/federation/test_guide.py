"""What docs/federation.md says about folders, services and bits is so."""

import re
from configparser import ConfigParser
from pathlib import Path

import yaml

from ppfl.data.preparation_settings import PreparationSettings
from ppfl.federation.provisioning import init_federation
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.secure_sums.fixed_point import fixed_point

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "federation.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_containers_get_the_folders_that_the_command_makes(tmp_path: Path) -> None:
    (sites,) = re.findall(r"federation init \S+ --sites (\S+) ", GUIDE)
    (tmp_path / "experiment.toml").write_text(blocks("toml")[0])
    init_federation(tmp_path / "experiment.toml", sites.split(","), "server", tmp_path / "clinics")
    (compose,) = (yaml.safe_load(block) for block in blocks("yaml"))
    assert compose["services"].keys() == {"server", *sites.split(",")}
    mounted = []
    for name, service in compose["services"].items():
        folder = tmp_path / service["volumes"][0].split(":")[0]
        assert folder.is_dir() and (name == "server" or folder.name == name)
        mounted.append(folder)
        if name != "server":
            assert (folder / service["command"].removeprefix("ppfl federation site /srv/ppfl/")).is_file()
    assert len({*mounted}) == len(mounted)
    start = (tmp_path / "clinics" / "sites" / "north" / "start.txt").read_text()
    assert start in blocks("sh")


def test_the_files_that_the_table_names_are_there(tmp_path: Path) -> None:
    init_federation(ROOT / "experiments" / "synthetic.toml", ["north"], "server", tmp_path / "clinics")
    rows = re.findall(r"^\| `(clinics/\S+)` \| .*? \| (.*) \|$", GUIDE, flags=re.MULTILINE)
    assert len(rows) == 3
    for folder, held in rows:
        for pattern in re.findall(r"`([^`]+)`", held):
            assert list((tmp_path / folder).glob(pattern)), (folder, pattern)


def test_services_run_in_the_folders_that_they_may_write_to() -> None:
    for block in blocks("ini"):
        unit = ConfigParser(interpolation=None)
        unit.optionxform = str
        unit.read_string(block)
        service = unit["Service"]
        assert service["ReadWritePaths"] == service["WorkingDirectory"]
        assert " federation " in service["ExecStart"]


def settings_of_table(heading: str) -> dict[str, str]:
    """The settings that the guide lists under a heading, and their defaults."""
    (table,) = re.findall(rf"^\| `\[{heading}\]` \|.*?\n\n", GUIDE, flags=re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| ", table, flags=re.MULTILINE))


def test_the_settings_of_a_preparation_are_those_of_the_guide() -> None:
    inside = {"count_target"}  # [estimator] sets it
    assert settings_of_table("preparation").keys() == PreparationSettings.model_fields.keys() - inside


def test_the_settings_and_bits_are_those_of_the_guide() -> None:
    told, settings = settings_of_table("settings"), SecureSettings()
    assert told.keys() == SecureSettings.model_fields.keys()
    for name, value in told.items():
        power = re.fullmatch(r"2\^(-?\d+)", value)
        expected = 2.0 ** int(power[1]) if power else None if name == "threshold" else int(value)
        assert getattr(settings, name) == expected
    ((step, largest, sites),) = re.findall(
        r"`step = (\S+)` with `largest = (\d+)` takes 32\s+bits for up to (\d+)", GUIDE
    )
    bits = [fixed_point(float(step), float(largest), int(sites) + more).bits for more in (0, 1)]
    assert bits == [32, 64]
