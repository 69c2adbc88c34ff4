"""A method chosen by its name, in an experiment or within another method."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class MethodByName:
    """A table whose `name` says which method the other keys are settings of.

    The methods' settings have no key `name` themselves: it is their class.
    """

    def __init__(self, *, besides: str | None = None) -> None:
        self.besides = besides  # a method that cannot be chosen here

    @property
    def registry(self) -> dict[str, Any]:
        """The methods to choose from."""
        from . import METHODS  # now: some of them choose a method themselves

        return {name: method for name, method in METHODS.items() if name != self.besides}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[Any, CoreSchema] = {
            name: core_schema.no_info_before_validator_function(_without_name, handler.generate_schema(method))
            for name, method in self.registry.items()
        }
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda method: {"name": method.name, **method.model_dump(mode="json")}
        )
        return core_schema.tagged_union_schema(choices, _name_of, serialization=dump)


def _name_of(table: Any) -> str | None:
    name = table.get("name") if isinstance(table, dict) else getattr(table, "name", None)
    return None if name is None else str(name)


def _without_name(table: Any) -> Any:
    return {key: value for key, value in table.items() if key != "name"} if isinstance(table, dict) else table
