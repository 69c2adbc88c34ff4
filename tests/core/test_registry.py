"""Names in settings stand for functions and classes, and nothing is imported for them unless their reader says so."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from kit.experiments import SHORT
from kit.own_methods import forget, join, split
from kit.refusals import DataError, PPFLError, SettingError, assert_refused
from ppfl import FedAvg
from ppfl.algorithms import METHODS, FineTune
from ppfl.core.registry import Functions, Imports, NamedCall, python_names
from ppfl.core.settings import Count, Positive, Seed, Settings
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
    sys.path.insert(0, str(folder))
    try:
        assert_refused(lambda: METHODS.find(name, None), SettingError, "has not been imported")
        with pytest.raises(ValueError, match="imported"):
            Experiment.model_validate(named("finetune", method={"name": name}))
        with pytest.raises(PPFLError, match="has not been imported"):
            join(hostile, [])
    finally:
        sys.path.remove(str(folder))
    assert module not in sys.modules


def test_names_of_python_objects_are_found_in_any_table_but_data():
    tables = {"data": {"name": "a:a"}, "model": {"name": "b:b"}, "watch": {"metrics": ["c:c"]}}
    method = {"name": "finetune", "method": {"name": "d:d", "rules": [{"name": "e:e"}]}}
    assert sorted(python_names({"name": "plain", **tables, "method": method})) == ["b:b", "c:c", "d:d", "e:e"]


def wide(width: int | None = None, height: int = 1):
    return width, height


def test_the_keys_of_a_table_are_the_keyword_arguments_of_the_function(tmp_path, monkeypatch):
    class Common(Settings):
        seed: Seed = 0
        share: float = 0.5

    things = Functions("thing", "thing", given=["federation"], base=Common)

    @things.register("near", share=0.25)
    def near(federation, file: Path, seed: int, count: Count = 3, sizes: tuple[Positive, ...] = (1.0,)):
        return federation, file, seed, count, sizes

    asked = things.make("near", file="a.txt", sizes=[2], seed=7)
    assert (asked.name, asked.share, asked.count, asked.sizes) == ("near", 0.25, 3, (2.0,))
    monkeypatch.setenv("PPFL_DATA", str(tmp_path / "data"))
    assert asked.call(tmp_path, federation=5, unasked=6) == (5, tmp_path / "a.txt", 7, 3, (2.0,))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").touch()
    assert asked.call(tmp_path, federation=5)[1] == tmp_path / "data" / "a.txt"
    for settings, *words in (
        ({"file": "a", "federation": 3}, "no key 'federation'", "its keys are name, seed, share, file"),
        ({"file": "a", "cuont": 3}, "no key 'cuont'", "did you mean 'count'?"),
        ({"file": "a", "count": 0}, "[thing] count is 0", "greater than 0"),
        ({}, "file is missing"),
    ):
        assert_refused(lambda: things.make("near", **settings), SettingError, *words)
    assert_refused(lambda: things.make("nera"), SettingError, "did you mean 'near'?", "module:f")
    for wrong, words in (("os", "there is no thing"), ("os:", "module:function"), ("a b:c", "module:function")):
        assert_refused(lambda: things.make(wrong), SettingError, words)
    others = Functions("other", "other")
    others.register("auto")(lambda: None)
    others.register("wide")(wide)
    table = TypeAdapter(Annotated[NamedCall | None, things.field(optional=True)])
    assert table.validate_json(table.dump_json(asked)) == asked and table.validate_python(None) is None
    assert table.dump_python(asked, exclude_unset=True) == {"name": "near", "file": "a.txt", "sizes": [2.0], "seed": 7}
    other = others.make("wide", height=2)  # TOML has no null
    assert TypeAdapter(Annotated[NamedCall, others.field()]).dump_python(other, exclude_none=True) == {
        "name": "wide", "height": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="auto is not a thing"):
        table.validate_python(others.make("auto"))


def test_a_function_of_ones_own_is_imported_when_it_is_called_and_its_keys_are_checked_then(tmp_path):
    code = "from pathlib import Path\ndef make(federation, width: int, file: Path = None, **more): "
    (tmp_path / "own_things.py").write_text(code + "return federation, width, file, more\ndef broken(): return 1 / 0\n")
    things = Functions("thing", "thing", given=["federation"], error=DataError)
    asked = things.make("own_things:make", Imports(tmp_path), width="4", file="a", other=[1])
    assert "own_things" not in sys.modules
    assert asked.call(tmp_path, federation=5) == (5, 4, tmp_path / "a", {"other": [1]})
    refused = (
        ({"width": "wide"}, SettingError, "[thing]: own_things:make: width is 'wide'", "it takes (federation, width"),
        ({}, SettingError, "cannot be called with no arguments", "'width'"),
    )
    for settings, error, *words in refused:
        wrong = things.make("own_things:make", **settings)
        assert_refused(lambda: wrong.call(tmp_path, federation=5), error, *words)
    assert_refused(lambda: things.make("own_things:make", width=math.nan), SettingError, "width is nan", "finite")
    broken = things.make("own_things:broken")
    assert_refused(lambda: broken.call(tmp_path), DataError, "ZeroDivisionError", "own_things.py, line 3")
    experiment = {"affinity": {"name": "own_things:make"}}
    assert python_names(experiment) == ["own_things:make"]
    sys.modules.pop("own_things")
