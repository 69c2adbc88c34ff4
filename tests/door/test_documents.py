"""What README, docs, docstrings and examples show works as shown; public names and types are those that are listed."""

import doctest
import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import ppfl
from kit import public_names, settings_page
from kit.documents import blocks, methods_of, run_blocks
from kit.experiments import call_ppfl
from ppfl.algorithms import METHODS, FedAvg, Local, Method
from ppfl.runs import load_experiment, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
METHODS_PAGE, ARCHITECTURE, EXTENDING, DATA, PYTHON, GLM = (
    (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("methods", "architecture", "extending", "data", "python", "glm")
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_code_of_the_readme_runs(here, capsys):
    table, network = blocks(README)
    run_blocks(network)
    fitted = r"<Fitted PPFL\(lr=0.2, batch_size=16\), 20 rounds, 40 clients, accuracy \S+%, shares( \d+%){4}>"
    assert re.match(fitted, printed := capsys.readouterr().out) and re.match(fitted, README[README.index("<Fitted") :])
    assert re.search(r"A +B +C +D\nclient +\ng0-c0( +\d\.\d+){4}\n", printed)
    assert {"memberships.svg", "report"} == {file.name for file in here.iterdir()}
    random = np.random.default_rng(0)
    x, y, ids = random.normal(size=(60, 2)), random.normal(size=60), np.arange(60) % 6
    assert run_blocks(table, X=x, y=y, ids=ids)["model"].memberships_.shape == (6, 2)


def test_the_demo_prints_the_table_of_the_readme(here, capsys):
    """Seconds aside. Another processor may round one test sample the other way: of all, or of the worst clients."""
    done = call_ppfl(capsys, "demo", "--out", here / "demo")
    assert done.code == 0, done.err
    shown, printed = (re.findall(r"^ (Local|FedAvg|PPFL) +(.*?) *$", text, re.MULTILINE) for text in (README, done.out))
    assert [name for name, _ in shown] == [name for name, _ in printed] == ["PPFL", "Local", "FedAvg"]
    tolerances = {"accuracy": 0.3, "client mean": 0.3, "worst tenth": 1.0, "in true group": 0.0}
    tolerances["membership error"] = 0.002
    for (name, left), (_, right) in zip(shown, printed, strict=True):
        left, right = left.replace("–", "nan").split(), right.replace("–", "nan").split()
        assert left[6:] == right[6:], "megabytes sent"
        for at, (column, tolerance) in enumerate(tolerances.items()):
            one, other = (float(cell.removesuffix("%")) for cell in (left[at], right[at]))
            assert one == pytest.approx(other, abs=tolerance + 1e-9, nan_ok=True), f"{column} of {name}"
    again = call_ppfl(capsys, "demo", "--out", here / "demo")
    assert again[:2] == (0, done.out), "nothing is run twice"
    assert (here / "demo" / "report.html").is_file()


def test_experiment_files_are_valid_links_lead_somewhere_and_every_method_is_described(here):
    Path("digits.toml").write_text(*blocks(README, "toml"))
    assert load_experiment(here / "digits.toml", ["population.k=3"]).population.k == 3
    Path("methods.toml").write_text(*blocks(METHODS_PAGE, "toml"))
    assert list(methods_of(here / "methods.toml")) == ["FedAvg", "PPFL2"]
    for file in (ROOT / "experiments").glob("*.toml"):
        settings = tomllib.loads(file.read_text())
        if "extends" in settings or "cases" in settings:  # a study
            continue
        several = "methods" in settings
        experiments = methods_of(file).values() if several else [load_experiment(file)]
        assert {experiment.name for experiment in experiments} == {file.stem}
    missing = [target for target in re.findall(r"\]\(([^)#:]+)\)", README) if not (ROOT / target).exists()]
    assert not missing + [name for name in METHODS if f"`{name}`" not in METHODS_PAGE]


def test_a_method_of_ones_own_takes_40_lines_and_is_fedavg_or_local_at_its_ends(here):
    method, door = blocks(ARCHITECTURE)
    assert len(method.splitlines()) <= 40
    names = run_blocks(method, door)
    fitted, federation, blend = (names[name] for name in ("fitted", "federation", "Blend"))
    population, start = fitted.population, {"lr": 0.1}
    for own_share, other in ((0.0, FedAvg(**start)), (1.0, Local(**start))):
        mine, theirs = (
            ppfl.fit(population, federation, each, rounds=2).evaluate(federation)
            for each in (blend(**start, own_share=own_share), other)
        )
        torch.testing.assert_close(mine.loss.values, theirs.loss.values, rtol=0, atol=1e-5)  # single precision
    (here / "blend.py").write_text(method)
    (here / "mine.toml").write_text(*blocks(ARCHITECTURE, "toml"))
    (record,) = run(load_experiment(here / "mine.toml"), here / "out", base=here)
    assert record.finished and record.method == "blend:Blend" and record.experiment["method"]["own_share"] == 0.7
    files = re.findall(r"\]\((\.\./src[^)]+)\)", ARCHITECTURE)
    assert len(files) == 4 and all((ROOT / "docs" / file).is_file() for file in files)


def test_every_setting_is_described_with_its_default():
    page = (ROOT / "docs" / "settings.md").read_text()
    (toml, _) = blocks(page, "toml")
    assert set(tomllib.loads(toml)) == {"rounds", "data", "preparation", "model", "population", "method"}
    assert not settings_page.faults(page)


SECTIONS = re.split(r"^## ", EXTENDING, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_the_code_about_ones_own_parts_runs(section, here):
    if '[data]\nname = "shops' not in section:
        fitted = run_blocks(*blocks(section))["fitted"]
        assert len(fitted.history) == 5 and fitted.memberships.shape[0] == len(fitted.ids)
        return
    lines = [f"shop-{at % 4},{at % 3},{at % 5},{at % 7}" for at in range(60)]
    (toml,), (module,) = blocks(section, "toml"), blocks(section)
    for name, text in (("mine.toml", toml), ("shops.py", module), ("reviews.txt", "\n".join(lines))):
        (here / name).write_text(text)
    experiment = load_experiment(here / "mine.toml", ["rounds=2", "method.lr=0.1"])
    assert run(experiment, here / "out", base=here)[0].finished


def test_the_code_about_data_and_about_keeping_a_fit_runs(here):
    assert "in a file" in run_blocks(*blocks(DATA))["federation"].describe()
    pytest.importorskip("onnxscript")
    pytest.importorskip("PIL")
    names = run_blocks(*blocks(PYTHON))
    assert set(names["more"].ids) == set(names["newer"].ids) == {*names["fitted"].ids, "shop-new"}
    assert names["photos"].classes == ("cat", "dog") and names["fitted"].history[-1]["accuracy"] > 0.75
    assert {file.name for file in here.iterdir()} >= {"shops.safetensors", "client.pt", "client.onnx"}


def test_the_session_of_a_statistician_runs(here):
    pytest.importorskip("formulaic")
    (section,) = re.findall(r"## A session.*?(?=^## )", GLM, flags=re.DOTALL | re.MULTILINE)
    names = run_blocks(*blocks(section))
    assert names["model"].k_ == 2  # as the table was drawn
    truth, found = names["slope"], names["effects"]["hours"] + names["fixed"]["hours"]
    assert abs(found.to_numpy() - truth).mean() < 0.3
    written = {"schools.csv", "residuals.svg", "summary.html", "schools.safetensors"}
    assert {file.name for file in here.iterdir()} == written


EXAMPLES = [file.stem for file in sorted((ROOT / "examples").glob("*.py")) if "# %%" in file.read_text()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_few_simulated_clients(name, here, monkeypatch, capsys):
    monkeypatch.setenv("PPFL_DATA", str(here / "no data"))
    monkeypatch.setenv("PPFL_EXAMPLE_CLIENTS", "16")
    monkeypatch.syspath_prepend(ROOT / "examples")
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed, folder = capsys.readouterr().out, here / "runs" / "examples" / name
    assert printed and "nan" not in printed
    for file in folder.glob("*.svg"):
        assert ElementTree.parse(file).getroot().tag.endswith("svg") and "nan" not in file.read_text()
    found = re.findall(r"^(\w+).* ([\d.]+)% +([\d.]+)$", printed, re.MULTILINE)
    accuracy, sent = ({method: float(row[at]) for method, *row in found} for at in (0, 1))
    if name in ("adapters", "frozen_backbone"):
        assert {"FedAvg", "Local", "PPFL"} <= {*accuracy} and max(accuracy.values()) == accuracy["PPFL"]
    if name == "adapters":  # four mixed adapters cost as much as one
        assert sent["FedAvg"] < sent["PPFL"] <= 1.05 * sent["FedAvg"]
        assert {file.name for file in folder.rglob("*.*")} >= {"adapter_config.json", "adapter_model.safetensors"}


def test_public_names_and_their_parameters_are_those_of_the_list():
    """A change of the list is a change for users; `kit.public_names` says how to write it anew."""
    assert public_names.public_names() == public_names.FILE.read_text()


def test_every_public_class_and_function_has_an_example_in_its_docstring():
    """The examples themselves run with the doctests. Those of a class may be in its methods. Methods have one in their
    contract, whose tests run them all."""
    values = [Method]
    for name in ("", ".callbacks", ".core", ".core.affinity", ".core.simplex", ".data", ".glm"):
        module = import_module(f"ppfl{name}")
        own = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]
        values += [getattr(module, each) for each in getattr(module, "__all__", own)]
    values = [value for value in values if value is Method or value not in METHODS.values()]
    kinds = [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]
    found = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    without = [kind for kind in kinds if not any(test.examples for test in found.find(kind, kind.__name__))]
    assert len(kinds) > 70 and not without, "add a short example with >>>"


SCRIPT = Path(__file__).with_name("user_script.py")  # with every public feature
# No type that a user sees depends on these parts of torch and others, and to read them takes most of the time.
LEFT_OUT = (
    "torch._dynamo", "torch._export", "torch._functorch", "torch._higher_order_ops", "torch._inductor",
    "torch._library", "torch._numpy", "torch._prims", "torch._refs", "torch._subclasses", "torch.ao",
    "torch.distributed", "torch.distributions", "torch.export", "torch.fx", "torch.jit", "torch.onnx", "torch.optim",
    "torch.package", "torch.testing", "torch.utils", "IPython", "onnx", "onnxscript", "onnxruntime", "rich",
)  # fmt: skip
SKIPPED = f"[mypy-{','.join(f'{name}.*' for name in LEFT_OUT)}]\nfollow_imports = skip\n"
WRONG = "import ppfl\nx: int = ppfl.Population\nppfl.fit(1)\n"  # so that silence means something


@pytest.mark.processes
def test_a_users_script_passes_strict_type_checking(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\nfollow_imports = silent\n{SKIPPED}")
    (tmp_path / "wrong.py").write_text(WRONG)
    options = ["--config-file=mypy.ini", "--cache-dir=cache", "--sqlite-cache", "--no-error-summary", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *options, str(SCRIPT), "wrong.py"]
    where = os.environ | {"MYPYPATH": str(Path(ppfl.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if not line.startswith("wrong.py:")] == []
    assert {line.split(":")[1] for line in lines} == {"2", "3"}


def test_the_users_script_runs(capsys):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "at least one round" in capsys.readouterr().out
