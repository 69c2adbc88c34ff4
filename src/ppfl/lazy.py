"""Names that a package offers and imports when they are first used, so that `import` of the package costs nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exported(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of a package; homes: the names, each with the module of the package that has it."""

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return found
