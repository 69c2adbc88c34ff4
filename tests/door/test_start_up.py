"""What is not imported: help and `import ppfl` come at once, and a door loads only what stands behind it."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "scipy", "pandas", "pydantic", "altair", "sklearn"}
COMMAND = "from ppfl.cli import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    pass"
LISTED = "\nimport sys\nprint('imported:', *sys.modules, file=sys.stderr)"


def imported_by(code: str) -> set[str]:
    """The modules that a fresh Python has imported after this code."""
    done = subprocess.run([sys.executable, "-c", code + LISTED], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    return set(done.stderr.split("imported:")[1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--hlep"], ["federation", "up", "--help"]])
def test_help_does_not_wait_for_large_libraries(arguments):
    assert not imported_by(COMMAND.format(arguments=arguments)) & HEAVY


def test_importing_the_package_waits_for_none_of_them_and_a_name_for_those_it_needs():
    assert not imported_by("import ppfl; ppfl.__version__") & HEAVY
    assert "torch" in imported_by("import ppfl; ppfl.fit"), "the test sees what is imported"


def test_estimators_of_tables_load_nothing_of_sites_reports_studies_and_the_command_line():
    parts = {name.split(".")[1] for name in imported_by("from ppfl.glm import PopulationRegressor") if "ppfl." in name}
    assert "glm" in parts and not parts & {"federation", "report", "paper", "cli"}
