"""A name "module:Class" in settings is a class, and nothing is imported for it unless its reader says so."""

import json
import sys

import pytest

from kit.experiments import SHORT
from kit.own_methods import forget, join, split
from kit.refusals import PPFLError, SettingError, assert_refused
from ppfl import FedAvg
from ppfl.algorithms import METHODS, FineTune
from ppfl.core.registry import Imports, python_names
from ppfl.runs import Experiment

MODULE = """
from ppfl import FedAvg

class {name}(FedAvg):
    factor: float = 0.5

class FedAvg(FedAvg):
    pass
"""


@pytest.fixture
def own(tmp_path, request):
    """The name of a method in a module that no other test has, and its folder."""
    module = "own_" + "".join(letter for letter in request.node.name if letter.isalnum())
    (tmp_path / f"{module}.py").write_text(MODULE.format(name=module.title().replace("_", "")))
    name = f"{module}:{module.title().replace('_', '')}"
    yield name, tmp_path
    forget(name)


def named(name, **settings):
    return {**SHORT, "name": "own", "population": {"k": 1}, "method": {"name": name, **settings}}


def test_a_method_of_ones_own_is_found_within_others_too_and_comes_back_from_json(own):
    name, folder = own
    for asked in (named(name, lr=0.2, factor=0.1), named("finetune", steps=2, method={"name": name, "factor": 0.1})):
        experiment = Experiment.model_validate(asked, context=Imports(folder))
        method = experiment.method.method if "steps" in asked["method"] else experiment.method
        assert isinstance(method, FedAvg) and method.factor == 0.1
        stored = json.loads(experiment.model_dump_json())
        assert python_names(stored) == [name]
        assert Experiment.model_validate(stored, context=Imports(folder)) == experiment
        assert join(*split(experiment.method)) == experiment.method  # as messages and files have it
    assert METHODS.find(name, None) is type(method)
    assert FineTune(method=method).method is method
    assert_refused(lambda: METHODS.find(f"{name.partition(':')[0]}:FedAvg", Imports(folder)), SettingError, "rename")


def test_nothing_is_imported_without_leave(own):
    name, folder = own
    module = name.partition(":")[0]
    body, _ = split(FineTune(method=FedAvg()))
    hostile = body.replace(b'"name":"fedavg"', f'"name":"{name}"'.encode())
    assert hostile != body
    only = Imports(folder, ("another:Method",))
    sys.path.insert(0, str(folder))
    try:
        assert_refused(lambda: METHODS.find(name, None), SettingError, "has not been imported")
        assert_refused(lambda: METHODS.find(name, only), SettingError, "may not be imported", "another:Method")
        for context in (None, only):
            with pytest.raises(ValueError, match="imported"):
                Experiment.model_validate(named("finetune", method={"name": name}), context=context)
        with pytest.raises(PPFLError, match="has not been imported"):
            join(hostile, [])
    finally:
        sys.path.remove(str(folder))
    assert module not in sys.modules


def test_names_of_python_objects_are_found_in_any_table_but_data():
    tables = {"data": {"factory": "a:a"}, "model": {"factory": "b:b"}, "watch": {"metrics": ["c:c"]}}
    method = {"name": "finetune", "method": {"name": "d:d", "rules": [{"name": "e:e"}]}}
    assert sorted(python_names({"name": "plain", **tables, "method": method})) == ["b:b", "c:c", "d:d", "e:e"]
