"""All sites agree on how the rows of their tables are prepared, before the first round.

Each site says which columns have numbers and which have text, which it would leave out, and the names of levels that
`[preparation]` does not name. Everything else is a sum over the site's training rows: where secure sums are on, the
server reads totals alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from ..data.column_sums import Center, ColumnPlan, TableFacts, agree
from ..data.preparation import Preparation, PreparationSettings
from ..errors import DataError
from ..server import DivergedError
from ..sites import Reply
from .federation_errors import FederationError
from .site_requests import SumColumns


def agree_on_columns(
    send: Callable[[Sequence[Any]], list[Reply]],
    described: Mapping[str, Reply],
    settings: PreparationSettings,
    step: float = 0.0,
) -> Preparation:
    """The preparation of the rows of all sites.

    send: gives the total over sites of their answers; described: what each said of its data; step: of secure sums.
    """

    def ask(plan: ColumnPlan, center: Center | None) -> dict[str, Tensor]:
        about = {} if center is None else center.model_dump()
        try:
            (reply,) = send([SumColumns(settings.model_dump(mode="json"), plan.model_dump(mode="json"), about)])
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

    said = {site: _column_facts(site, reply) for site, reply in described.items()}
    return agree(said, settings, ask, step * len(described))


def refuse_other_columns(preparation: Preparation, site: str, described: Reply) -> None:
    """Refuse a site that came later and whose columns are not those that were agreed on."""
    kinds = _column_facts(site, described).kinds
    for column in preparation.columns:
        here, there = kinds.get(column.name), "text" if column.levels else "numbers"
        if here not in (there, "empty") or (here == "empty" and column.fill is None):
            raise DataError(f"site {site!r} does not fit: column {column.name!r} has {here}, expected {there}")


def check_sums(request: SumColumns, reply: Reply) -> None:
    """Refuse sums of other names and sizes than were asked for."""
    expected = ColumnPlan.model_validate(request.plan).sizes(second=bool(request.center))
    found = {name: tuple(part.shape) for name, part in reply.metrics.items()}
    if found != {name: (size,) for name, size in expected.items()}:
        raise FederationError(f"its sums of columns are {found}, expected sizes {expected}")
    counted = {name: part for name, part in reply.metrics.items() if name not in ("sum", "deviation")}
    if odd := [name for name, part in counted.items() if bool((part < 0).any())]:
        raise FederationError(f"its {odd[0]} of columns are negative")
    if not request.center and float(reply.metrics["rows"]) < 1:
        raise FederationError("its sums are of no rows")


def _column_facts(site: str, described: Reply) -> TableFacts:
    try:
        facts = TableFacts.model_validate({name: described.facts[name] for name in TableFacts.model_fields})
    except (KeyError, ValidationError):
        facts = TableFacts(kinds={})
    if not facts.kinds or not {*facts.levels, *facts.left_out} <= {*facts.kinds}:
        raise FederationError(f"site {site!r} does not say what its columns are; install the same ppfl there")
    return facts
