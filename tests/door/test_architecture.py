"""Dependencies point one way, heavy libraries stay behind a door, and tests see what users see."""

import ast
import functools
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "ppfl"
LAYERS = (  # each part may import those before its line
    ("errors", "lazy", "parent_process"),
    ("io",),
    ("core", "data"),
    ("networks",),
    ("algorithms",),
    ("sites",),
    ("server",),
    ("runs",),
    ("federation",),
    ("glm",),
    ("report",),
    ("paper",),
    ("callbacks",),
    ("fitted",),
    ("fitting",),
    ("cli",),
)
BELOW = {part: {below for layer in LAYERS[:at] for below in layer} for at, layer in enumerate(LAYERS) for part in layer}
BELOW |= {"data": {"core", "io", "errors"}, "core": {"io", "errors"}, "errors": set()}
ANYTHING = {"__init__", "__main__", "exports"}  # of the package itself
BEHIND_DOORS = {"flwr": ("federation",), "typer": ("cli",), "rich": ("report", "cli")}
BEHIND_DOORS |= dict.fromkeys(("altair", "vl_convert", "jinja2"), ("report",))
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The folder of a file, or its own name where it stands at the top."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


PARTS = sorted({part_of(file) for file in FILES} - ANYTHING)


@functools.cache
def syntax(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text())))


def imports(file: Path, package: tuple[str, ...] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """All modules that a file imports, wherever in it, by absolute names; each with the names it imports from there."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in syntax(file):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            found.append((module, tuple(alias.name for alias in node.names)))
    return found


@functools.cache
def imported_modules(file: Path) -> set[str]:
    """Modules that a file of the package imports, and what it imports from them, which may be modules too."""
    found = imports(file, ("ppfl", *file.relative_to(PACKAGE).parts[:-1]))
    return {module for module, _ in found} | {f"{module}.{name}" for module, names in found for name in names}


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


def test_errors_can_be_imported_without_anything_else() -> None:
    assert not imports(PACKAGE / "errors.py")


def test_nothing_of_torch_that_is_private_is_used() -> None:
    for file in FILES:
        ours = [name.removeprefix("torch") for name in imported_modules(file) if name.startswith("torch.")]
        assert not any("._" in name for name in ours), f"{file} imports {ours}"
        for name in ("_pytree", "_DropoutNd", "_ConvNd"):
            assert name not in file.read_text(), f"{file} uses {name}"


def test_no_method_is_a_special_case_outside_the_methods() -> None:
    """What differs from method to method is asked of the method, by the contract."""
    calls = {"isinstance": {"PPFL"}, "getattr": {"penalty", "share_memberships"}}
    calls["hasattr"] = calls["getattr"]
    for file in (file for file in FILES if part_of(file) in ("sites", "server", "runs", "report")):
        for node in syntax(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
                asked = {getattr(part, "id", getattr(part, "value", None)) for part in ast.walk(node.args[1])}
                special = calls[node.func.id] & {name for name in asked if isinstance(name, str)}
                assert not special, f"{file}, line {node.lineno}: {ast.unparse(node)}"


def test_the_test_sees_arrows() -> None:
    assert "torch" in imported_modules(PACKAGE / "core" / "simplex.py")
    assert "ppfl.server" in imported_modules(PACKAGE / "fitting.py")
    assert "ppfl.errors" in imported_modules(PACKAGE / "sites" / "site.py")


# ---------------------------------------------------------------------- what tests import

TEST_FILES = [file for file in sorted(TESTS.rglob("*.py")) if file.relative_to(TESTS).parts[0] != "kit"]
TEST_FOLDERS = sorted({file.relative_to(TESTS).parts[0] for file in TEST_FILES} - {"conftest.py"})
PUBLIC_MODULES = {"ppfl", "ppfl.callbacks", "ppfl.errors"}
MIRRORED = {"door": {file.stem for file in PACKAGE.glob("*.py")}}  # every other folder mirrors the one of its name


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_front(module: str) -> bool:
    """Whether this is a folder of the package, of which tests may import what it exports."""
    _, *path = module.split(".")
    return len(path) == 1 and (PACKAGE / path[0]).is_dir()


def is_allowed(folder: str, module: str, names: tuple[str, ...]) -> bool:
    """Whether tests in a folder may import these names: from a package's front, or from the folder they mirror."""
    root, *path = module.split(".")
    if root != "ppfl":
        return root == "kit" or not TESTS.joinpath(root, *path).with_suffix(".py").is_file()
    if path and path[0] in MIRRORED.get(folder, {folder}):
        return True
    if module not in PUBLIC_MODULES and not is_front(module):
        return False
    exported = getattr(import_module(module), "__all__", ())
    below = [f"{module}.{name}" for name in names if name not in exported and is_module(f"{module}.{name}")]
    return all(is_front(name) for name in below)


@pytest.mark.parametrize("folder", TEST_FOLDERS)
def test_tests_import_fronts_and_what_they_mirror_and_no_other_test(folder: str) -> None:
    """Whatever else a test needs is a function of `kit`, so that only `kit` changes when modules move."""
    found = [
        f"{file.relative_to(TESTS)}: {module}"
        for file in TEST_FILES
        if file.is_relative_to(TESTS / folder)
        for module, names in imports(file)
        if not is_allowed(folder, module, names)
    ]
    assert not found, "\n".join(["move these imports to kit, or to the front of a package:", *found])


def test_the_test_tells_fronts_from_what_is_below_them() -> None:
    allowed = [("core", "ppfl.core.draws", ()), ("core", "ppfl", ("fit",)), ("glm", "ppfl.core", ("simplex",))]
    allowed += [("runs", "kit.files", ()), ("runs", "ppfl.errors", ("PPFLError",)), ("door", "ppfl.fitted", ("load",))]
    refused = [("glm", "ppfl.core.draws", ()), ("glm", "ppfl.core", ("draws",)), ("door", "ppfl.runs.load", ())]
    refused += [("cli", "door.test_fit", ("CASES",)), ("runs", "ppfl.fitted", ("load",))]
    assert all(is_allowed(*each) for each in allowed) and not any(is_allowed(*each) for each in refused)


@pytest.mark.processes
def test_all_modules_go_into_one_process():
    """Messages of different modules have different names."""
    names = [found.name for found in pkgutil.walk_packages([str(PACKAGE)], "ppfl.")]
    names = [name for name in names if name not in ("ppfl.__main__", "ppfl.federation.flower_app")]
    code = f"from importlib import import_module\nfor name in {names}: import_module(name)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_make_quick_names_tests_that_exist():
    (found,) = re.findall(r"addprefix tests/, (.*?)\)", (TESTS.parent / "Makefile").read_text("utf-8"), re.DOTALL)
    names = found.replace("\\\n", " ").split()
    assert len(names) > 10 and not [name for name in names if not (TESTS / name).exists()]
