"""Networks and data that an experiment file takes from Python functions."""

import json
import sys

import pytest
import torch

from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import build
from ppfl.runs import Experiment, load_experiment, load_run

MODULE = """
import torch
from torch import nn
from ppfl import Federation

def make(width, sample_shape, n_classes, depth=1):
    layers = [nn.Linear(*sample_shape, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, n_classes))

def recurrent(federation, hidden=3):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, federation.n_classes)
        def forward(self, x):
            return self.head(self.cells(x[:, :, None])[0][:, -1])
    return Net()

def load(clients, seed=0, folder=None, shapes=(1,)):
    assert folder is not None
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(20 * clients, 3, generator=g)
    return Federation.from_arrays(x, (x[:, 0] > 0).long(), [f"c{i % clients}" for i in range(len(x))])

def number(**settings): return 3
def broken(): return 1 / 0
value = 3
"""
TEXT = """
rounds = 3
data = {{ factory = "{module}:load", clients = 5, shapes = [1, 2] }}
model = {{ factory = "{module}:make", width = 4 }}
population = {{ k = 2, canonical = "2" }}
algorithm = {{ name = "ppfl", lr = 0.1 }}
"""


@pytest.fixture
def module(tmp_path, request):
    """A module beside the experiment file, under a name that no other test has."""
    name = "nets_" + "".join(letter for letter in request.node.name if letter.isalnum())
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    for loaded in [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]:
        del sys.modules[loaded]


@pytest.fixture
def experiment(tmp_path, module):
    file = tmp_path / "mine.toml"
    file.write_text(TEXT.format(module=module))
    return file


def test_networks_and_data_from_functions_run_from_any_folder_and_are_resumed(
    ppfl, experiment, module, tmp_path, monkeypatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before, run = list(sys.path), ("run", experiment, "--out", tmp_path / "out")
    done = ppfl(*run)
    assert done.code == 0, done.err
    assert sys.path == before and load_run(tmp_path / "out" / "seed-0").finished
    assert ppfl(*run, "--resume").code == 0
    refused = ppfl(*run, "--resume", "--set", "model.width=5")
    assert refused.code == 2 and "width" in refused.err
    network = f"model={{factory='{module}:recurrent', hidden=2}}"
    mixed = "population={k=2, mix='weights', canonical='head'}"
    assert ppfl("run", experiment, "--out", tmp_path / "lstm", "--set", network, "--set", mixed).code == 0


def test_methods_are_compared_and_tuned_with_factories(ppfl, experiment, tmp_path) -> None:
    methods = "[methods.PPFL]\n[methods.FedAvg]\nalgorithm.name = 'fedavg'\npopulation.k = 1\n"
    experiment.write_text(experiment.read_text() + methods)
    assert ppfl("compare", experiment, "--out", tmp_path / "out", "--jobs", 1).code == 0
    assert ppfl("tune", experiment, "--budget", 1, "--rounds", 1).code == 0


def test_settings_are_plain_and_initial_values_come_from_the_seed(experiment, tmp_path) -> None:
    found = load_experiment(experiment)
    text = json.dumps(found.model_dump(mode="json"))
    again = Experiment.model_validate(json.loads(text))
    assert again == found and json.dumps(again.model_dump(mode="json")) == text
    assert hash(again.data) == hash(found.data) and load_experiment(experiment, ["model.width=5"]) != found
    federation, before = found.data.build(tmp_path), torch.get_rng_state()
    nets = [found.build_population(federation, seed, tmp_path).initial_network() for seed in (1, 1, 2)]
    assert before.equal(torch.get_rng_state())
    assert nets[0]["0.weight"].equal(nets[1]["0.weight"]) and not nets[0]["0.weight"].equal(nets[2]["0.weight"])


FAULTS = {
    "model.factory=nowhere:make": ("[model]", "no module 'nowhere'", "folder of the experiment file"),
    "model.factory={module}.deep:make": ("no module '{module}.deep'",),
    "model.factory={module}:mke": ("has no 'mke'", "make"),
    "model.factory={module}:value": ("is a int", "name a function"),
    "model.factory=no colon": ("model.factory is 'no colon'",),
    "model.with=4": ("'with'", "it takes (width, sample_shape"),
    "model={{factory='{module}:make'}}": ("'width'", "under [model]"),
    "model={{factory='{module}:number'}}": ("returned a int", "nn.Module"),
    "model={{factory='{module}:broken'}}": ("ZeroDivisionError", "{module}.py, line 26"),
    "model.width=1979-05-27": ("width is datetime.date", "a finite number"),
    "model.width=nan": ("width is nan", "a finite number"),
    "data={{factory='{module}:number'}}": ("[data]", "returned a int", "Federation"),
    "data.factory=json:loads": ("[data]", "cannot be called"),
}


@pytest.mark.parametrize("change", FAULTS)
def test_faults_are_one_line(ppfl, experiment, module, tmp_path, change: str) -> None:
    done = ppfl("run", experiment, "--out", tmp_path / "out", "--set", change.format(module=module))
    assert done.code == 2 and done.err.count("\n") == 1 and done.err.startswith("error: ")
    assert not [word for word in FAULTS[change] if word.format(module=module) not in done.err], done.err


def test_modules_of_the_same_name_in_two_folders_are_two(tmp_path) -> None:
    for folder, count in (("a", 4), ("b", 6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nets_of_two.py").write_text(MODULE.replace("clients, seed", f"clients={count}, seed"))
    found = [build("factory", tmp_path / folder, factory="nets_of_two:load").n_clients for folder in "aba"]
    assert found == [4, 6, 4]


def test_modules_that_python_has_already_or_that_fail_are_refused(tmp_path) -> None:
    def load(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        build("factory", tmp_path, factory=f"{name}:load")

    assert_refused(lambda: load("json", MODULE), SettingError, "'json'", "rename the file")
    assert sys.modules["json"] is json
    fault = "import torch\nimport not_there_at_all\n"
    words = ("not_there_at_all", "nets_with_a_fault.py, line 2")
    assert_refused(lambda: load("nets_with_a_fault", fault), SettingError, *words)
    ours = "from ppfl.core import DataError\ndef load():\n    raise DataError('there are no data today')\n"
    with pytest.raises(DataError, match="^there are no data today$"):  # is passed on as it is
        load("nets_that_refuse", ours)
