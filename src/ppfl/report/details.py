"""The tables that are folded away: every client, and what exactly was run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Markup, element, join, shortened_apart, words
from .methods import Method
from .metric import Metric
from .palette import model_colour
from .portrait import Portrait, letter
from .results import NOTHING

MOST_CLIENTS = 200
_LONGEST_NAME = 22


def client_table(methods: Sequence[Method], metric: Metric, drawn: Portrait | None) -> Markup:
    """By name: memberships, and the metric with each method. In the order of the picture."""
    everyone = dict.fromkeys(id_ for method in methods for id_ in method.first.ids)
    ids = list(dict.fromkeys([*(drawn.ids if drawn else ()), *everyone]))
    scores = [method.per_client(metric) for method in methods]
    place = {id_: at for at, id_ in enumerate(drawn.ids)} if drawn else {}
    scored = [at for at, score in enumerate(scores) if score]
    heads = [element("th", words("client"), scope="col")]
    if drawn:
        heads += [_model_head(j, column) for j, column in enumerate(drawn.columns)]
        if drawn.truth is not None:
            heads.append(element("th", words("truth"), scope="col"))
    heads += _method_heads([methods[at] for at in scored], class_="number")
    rows = []
    for id_ in ids[:MOST_CLIENTS]:
        cells = [element("th", words(id_), scope="row")]
        if drawn:
            cells += _membership_cells(drawn, place.get(id_))
        values = [scores[at].get(id_) for at in scored]
        cells += [_number(NOTHING if value is None else metric.show(value)) for value in values]
        rows.append(element("tr", *cells))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    kept = element("div", table, class_="wide")
    if len(ids) <= MOST_CLIENTS:
        return kept
    note = (
        f"The first {MOST_CLIENTS} of {len(ids)} clients, in the order of the picture; the rest is in the run folders."
    )
    return join([element("p", words(note)), kept])


def settings_table(methods: Sequence[Method]) -> Markup:
    """Settings and versions, a column a method; what is alike in all is said once."""
    sources = [flat(_settings(method)) for method in methods]
    keys = dict.fromkeys(key for source in sources for key in source)
    rows = []
    for key in keys:
        values = [source.get(key, NOTHING) for source in sources]
        alike = len(set(values)) == 1
        cells = (
            [element("td", words(values[0]), colspan=str(len(values)))]
            if alike
            else [element("td", words(value)) for value in values]
        )
        rows.append(element("tr", element("th", words(key), scope="row"), *cells))
    heads = [element("th", words("setting"), scope="col"), *_method_heads(methods)]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", table, class_="wide settings")


def _method_heads(methods: Sequence[Method], **more: str) -> list[Markup]:
    names = shortened_apart([method.label for method in methods], _LONGEST_NAME)
    return [
        element("th", words(name), scope="col", title=method.label, **more)
        for method, name in zip(methods, names, strict=True)
    ]


def _settings(method: Method) -> dict[str, Any]:
    run = method.first
    seeds = [seed for repeat in method.runs for seed in repeat.experiment.get("seeds", [])]
    return {**run.experiment, **({"seeds": seeds} if seeds else {}), "versions": run.versions}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names.

    >>> flat({"algorithm": {"name": "ppfl", "lr": 0.1}, "seed": 3})
    {'algorithm.name': 'ppfl', 'algorithm.lr': '0.1', 'seed': '3'}
    """
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _model_head(position: int, column: int) -> Markup:
    explained = f"canonical model {column} in the run's files, counted from 0"
    return element("th", swatch(position), words(letter(position)), scope="col", class_="number", title=explained)


def _membership_cells(drawn: Portrait, at: int | None) -> list[Markup]:
    width = drawn.k + (drawn.truth is not None)
    if at is None:
        return [_number(NOTHING)] * width
    row = drawn.memberships[at].tolist()
    largest = max(row)
    cells = [_number(f"{share:.2f}", strong=share == largest) for share in row]
    if drawn.truth is not None:
        true = int(drawn.truth[at].argmax())
        share = float(drawn.truth[at, true])
        said = letter(true) if share > 1 - 1e-6 else f"{letter(true)} {share:.2f}"
        cells.append(element("td", swatch(true), words(said)))
    return cells


def swatch(position: int) -> Markup:
    """A small square of a canonical model's colour."""
    return element("span", class_="swatch", style=f"background:{model_colour(position)}")


def _number(shown: str, *, strong: bool = False) -> Markup:
    content = words(shown)
    return element("td", element("b", content) if strong else content, class_="number")
