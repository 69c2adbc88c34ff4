"""The report page. Each section answers one question and is left out if the runs have no data for it."""

from collections.abc import Sequence

from ppfl.runs.record import RunRecord

from .area_charts import client_chart, example_clients, share_chart
from .curves import cut_note, over_rounds, over_traffic, score_axis
from .detail_tables import client_table, settings_table, swatch
from .document import collapsible, document, figure, section, titled_figure
from .dot_chart import MAX_DOTS, DotRow, dot_chart
from .line_chart import Curve, YAxisFormat, line_chart
from .markup import Markup, element, escape, join, shorten
from .membership_bars import MAX_BARS, empty_picture, membership_bars
from .methods import MethodRuns, common_metric, rank_methods
from .metric import Metric
from .palette import method_colour
from .preparation_table import preparation_table
from .results import result_table
from .sorted_memberships import SortedMemberships, letter, memberships_of_methods
from .summary import plural, summary

_OTHER_CURVES = {
    "loss": "Training loss, mean over the samples used in a round",
    "objective": "Objective on all training data",
    "stationarity": "Stationarity: 0 where no step improves the objective",
}
_MAX_MEMBERSHIP_PICTURES = 4
_MAX_TITLE_LABEL = 48  # letters; longer labels would not fit into the picture


def render(records: Sequence[RunRecord], title: str, labels: Sequence[str] | None = None) -> tuple[str, str]:
    """The HTML page, and the standalone picture of the memberships.

    `labels` names the method of each record; records with the same label are seeds of one method. Without labels,
    records that differ in their seeds only are one method, named after its `[method]` if that name is unique.
    """
    metric = common_metric(records)
    methods = rank_methods(records, metric, labels)
    shown = memberships_of_methods(methods)
    first = shown[0] if shown else None
    sections = [
        element("h1", escape(title)),
        element("p", escape(summary(methods, metric, first)), class_="summary"),
        section("Results", result_table(methods, metric)),
        *(_membership_section(first, shown[1:_MAX_MEMBERSHIP_PICTURES]) if first else []),
        _curves(methods, metric),
        _clients(methods, metric),
        collapsible("All clients", client_table(methods, metric, first)),
        *_preparation(records),
        collapsible("What was run: settings and versions", settings_table(methods)),
    ]
    picture = membership_bars(first, _picture_title(first)) if first else empty_picture(title)
    return document(title, join(sections)), picture + "\n"


def _preparation(records: Sequence[RunRecord]) -> list[Markup]:
    """How the columns of the table were prepared; nothing where they were not."""
    found = [preparation for run in records if (preparation := getattr(run, "preparation", None)) is not None]
    return [collapsible("How the columns were prepared", preparation_table(found[0]))] if found else []


def _picture_title(shown: SortedMemberships) -> str:
    kinds = sum(count > 0 for count in shown.counts)
    label = shorten(shown.label, _MAX_TITLE_LABEL)
    return f"{label} found {plural(kinds, 'kind')} among {plural(len(shown.ids), 'client')}"


def _membership_section(first: SortedMemberships, others: Sequence[SortedMemberships]) -> list[Markup]:
    shares = [
        element("li", swatch(j), element("b", escape(letter(j))), escape(f" {share:.0%}"))
        for j, share in enumerate(first.shares)
    ]
    which = f"{first.label}, the first of {first.seeds} seeds" if first.seeds > 1 else first.label
    caption = (
        f"Memberships found by {which}. Each bar is a client and each colour a canonical model that "
        "clients share; the height of a colour is the membership of the client in that model. Rest the pointer on a "
        "bar to see the name of the client."
    )
    if first.truth is not None:
        caption += " The strip below shows the truth, its groups in the colour of the model they match best."
    if len(first.ids) > MAX_BARS:
        caption += " There are too many clients to draw each, so each bar is the mean of several neighbours."
    legend = join([element("p", escape("Share of the population:")), element("ul", *shares)])
    parts = [
        figure(membership_bars(first), caption),
        element("div", legend, class_="legend"),
        *_history(first),
    ]
    if others:
        pictures = [join([element("h3", escape(o.label)), figure(membership_bars(o))]) for o in others]
        parts.append(collapsible("Memberships found by other methods", join(pictures)))
    return [section("Memberships of the clients", *parts)]


def _history(shown: SortedMemberships) -> list[Markup]:
    if len(shown.rounds) < 2:
        return []
    certain = shown.history.amax(2).mean(1).tolist()
    curve = Curve(shown.label, 0, list(zip(shown.rounds, certain, strict=True)))
    charts = [
        titled_figure("Share of each canonical model in the population", share_chart(shown)),
        titled_figure(
            "Mean largest membership of the clients",
            line_chart([curve], "Mean largest membership over rounds", YAxisFormat("{:.0%}".format, maximum=1.0)),
        ),
    ]
    few = [titled_figure(shorten(shown.ids[at], 20), client_chart(shown, at)) for at in example_clients(shown)]
    return [
        element("h3", escape("Memberships over rounds")),
        element("div", *charts, class_="pair"),
        element("p", escape("A few clients: those with the largest memberships, and the most mixed.")),
        element("div", *few, class_="few"),
    ]


def _curves(methods: Sequence[MethodRuns], metric: Metric) -> Markup:
    charts = []
    if curves := over_rounds(methods, metric.name):
        traffic, name = over_traffic(methods, metric.name), metric.full_name.capitalize()
        y_format = score_axis([*curves, *(traffic.curves if traffic else [])], metric)
        caption = f"{name} on test data{cut_note(y_format, metric)}"
        charts.append(titled_figure(caption, line_chart(curves, f"{name} over rounds", y_format)))
        if traffic:
            caption = f"{name} against what a client has sent and received"
            charts.append(titled_figure(caption, line_chart(traffic.curves, caption, y_format, traffic.x_format)))
    for key, caption in _OTHER_CURVES.items():
        if curves := over_rounds(methods, key):
            chart = line_chart(curves, f"{caption} over rounds", YAxisFormat("{:.3g}".format))
            charts.append(titled_figure(caption, chart))
    return section("Round by round", element("div", *charts, class_="pair")) if charts else escape("")


def _clients(methods: Sequence[MethodRuns], metric: Metric) -> Markup:
    rows = [
        DotRow(method.label, method_colour(at), clients)
        for at, method in enumerate(methods)
        if (clients := method.per_client())
    ]
    if not rows:
        return escape("")
    caption = "Each dot is a client, and the line is the median client. Rest the pointer on a dot to see its name."
    if any(len(method.runs) > 1 for method in methods):
        caption += " Values are means over seeds."
    if any(len(row.clients) > MAX_DOTS for row in rows):
        caption += f" Only {MAX_DOTS} clients are shown, at even steps of the ranking."
    return section("Client by client", figure(dot_chart(rows, metric), caption))
