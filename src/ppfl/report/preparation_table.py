"""How the columns of a table were prepared, one row per column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .markup import Markup, element, escape, join


def preparation_table(preparation: Mapping[str, Any]) -> Markup:
    """From the preparation that a run folder holds.

    >>> ward = {"name": "<ward>", "levels": ["a"], "rare": [], "missing": 3}
    >>> "&lt;ward&gt;" in (table := preparation_table({"columns": [ward], "rows": 1200, "dropped": 5}))
    True
    >>> "one level, a" in table, "all 1,200 training rows. 5 rows were left out" in table
    (True, True)
    """
    heads = [element("th", escape(head), scope="col") for head in ("column", "became", "missing")]
    rows = []
    for column in preparation["columns"]:
        cells = [element("td", escape(_describe(column))), element("td", escape(str(column["missing"])))]
        rows.append(element("tr", element("th", escape(column["name"]), scope="row"), *cells))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    note = f"Means, deviations and levels are those of all {preparation['rows']:,} training rows."
    if preparation["dropped"]:
        note += f" {preparation['dropped']:,} rows were left out, as a value was missing."
    return join([element("p", escape(note)), element("div", table, class_="wide")])


def _describe(column: Mapping[str, Any]) -> str:
    """What became of a column.

    >>> age = {"levels": [], "mean": [40.0], "scale": [9.5], "fill": 40.0, "rare": []}
    >>> _describe(age), _describe(age | {"scale": [0.0]})
    ('(x - 40) / 9.5, and 40 where it was missing', 'one value: 0')
    >>> _describe({"levels": ["a", "b", "other"], "rare": ["c", "d"]})
    'indicators of b, other; the reference is a; c, d became other'
    """
    if column["levels"]:
        first, *others = column["levels"]
        found = f"indicators of {', '.join(others)}; the reference is {first}" if others else f"one level, {first}"
        return found + (f"; {', '.join(column['rare'])} became other" if column["rare"] else "")
    (mean,), (scale,) = column["mean"], column["scale"]
    if not scale:
        return "one value: 0"
    found = "x as it is" if (mean, scale) == (0, 1) else f"(x - {mean:.6g}) / {scale:.6g}"
    return found if column["fill"] is None else f"{found}, and {column['fill']:.6g} where it was missing"
