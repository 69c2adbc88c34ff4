"""The page of a fitted table: the canonical models, the memberships of the clients, and the quality of predictions."""

from collections.abc import Sequence

import torch

from .detail_tables import MAX_CLIENTS, swatch
from .document import collapsible, document, figure, section, titled_figure
from .effects import effect_table
from .markup import Markup, element, escape, join
from .membership_bars import MAX_BARS, membership_bars
from .population_results import PopulationResults, ScoreRow
from .score_bars import ScoreBar, score_bars
from .simplex_plot import MAX_DOTS, MAX_STACKED, simplex_chart
from .sorted_memberships import SortedMemberships, letter, order_by_largest
from .summary import join_names, plural

_WHOLE, _HALF = 900.0, 460.0  # widths of drawings
_LOG_MEAN = "the logarithm of the predicted mean"  # of all other families
_PREDICTORS = {
    "gaussian": "the predicted value",
    "heteroscedastic gaussian": "the predicted value",
    "bernoulli": "the log odds",
    "multinomial": "the log odds of the class, against the mean of all classes",
}


def render_population(results: PopulationResults) -> str:
    """The HTML page, which needs no external resources."""
    return document(
        results.title,
        join(
            [
                element("h1", escape(results.title)),
                element("p", escape(population_summary(results)), class_="summary"),
                section("What the canonical models say", effect_table(results), _notes(_effect_notes(results))),
                *([section("Where the clients are", *_where(results))] if results.k > 1 else []),
                *([section("How well it predicts", *_scores(results))] if results.scores else []),
                *([section("How many canonical models", *_candidates(results))] if len(results.candidates) > 1 else []),
                *([collapsible("All clients", _client_table(results))] if results.k > 1 else []),
                section("What was run", _command(results.command), _notes(results.notes)),
            ]
        ),
    )


def _command(command: str) -> Markup:
    return element("pre", element("code", escape(command)))


def population_summary(results: PopulationResults) -> str:
    """A paragraph that summarises the page."""
    columns = join_names(list(results.features)) if len(results.features) < 6 else f"{len(results.features)} columns"
    columns = columns or "the client alone"
    setting = f"{plural(results.rows, 'row')} of {plural(len(results.ids), 'client')} ({results.client}): "
    setting += f"{results.target} from {columns}, family {results.family}."
    return " ".join([setting, _division(results), _ranking(results)]).strip()


def _division(results: PopulationResults) -> str:
    tried = len(results.candidates) > 1
    if results.k == 1:
        enough = f" by {results.chosen_by}: clients do not differ enough to tell kinds apart" if tried else ""
        return f"One model for all was {'chosen' if tried else 'fitted'}{enough}."
    shares = join_names([f"{letter(at)} {share:.0%}" for at, share in enumerate(results.shares)])
    chosen = f", chosen by {results.chosen_by}," if tried else ""
    return (
        f"{results.k} canonical models{chosen} divide the population: {shares}. "
        f"Of {plural(len(results.ids), 'client')}, {_count(sum(results.clear))} at least {results.clear_from:.0%} one "
        f"of them and {_count(results.mixed)} mixed."
    )


def _count(clients: int) -> str:
    return f"{clients or 'none'} {'is' if clients == 1 else 'are'}"


def _ranking(results: PopulationResults) -> str:
    if not results.scores:
        return ""
    metric = results.metrics[0]
    ours, *others = ((score, score.figures[metric.name]) for score in results.scores)
    against = join_names([f"{metric.show(value)} with {score.label}" for score, value in others])
    return (
        f"On {plural(results.held_out_rows, 'row')} held out of all clients the {metric.full_name} is "
        f"{metric.show(ours[1])}, against {against}."
    )


def _effect_notes(results: PopulationResults) -> list[str]:
    which = f" of {results.target} = {results.classes[1]}" if results.family == "bernoulli" else ""
    average = f"share of {results.target} = {results.classes[1]}" if which else "prediction"
    predictor = _PREDICTORS.get(results.family, "the linear predictor")
    mixed = "a client's own coefficients are theirs, mixed by its membership."
    if results.mix == "predictions":
        mixed = "a client's prediction is theirs, mixed by its membership."
    predictor = _PREDICTORS.get(results.family, _LOG_MEAN)
    return [
        f"Numbers are coefficients in the table's own units: what one unit of a column adds to "
        f"{predictor}{which}. Canonical models go from the largest share of the population to the "
        f"smallest; {mixed}",
        "Bars are on one scale: what one standard deviation of the column adds, to the right if it is positive.",
        f"An average row has the mean of every column: the number is its {average}, the bar how far its predictor is "
        f"from that of one model for all.",
    ]


def _where(results: PopulationResults) -> list[Markup]:
    if results.k > 3:
        caption = "Each bar is a client, each colour is a canonical model, and its height is the membership."
        caption += (
            " There are many clients, so each bar is the mean of several neighbours."
            if len(results.ids) > MAX_BARS
            else ""
        )
        picture = membership_bars(_sorted_memberships(results))
    else:
        near = "a corner" if results.k == 3 else "an end"
        as_bars = results.k == 2 and len(results.ids) > MAX_STACKED
        caption = "Each bar counts clients" if as_bars else "Each dot is a client"
        caption += f": the nearer to {near}, the larger the membership in that canonical model. "
        caption += "Rest the pointer on it to see more."
        if results.k == 3:
            caption += " Lines are 20% apart, the cross is the mean of all clients."
            caption += f" Only {MAX_DOTS} clients are shown, at even steps." if len(results.ids) > MAX_DOTS else ""
        picture = simplex_chart(results.ids, results.memberships)
    shares = [
        element(
            "li", swatch(at), element("b", escape(letter(at))), escape(f" {share:.0%}, {plural(clear, 'clear client')}")
        )
        for at, (share, clear) in enumerate(zip(results.shares, results.clear, strict=True))
    ]
    shares.append(element("li", escape(f"{results.mixed} mixed")))
    head = element("p", escape("Share of the population:"))
    return [figure(picture, caption), element("div", head, element("ul", *shares), class_="legend")]


def _sorted_memberships(results: PopulationResults) -> SortedMemberships:
    c = torch.tensor(results.memberships, dtype=torch.float64)
    order = order_by_largest(c)
    ids = tuple(results.ids[at] for at in order.tolist())
    return SortedMemberships(results.client, ids, c[order], tuple(range(results.k)), None, (), c.new_empty(0, *c.shape))


def _scores(results: PopulationResults) -> list[Markup]:
    charts = []
    width = _HALF if len(results.metrics) > 1 else _WHOLE
    for metric in results.metrics:
        direction = "higher" if metric.higher_is_better else "lower"
        bars = [ScoreBar(score.label, score.figures[metric.name]) for score in results.scores]
        title = f"{metric.full_name.capitalize()}, {direction} is better"
        charts.append(titled_figure(title, score_bars(bars, metric, width)))
    times = ", ".join(f"{score.label} {_seconds(score)}" for score in results.scores)
    notes = [
        f"On {plural(results.held_out_rows, 'row')}, some from each client, that no model was fitted to. Seconds to "
        f"fit and predict: {times}.",
        "A model for each client is fitted to the rows of that client only, with a ridge so that it stays finite.",
    ]
    return [element("div", *charts, class_="pair"), _notes(notes)]


def _seconds(score: ScoreRow) -> str:
    return f"{score.seconds:.2f}" if score.seconds < 10 else f"{score.seconds:,.0f}"


def _candidates(results: PopulationResults) -> list[Markup]:
    has_scores = all(tried.held_out is not None for tried in results.candidates)
    names = ["canonical models", "log-likelihood", "BIC", "AIC"]
    names += ["held-out log-likelihood", "± to the best"] if has_scores else []
    rows = []
    for tried in results.candidates:
        cells = [str(tried.k), *(f"{each:,.1f}" for each in (tried.log_likelihood, tried.bic, tried.aic))]
        if tried.held_out is not None:
            cells += [f"{tried.held_out:.4f}", f"{tried.held_out_error or 0.0:.4f}"]
        shown = [element("b", escape(cell)) if tried.k == results.k else escape(cell) for cell in cells]
        rows.append(element("tr", *(element("td", cell, class_="number") for cell in shown)))
    heads = [element("th", escape(name), scope="col", class_="number") for name in names]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    notes = [f"The number in bold is used, chosen by {results.chosen_by}."]
    if has_scores:
        notes.append(
            "The held-out log-likelihood is the mean over rows held out within clients. Beside it is the standard "
            "error of its difference to the best; differences below it say little."
        )
    lowest = min(results.candidates, key=lambda tried: tried.bic).k
    notes += [f"The lowest BIC is that of {lowest}."] if lowest != results.k else []
    return [element("div", table), _notes(notes)]


def _client_table(results: PopulationResults) -> Markup:
    order = order_by_largest(torch.tensor(results.memberships)).tolist()
    names = [results.client, "rows", *(letter(at) for at in range(results.k))]
    heads = [
        element("th", *([swatch(at - 2)] if at > 1 else []), escape(name), scope="col", class_="number" if at else None)
        for at, name in enumerate(names)
    ]
    rows = []
    for i in order[:MAX_CLIENTS]:
        largest = max(results.memberships[i])
        shown = [
            element("b", escape(f"{share:.2f}")) if share == largest else escape(f"{share:.2f}")
            for share in results.memberships[i]
        ]
        numbers = [element("td", cell, class_="number") for cell in (escape(results.sizes[i]), *shown)]
        rows.append(element("tr", element("th", escape(results.ids[i]), scope="row"), *numbers))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    kept = element("div", table, class_="wide")
    if len(order) <= MAX_CLIENTS:
        return kept
    return join([element("p", escape(f"The first {MAX_CLIENTS} of {len(order)}; all are in memberships.csv.")), kept])


def _notes(notes: Sequence[str]) -> Markup:
    return element("ul", *(element("li", escape(note)) for note in notes), class_="notes")
