"""All sites agree on how the rows of their tables are prepared, before the first round.

Each site says which columns have numbers and which have text, and the names of levels that `[preparation]` does not
name. Everything else is a sum over the site's training rows: where secure sums are on, the server reads totals alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..data.column_sums import Center, ColumnPlan, agree
from ..data.preparation import Preparation
from ..data.preparation import PreparationSettings
from ..errors import DataError
from ..server import DivergedError
from ..sites import Reply
from .federation_errors import FederationError
from .site_requests import SumColumns

KINDS = ("numbers", "text", "empty")


def agree_on_columns(
    send: Callable[[Sequence[Any]], list[Reply]],
    described: Mapping[str, Reply],
    settings: PreparationSettings,
    step: float = 0.0,
) -> Preparation:
    """The preparation of the rows of all sites.

    send: gives the total over sites of their answers; described: what each said of its data; step: of secure sums.
    """
    said = {site: _column_facts(site, reply.facts) for site, reply in described.items()}

    def ask(plan: ColumnPlan, center: Center | None) -> dict[str, Tensor]:
        about = {} if center is None else {name: list(part) for name, part in center._asdict().items()}
        try:
            (reply,) = send([SumColumns(settings.model_dump(mode="json"), plan_to_json(plan), about)])
        except DivergedError:  # what numbers are called that secure sums cannot carry
            raise DataError(
                "a column's sum is too large for secure sums; measure large numbers in a larger unit"
            ) from None
        answered = round(float(reply.metrics["sites"]))
        if answered < len(described):
            raise FederationError(
                f"{answered} of {len(described)} sites have summed their columns; all must be there when a run begins, "
                f"so look at the logs here and at the sites"
            )
        return {name: part.cpu() for name, part in reply.metrics.items()}

    return agree(said, settings, ask, step * len(described))


def refuse_other_columns(preparation: Preparation, site: str, described: Reply) -> None:
    """Refuse a site that came later and whose columns are not those that were agreed on."""
    kinds = _column_facts(site, described.facts)["kinds"]
    for column in preparation.columns:
        here, there = kinds.get(column.name), "text" if column.levels else "numbers"
        if here not in (there, "empty") or (here == "empty" and column.fill is None and not column.levels):
            raise DataError(f"site {site!r} does not fit: column {column.name!r} has {here}, expected {there}")


def check_sums(request: SumColumns, reply: Reply) -> None:
    """Refuse sums of other names and sizes than were asked for."""
    expected = plan_from_json(request.plan).sizes(second=bool(request.center))
    found = {name: tuple(part.shape) for name, part in reply.metrics.items()}
    if found != {name: (size,) for name, size in expected.items()}:
        raise FederationError(f"its sums of columns are {found}, expected sizes {expected}")
    counted = {name: part for name, part in reply.metrics.items() if name not in ("sum", "deviation")}
    if odd := [name for name, part in counted.items() if bool((part < 0).any())]:
        raise FederationError(f"its {odd[0]} of columns are negative")
    if not request.center and float(reply.metrics["rows"]) < 1:
        raise FederationError("its sums are of no rows")


def plan_to_json(plan: ColumnPlan) -> dict[str, Any]:
    """As plain values."""
    levels = {name: list(names) for name, names in plan.levels.items()}
    return {"columns": list(plan.columns), "numbers": list(plan.numbers), "levels": levels}


def plan_from_json(found: Mapping[str, Any]) -> ColumnPlan:
    """What `plan_to_json` gave."""
    levels = {str(name): tuple(map(str, names)) for name, names in found["levels"].items()}
    return ColumnPlan(tuple(map(str, found["columns"])), tuple(map(str, found["numbers"])), levels)


def center_from_json(found: Mapping[str, Any]) -> Center | None:
    """None for the first pass, which has no center."""
    return Center(tuple(map(float, found["mean"])), tuple(map(float, found["unit"]))) if found else None


def _column_facts(site: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    kinds, levels = facts.get("kinds"), facts.get("levels")
    if (
        not isinstance(kinds, dict)
        or not isinstance(levels, dict)
        or not kinds
        or not all(kind in KINDS for kind in kinds.values())
        or not all(isinstance(names, list) and column in kinds for column, names in levels.items())
    ):
        raise FederationError(f"site {site!r} does not say what its columns are; install the same ppfl there")
    return {"kinds": kinds, "levels": levels}
