"""Networks, data and methods that an experiment file takes from Python."""

import json
import sys

import pytest
import torch

from kit.refusals import SettingError, assert_refused
from ppfl.data import SampleSpec, build
from ppfl.runs import Experiment, load_experiment, load_run

MODULE = """
import torch
from torch import nn
from ppfl import FedAvg, Federation

def make(width, spec, depth=1):
    return nn.Sequential(nn.Linear(*spec.shape, width), nn.Tanh(), nn.Linear(width, spec.n_classes))

def load(clients, seed=0, shapes=(1,)):
    x = torch.randn(20 * clients, 3, generator=torch.Generator().manual_seed(seed))
    return Federation.from_arrays(x, (x[:, 0] > 0).long(), [f"c{i % clients}" for i in range(len(x))])

class OwnAverage(FedAvg):
    factor: float = 0.5

def number(**settings): return 3
def broken(): return 1 / 0
def recall(prediction, target): return (prediction.argmax(1) == target)[target == 1].float().mean()
"""
TEXT = """
rounds = 3
data = {{ name = "{module}:load", clients = 5, shapes = [1, 2] }}
model = {{ name = "{module}:make", width = 4 }}
population = {{ k = 2, canonical = "2" }}
method = {{ name = "ppfl", lr = 0.1 }}
"""


@pytest.fixture
def experiment(tmp_path, request):
    """A file beside a module, under a name that no other test has."""
    module = "nets_" + "".join(letter for letter in request.node.name if letter.isalnum())
    (tmp_path / f"{module}.py").write_text(MODULE)
    file = tmp_path / f"{module}.toml"
    file.write_text(TEXT.format(module=module))
    yield file
    sys.modules.pop(module, None)


def test_what_functions_give_is_run_resumed_and_compared_from_any_folder(ppfl, experiment, here, monkeypatch):
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    before, run = list(sys.path), ("run", experiment, "--out", here / "out")
    done = ppfl(*run)
    assert done.code == 0, done.err
    assert sys.path == before and load_run(here / "out" / "seed-0").finished
    assert ppfl(*run, "--resume").code == 0
    assert "width" in ppfl(*run, "--resume", "--set", "model.width=5").err
    methods = "[methods.PPFL]\n[methods.FedAvg]\nmethod.name = 'fedavg'\npopulation.k = 1\n"
    experiment.write_text(experiment.read_text() + methods)
    own = f"[methods.Own]\nmethod.name = '{experiment.stem}:OwnAverage'\npopulation.k = 1\n"
    experiment.write_text(experiment.read_text() + own)
    for jobs in (1, 2):  # in this process, and in others, which import the module themselves
        compared = ppfl("compare", experiment, "--out", here / f"jobs-{jobs}", "--jobs", jobs)
        assert compared.code == 0, compared.err
        assert load_run(here / f"jobs-{jobs}" / "Own" / "seed-0").experiment["method"]["factor"] == 0.5
    assert ppfl("tune", experiment, "--budget", 1, "--rounds", 1).code == 0


def test_a_metric_of_ones_own_is_in_the_tables(ppfl, experiment, here):
    metric = ("--set", f'watch.metrics=["{experiment.stem}:recall"]')
    run = ppfl("run", experiment, "--out", here / "out", *metric)
    assert run.code == 0, run.err
    show = ppfl("show", here / "out" / "seed-0")
    for shown in (run.out, show.out):
        (header,) = (line for line in shown.splitlines() if "worst tenth " in line)
        assert "recall" in header
    value = load_run(here / "out" / "seed-0").scores["recall"]
    assert all(f"{value:.3g}" in shown for shown in (run.out, show.out))


def test_settings_are_plain_and_initial_values_come_from_the_seed(experiment, tmp_path):
    found = load_experiment(experiment)
    again = Experiment.model_validate(json.loads(json.dumps(found.model_dump(mode="json"))))
    assert again == found != load_experiment(experiment, ["model.width=5"])
    federation, before = found.build_data(tmp_path), torch.get_rng_state()
    nets = [found.build_population(SampleSpec.of(federation), seed, tmp_path).initial_network() for seed in (1, 1, 2)]
    assert before.equal(torch.get_rng_state())
    assert nets[0]["0.weight"].equal(nets[1]["0.weight"]) and not nets[0]["0.weight"].equal(nets[2]["0.weight"])


FAULTS = {
    "model.name=nowhere:make": ("[model]", "no module 'nowhere'"),
    "model.with=4": ("'with'", "it takes (width, spec"),
    "model={{name='{module}:broken'}}": ("ZeroDivisionError", "{module}.py, line 17"),
    "model.width=nan": ("width is nan", "a finite number"),
    "model={{name='{module}:number'}}": ("[model]", "returned a int", "nn.Module"),
    "data={{name='math:pi'}}": ("[data]", "'math:pi' is a float", "name a function"),
    "data={{name='{module}:number'}}": ("[data]", "returned a int", "Federation"),
}


@pytest.mark.parametrize("change", FAULTS)
def test_faults_are_one_line(ppfl, experiment, here, change):
    done = ppfl("run", experiment, "--set", change.format(module=experiment.stem))
    assert done.code == 2 and done.err.count("\n") == 1 and done.err.startswith("error: ")
    assert not [word for word in FAULTS[change] if word.format(module=experiment.stem) not in done.err], done.err


def test_modules_of_one_name_in_two_folders_are_two_and_those_that_python_has_are_refused(tmp_path):
    def load(folder, name, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
        return build(f"{name}:load", tmp_path / folder)

    texts = {folder: MODULE.replace("clients, seed", f"clients={n}, seed") for folder, n in (("a", 4), ("b", 6))}
    assert [load(folder, "nets_of_two", texts[folder]).n_clients for folder in "aba"] == [4, 6, 4]
    assert_refused(lambda: load("a", "json", MODULE), SettingError, "'json'", "rename the file")
    assert sys.modules["json"] is json
    fault = "import torch\nimport not_there_at_all\n"
    assert_refused(lambda: load("a", "nets_with_a_fault", fault), SettingError, "nets_with_a_fault.py, line 2")
