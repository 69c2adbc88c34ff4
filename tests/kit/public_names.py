"""The public names and their parameters as a text, to be read in a diff.

To write it anew, in the folder of the project: PYTHONPATH=tests .venv/bin/python -m kit.public_names
"""

import inspect
import textwrap
from importlib import import_module
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[1] / "door" / "public_names.txt"
MODULES = ("ppfl", "ppfl.glm", "ppfl.data")
WITH_METHODS = ("Federation", "Fitted", "PopulationRegressor", "PopulationClassifier", "PopulationChoice")


def public_names() -> str:
    """One line per name, functions and classes with their parameters; methods of what users hold in their hands."""
    lines = [line for module in MODULES for line in _lines(module, import_module(module))]
    return "".join(f"{textwrap.fill(line, 120, subsequent_indent='        ')}\n" for line in lines)


def _lines(prefix, module):
    own = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]
    for name in sorted(getattr(module, "__all__", own)):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from _lines(f"{prefix}.{name}", value)
            continue
        yield f"{prefix}.{name}{_parameters(value)}"
        if name in WITH_METHODS and (prefix, name) != ("ppfl.data", "Federation"):  # it is there under ppfl
            for method, found in inspect.getmembers(value, lambda v: callable(v) or isinstance(v, property)):
                if method[0] != "_" and getattr(found, "fget", found).__module__.startswith("ppfl"):
                    yield f"    .{method}{_parameters(found)}"


def _parameters(value):
    if not inspect.isclass(value) and not inspect.isroutine(value):
        return ""
    if hasattr(value, "model_fields"):  # pydantic makes the signature of a class later
        return f"(*, {', '.join(f'{name}={_Shown([field.default])}' for name, field in value.model_fields.items())})"
    try:
        signature = inspect.signature(value)
    except ValueError:  # of an error or a warning
        return ""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    short = [each if each.default is each.empty else each.replace(default=_Shown([each.default])) for each in plain]
    return str(signature.replace(parameters=short, return_annotation=signature.empty))


class _Shown(tuple):
    def __repr__(self):
        return repr(self[0]) if isinstance(self[0], bool | int | float | str | tuple | type(None)) else "..."


if __name__ == "__main__":
    FILE.write_text(public_names())
