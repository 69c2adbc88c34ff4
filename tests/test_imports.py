"""Dependencies point one way, and heavy libraries stay behind their doors."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ppfl"
BELOW = {  # folder -> the folders of ours it may import
    "core": set(),
    "data": {"core"},
    "algorithms": {"core", "data"},
    "engines": {"core", "data", "algorithms"},
    "runs": {"core", "data", "algorithms", "engines"},
    "glm": {"core", "data", "algorithms", "engines"},
    "report": {"core", "data", "algorithms", "engines", "runs"},
    "paper": {"core", "data", "algorithms", "engines", "runs"},
    "cli": {"core", "data", "algorithms", "engines", "runs", "report", "paper", "glm"},
}
BEHIND_ONE_DOOR = {"flwr": "federation", "plotly": "report", "typer": "cli", "rich": "cli"}


def imported_modules(file: Path) -> set[str]:
    """Absolute names of all modules a file imports, wherever in it."""
    package = ("ppfl", *file.relative_to(PACKAGE).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            found.add(".".join([*base, *(node.module or "").split(".")]).rstrip("."))
            if node.module is None:
                found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({f.relative_to(PACKAGE).parts[0] for f in FILES if f.parent != PACKAGE}))
def test_no_arrow_points_back(folder: str) -> None:
    assert folder in BELOW, f"say in BELOW what {folder} may import"
    for file in (PACKAGE / folder).rglob("*.py"):
        ours = {name.split(".")[1] for name in imported_modules(file) if name.startswith("ppfl.")}
        assert ours <= BELOW[folder] | {folder}, f"{file.name} imports {sorted(ours - BELOW[folder] - {folder})}"


def test_heavy_libraries_stay_behind_one_door() -> None:
    for file in FILES:
        folder = file.relative_to(PACKAGE).parts[0]
        for name in imported_modules(file):
            door = BEHIND_ONE_DOOR.get(name.split(".")[0], folder)
            assert door == folder, f"{file} imports {name}, which belongs in {door}"


def test_the_test_sees_arrows() -> None:
    backward = PACKAGE / "core" / "simplex.py"
    assert "torch" in imported_modules(backward)
    assert any(name.startswith("ppfl.core") for name in imported_modules(PACKAGE / "engines" / "fit.py"))
