"""Every public class and function has a docstring with an example; the examples themselves run with the doctests."""

import doctest
import importlib
import inspect
from types import ModuleType

import pytest

from ppfl.algorithms import METHODS

MODULES = ("ppfl", "ppfl.callbacks", "ppfl.core", "ppfl.core.affinity", "ppfl.core.simplex", "ppfl.data", "ppfl.glm")


def public_objects() -> dict[str, object]:
    """All public classes and functions by full name; constants and names of types explain themselves."""
    found: dict[str, object] = {f"ppfl.algorithms.{kind.__name__}": kind for kind in METHODS.values()}
    for module in map(importlib.import_module, MODULES):
        for name in _names(module):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = value
    return found


def _names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]


def examples(value: object) -> int:
    """How many examples it has of its own: a class has those of its methods too, but none of the class above it."""
    docs = [value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__]
    if inspect.isclass(value):
        members = [getattr(member, "__func__", member) for member in list(vars(value).values())]
        docs += [member.__doc__ for member in members if inspect.isfunction(member) or isinstance(member, property)]
    return sum(len(doctest.DocTestParser().get_examples(doc)) for doc in docs if doc)


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_a_public_name_has_an_example(name: str) -> None:
    value = public_objects()[name]
    assert value.__doc__, f"{name} has no docstring"
    assert examples(value), f"{name} has no example in its docstring; add a short one with >>>"


def test_every_name_that_is_exported_exists_and_is_sorted_out() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        names = _names(module)
        assert len(names) == len(set(names))
        assert all(hasattr(module, exported) for exported in names)
