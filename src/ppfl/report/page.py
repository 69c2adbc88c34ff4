"""The page: sections that answer one question each, left out where the runs say nothing on it."""

from collections.abc import Sequence

from .areas import client_chart, share_chart, telling_clients
from .bars import MOST_BARS, membership_bars, no_bars
from .curves import cut_words, over_rounds, over_traffic, scored
from .details import client_table, settings_table, swatch
from .document import document, figure, folded, section, titled
from .dots import MOST_DOTS, Row, dot_chart
from .lines import Curve, Upward, line_chart
from .markup import Markup, element, join, shortened, words
from .methods import Method, common_metric, ranked
from .metric import Metric
from .palette import method_colour
from .portrait import Portrait, letter, portraits
from .records import Run
from .results import result_table
from .summary import plural, summary

_OTHER_CURVES = {
    "loss": "Training loss, mean over the samples met in a round",
    "objective": "Objective on all training data",
    "stationarity": "Stationarity: 0 where no step improves the objective",
}
_MOST_PORTRAITS = 4
_LONGEST_IN_TITLE = 48  # letters; more would leave the picture


def render(records: Sequence[Run], title: str, labels: Sequence[str] | None = None) -> tuple[str, str]:
    """The page, and the picture of the memberships that stands alone.

    Labels name the method of each record, and records with the same label are its seeds; without labels, records
    that differ in their seeds alone are one method, named after its algorithm where that tells methods apart.
    """
    metric = common_metric(records)
    methods = ranked(records, metric, labels)
    drawn = portraits(methods)
    first = drawn[0] if drawn else None
    sections = [
        element("h1", words(title)),
        element("p", words(summary(methods, metric, first)), class_="summary"),
        section("Results", result_table(methods, metric)),
        *(_who(first, drawn[1:_MOST_PORTRAITS]) if first else []),
        _curves(methods, metric),
        _clients(methods, metric),
        folded("All clients", client_table(methods, metric, first)),
        folded("What was run: settings and versions", settings_table(methods)),
    ]
    picture = membership_bars(first, _picture_title(first)) if first else no_bars(title)
    return document(title, join(sections)), picture + "\n"


def _picture_title(drawn: Portrait) -> str:
    kinds = sum(count > 0 for count in drawn.counts)
    label = shortened(drawn.label, _LONGEST_IN_TITLE)
    return f"{label} found {plural(kinds, 'kind')} among {plural(len(drawn.ids), 'client')}"


def _who(first: Portrait, others: Sequence[Portrait]) -> list[Markup]:
    shares = [
        element("li", swatch(j), element("b", words(letter(j))), words(f" {share:.0%}"))
        for j, share in enumerate(first.shares)
    ]
    which = f"{first.label}, the first of {first.seeds} seeds" if first.seeds > 1 else first.label
    said = (
        f"Memberships found by {which}. Each bar is a client, each colour a canonical model that clients "
        "share; the height of a colour says how much of that model the client is. Rest the pointer on a bar to "
        "see who it is."
    )
    if first.truth is not None:
        said += " The strip below shows the truth, its groups in the colour of the model they match best."
    if len(first.ids) > MOST_BARS:
        said += " There are too many clients to draw each, so a bar is the mean of neighbours."
    legend = join([element("p", words("Share of the population:")), element("ul", *shares)])
    parts = [
        figure(membership_bars(first), said),
        element("div", legend, class_="legend"),
        *_history(first),
    ]
    if others:
        pictures = [join([element("h3", words(o.label)), figure(membership_bars(o))]) for o in others]
        parts.append(folded("Memberships found by other methods", join(pictures)))
    return [section("Who the clients are", *parts)]


def _history(drawn: Portrait) -> list[Markup]:
    if len(drawn.rounds) < 2:
        return []
    certain = drawn.history.amax(2).mean(1).tolist()
    curve = Curve(drawn.label, 0, list(zip(drawn.rounds, certain, strict=True)))
    charts = [
        titled("Share of each canonical model in the population", share_chart(drawn)),
        titled(
            "How decided clients are: mean largest membership",
            line_chart([curve], "Mean largest membership over rounds", Upward("{:.0%}".format, most=1.0)),
        ),
    ]
    few = [titled(shortened(drawn.ids[at], 20), client_chart(drawn, at)) for at in telling_clients(drawn)]
    return [
        element("h3", words("How they came to be")),
        element("div", *charts, class_="pair"),
        element("p", words("A few clients: the purest of each kind, and the most mixed.")),
        element("div", *few, class_="few"),
    ]


def _curves(methods: Sequence[Method], metric: Metric) -> Markup:
    charts = []
    if curves := over_rounds(methods, metric.name):
        traffic, name = over_traffic(methods, metric.name), metric.words.capitalize()
        upward = scored([*curves, *(traffic.curves if traffic else [])], metric)
        said = f"{name} on test data{cut_words(upward, metric)}"
        charts.append(titled(said, line_chart(curves, f"{name} over rounds", upward)))
        if traffic:
            said = f"{name} against what a client has sent and received"
            charts.append(titled(said, line_chart(traffic.curves, said, upward, traffic.along)))
    for key, said in _OTHER_CURVES.items():
        if curves := over_rounds(methods, key):
            charts.append(titled(said, line_chart(curves, f"{said} over rounds", Upward("{:.3g}".format))))
    return section("Round by round", element("div", *charts, class_="pair")) if charts else words("")


def _clients(methods: Sequence[Method], metric: Metric) -> Markup:
    rows = [
        Row(method.label, method_colour(at), clients)
        for at, method in enumerate(methods)
        if (clients := method.per_client(metric))
    ]
    if not rows:
        return words("")
    said = "Each dot is a client, the line the median client. Rest the pointer on a dot to see who it is."
    if any(len(method.runs) > 1 for method in methods):
        said += " Values are means over seeds."
    if any(len(row.clients) > MOST_DOTS for row in rows):
        said += f" {MOST_DOTS} evenly ranked clients stand for all."
    return section("Client by client", figure(dot_chart(rows, metric), said))
