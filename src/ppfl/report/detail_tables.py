"""The collapsible tables at the end of the page: all clients, and the settings of all runs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Markup, element, escape, join, shorten_distinct
from .methods import MethodRuns
from .metric import Metric
from .palette import model_colour
from .results import NOTHING
from .sorted_memberships import SortedMemberships, letter

MAX_CLIENTS = 200
_MAX_NAME_LENGTH = 22


def client_table(methods: Sequence[MethodRuns], metric: Metric, shown: SortedMemberships | None) -> Markup:
    """One row per client, in the order of the picture: its memberships, and its metric with each method."""
    all_ids = dict.fromkeys(id_ for method in methods for id_ in method.first.ids)
    ids = list(dict.fromkeys([*(shown.ids if shown else ()), *all_ids]))
    scores = [method.per_client() for method in methods]
    place = {id_: at for at, id_ in enumerate(shown.ids)} if shown else {}
    scored = [at for at, score in enumerate(scores) if score]
    heads = [element("th", escape("client"), scope="col")]
    if shown:
        heads += [_model_head(j, column) for j, column in enumerate(shown.columns)]
        if shown.truth is not None:
            heads.append(element("th", escape("truth"), scope="col"))
    heads += _method_heads([methods[at] for at in scored], class_="number")
    rows = []
    for id_ in ids[:MAX_CLIENTS]:
        cells = [element("th", escape(id_), scope="row")]
        if shown:
            cells += _membership_cells(shown, place.get(id_))
        values = [scores[at].get(id_) for at in scored]
        cells += [_number(NOTHING if value is None else metric.show(value)) for value in values]
        rows.append(element("tr", *cells))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    kept = element("div", table, class_="wide")
    if len(ids) <= MAX_CLIENTS:
        return kept
    note = (
        f"The first {MAX_CLIENTS} of {len(ids)} clients, in the order of the picture; the rest is in the run folders."
    )
    return join([element("p", escape(note)), kept])


def settings_table(methods: Sequence[MethodRuns]) -> Markup:
    """Settings and versions, one column per method; a value that all methods share is shown once."""
    sources = [flatten_settings(_settings(method)) for method in methods]
    keys = dict.fromkeys(key for source in sources for key in source)
    rows = []
    for key in keys:
        values = [source.get(key, NOTHING) for source in sources]
        all_equal = len(set(values)) == 1
        cells = (
            [element("td", escape(values[0]), colspan=str(len(values)))]
            if all_equal
            else [element("td", escape(value)) for value in values]
        )
        rows.append(element("tr", element("th", escape(key), scope="row"), *cells))
    heads = [element("th", escape("setting"), scope="col"), *_method_heads(methods)]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", table, class_="wide settings")


def _method_heads(methods: Sequence[MethodRuns], **more: str) -> list[Markup]:
    names = shorten_distinct([method.label for method in methods], _MAX_NAME_LENGTH)
    return [
        element("th", escape(name), scope="col", title=method.label, **more)
        for method, name in zip(methods, names, strict=True)
    ]


def _settings(method: MethodRuns) -> dict[str, Any]:
    run = method.first
    seeds = [seed for repeat in method.runs for seed in repeat.experiment.get("seeds", [])]
    return {**run.experiment, **({"seeds": seeds} if seeds else {}), "versions": run.versions}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as a flat mapping with dotted names.

    >>> flatten_settings({"method": {"name": "ppfl", "lr": 0.1}, "seed": 3})
    {'method.name': 'ppfl', 'method.lr': '0.1', 'seed': '3'}
    """
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flatten_settings(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _model_head(position: int, column: int) -> Markup:
    explained = f"canonical model {column} in the run's files, counted from 0"
    return element("th", swatch(position), escape(letter(position)), scope="col", class_="number", title=explained)


def _membership_cells(shown: SortedMemberships, at: int | None) -> list[Markup]:
    width = shown.k + (shown.truth is not None)
    if at is None:
        return [_number(NOTHING)] * width
    row = shown.memberships[at].tolist()
    largest = max(row)
    cells = [_number(f"{share:.2f}", strong=share == largest) for share in row]
    if shown.truth is not None:
        true = int(shown.truth[at].argmax())
        share = float(shown.truth[at, true])
        label = letter(true) if share > 1 - 1e-6 else f"{letter(true)} {share:.2f}"
        cells.append(element("td", swatch(true), escape(label)))
    return cells


def swatch(position: int) -> Markup:
    """A small square in the colour of a canonical model."""
    return element("span", class_="swatch", style=f"background:{model_colour(position)}")


def _number(shown: str, *, strong: bool = False) -> Markup:
    content = escape(shown)
    return element("td", element("b", content) if strong else content, class_="number")
