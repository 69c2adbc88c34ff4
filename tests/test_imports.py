"""Dependencies point one way, heavy libraries stay behind a door, and a name means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ppfl"
LAYERS = (  # each part may import those before its line
    ("parent_process",),
    ("core", "data"),
    ("algorithms",),
    ("sites",),
    ("server",),
    ("insight", "runs"),
    ("federation",),
    ("glm",),
    ("report", "paper"),
    ("callbacks",),
    ("callback_list",),
    ("fitted",),
    ("fitting",),
    ("cli",),
)
BELOW = {part: {below for layer in LAYERS[:at] for below in layer} for at, layer in enumerate(LAYERS) for part in layer}
BELOW["data"] = {"core"}
BELOW["core"] = set()
ANYTHING = {"__init__", "__main__", "exports"}  # of the package itself
BEHIND_DOORS = {"flwr": ("federation",), "plotly": ("report",), "typer": ("cli",), "rich": ("report", "cli")}

SAME_MODULE_NAME = {
    "evaluation": "two halves of one thing: a site scores its clients, the server reads what they report",
}
SAME_CLASS_NAME: dict[str, str] = {}


def part_of(file: Path) -> str:
    """The folder of a file, or its own name where it stands at the top."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(file: Path) -> set[str]:
    """Absolute names of all modules a file imports, wherever in it, and of what it imports from them."""
    package = ("ppfl", *file.relative_to(PACKAGE).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = sorted({part_of(file) for file in FILES} - ANYTHING)


@pytest.mark.parametrize("part", PARTS)
def test_no_arrow_points_back(part: str) -> None:
    assert part in BELOW, f"say in LAYERS where {part} stands"
    for file in (file for file in FILES if part_of(file) == part):
        ours = {name.split(".")[1] for name in imported_modules(file) if name.startswith("ppfl.")} & {*PARTS}
        assert ours <= BELOW[part] | {part}, f"{file.name} imports {sorted(ours - BELOW[part] - {part})}"


def test_heavy_libraries_stay_behind_their_doors() -> None:
    for file in FILES:
        for name in imported_modules(file):
            doors = BEHIND_DOORS.get(name.split(".")[0], (part_of(file),))
            assert part_of(file) in doors, f"{file} imports {name}, which belongs in {' or '.join(doors)}"


def test_nothing_of_torch_that_is_private_is_used() -> None:
    for file in FILES:
        private = [
            name for name in imported_modules(file) if name.startswith("torch.") and "._" in name.removeprefix("torch")
        ]
        assert not private, f"{file} imports {private}"
        for name in ("_pytree", "_DropoutNd", "_ConvNd"):
            assert name not in file.read_text(), f"{file} uses {name}"


@pytest.mark.parametrize("part", ["sites", "server", "runs", "report"])
def test_no_method_is_a_special_case_outside_the_methods(part: str) -> None:
    """What differs from method to method is asked of the method, by the contract."""
    for file in (PACKAGE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            asks_for_class = node.func.id == "isinstance" and "PPFL" in {
                name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)
            }
            asks_for_setting = (
                node.func.id in ("getattr", "hasattr")
                and isinstance(node.args[1], ast.Constant)
                and node.args[1].value in ("penalty", "share_memberships")
            )
            assert not asks_for_class and not asks_for_setting, f"{file}, line {node.lineno}: {ast.unparse(node)}"


def test_no_two_modules_share_a_name() -> None:
    found: dict[str, list[Path]] = defaultdict(list)
    for file in FILES:
        if file.stem not in ANYTHING:
            found[file.stem].append(file.relative_to(PACKAGE))
    shared = {name: files for name, files in found.items() if len(files) > 1}
    assert shared.keys() == SAME_MODULE_NAME.keys(), shared


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert shared.keys() == SAME_CLASS_NAME.keys(), shared


def test_the_test_sees_arrows() -> None:
    assert "torch" in imported_modules(PACKAGE / "core" / "simplex.py")
    assert "ppfl.server" in imported_modules(PACKAGE / "fitting.py")
    assert "ppfl.core.errors" in imported_modules(PACKAGE / "sites" / "site.py")
