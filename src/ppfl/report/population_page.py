"""The page of a fitted table: what canonical models say, where clients are between them, how well that predicts."""

from collections.abc import Sequence

import torch

from .bars import MOST_BARS, membership_bars
from .details import MOST_CLIENTS, swatch
from .document import document, figure, folded, section, titled
from .effects import effect_table
from .markup import Markup, element, join, words
from .population import Population, Score
from .portrait import Portrait, by_kind, letter
from .score_bars import ScoreBar, score_bars
from .simplex import MOST_DOTS, MOST_STACKED, simplex_chart
from .summary import listed, plural

_WHOLE, _HALF = 900.0, 460.0  # widths of drawings
_PREDICTORS = {
    "gaussian": "the predicted value",
    "poisson": "the logarithm of the predicted mean",
    "gamma": "the logarithm of the predicted mean",
    "bernoulli": "the log odds",
    "multinomial": "the log odds of the class, against the mean of all classes",
}


def render_population(drawn: Population) -> str:
    """One page that needs nothing from outside."""
    return document(
        drawn.title,
        join(
            [
                element("h1", words(drawn.title)),
                element("p", words(population_summary(drawn)), class_="summary"),
                section("What the canonical models say", effect_table(drawn), _notes(_effect_words(drawn))),
                *([section("Where the clients are", *_where(drawn))] if drawn.k > 1 else []),
                *([section("How well it predicts", *_scores(drawn))] if drawn.scores else []),
                *([section("How many canonical models", *_candidates(drawn))] if len(drawn.candidates) > 1 else []),
                *([folded("All clients", _client_table(drawn))] if drawn.k > 1 else []),
                section("What was run", element("pre", element("code", words(drawn.command))), _notes(drawn.notes)),
            ]
        ),
    )


def population_summary(drawn: Population) -> str:
    """In plain sentences."""
    columns = listed(list(drawn.features)) if len(drawn.features) < 6 else f"{len(drawn.features)} columns"
    setting = f"{plural(drawn.rows, 'row')} of {plural(len(drawn.ids), 'client')} ({drawn.client}): "
    setting += f"{drawn.target} from {columns}, family {drawn.family}."
    return " ".join([setting, _division(drawn), _ranking(drawn)]).strip()


def _division(drawn: Population) -> str:
    tried = len(drawn.candidates) > 1
    if drawn.k == 1:
        enough = " by BIC: clients do not differ enough to tell kinds apart" if tried else ""
        return f"One model for all was {'chosen' if tried else 'fitted'}{enough}."
    shares = listed([f"{letter(at)} {share:.0%}" for at, share in enumerate(drawn.shares)])
    return (
        f"{drawn.k} canonical models{', chosen by BIC,' if tried else ''} divide the population: {shares}. "
        f"Of {plural(len(drawn.ids), 'client')}, {_count(sum(drawn.clear))} at least {drawn.clear_from:.0%} one of "
        f"them and {_count(drawn.mixed)} mixed."
    )


def _count(clients: int) -> str:
    return f"{clients or 'none'} {'is' if clients == 1 else 'are'}"


def _ranking(drawn: Population) -> str:
    if not drawn.scores:
        return ""
    metric = drawn.metrics[0]
    ours, *others = ((score, score.figures[metric.name]) for score in drawn.scores)
    against = listed([f"{metric.show(value)} with {score.label}" for score, value in others])
    return (
        f"On {plural(drawn.held_out_rows, 'row')} held out of all clients the {metric.words} is "
        f"{metric.show(ours[1])}, against {against}."
    )


def _effect_words(drawn: Population) -> list[str]:
    which = f" of {drawn.target} = {drawn.classes[1]}" if drawn.family == "bernoulli" else ""
    average = f"share of {drawn.target} = {drawn.classes[1]}" if which else "prediction"
    mixed = "a client's own coefficients are theirs, mixed by its membership."
    if drawn.mix == "predictions":
        mixed = "a client's prediction is theirs, mixed by its membership."
    return [
        f"Numbers are coefficients in the table's own units: what one unit of a column adds to "
        f"{_PREDICTORS[drawn.family]}{which}. Canonical models go from the largest share of the population to the "
        f"smallest; {mixed}",
        "Bars are on one scale: what one standard deviation of the column adds, to the right where it raises.",
        f"An average row has the mean of every column: the number is its {average}, the bar how far its predictor is "
        f"from that of one model for all.",
    ]


def _where(drawn: Population) -> list[Markup]:
    if drawn.k > 3:
        said = "Each bar is a client, each colour a canonical model; the height says how much of it the client is."
        said += " A bar is the mean of neighbours, as there are many." if len(drawn.ids) > MOST_BARS else ""
        picture = membership_bars(_portrait(drawn))
    else:
        near = "a corner" if drawn.k == 3 else "an end"
        said = "Each bar counts clients" if drawn.k == 2 and len(drawn.ids) > MOST_STACKED else "Each dot is a client"
        said += f": the nearer to {near}, the more of that canonical model it is. Rest the pointer on it to see more."
        if drawn.k == 3:
            said += " Lines are 20% apart, the cross is the mean of all clients."
            said += f" {MOST_DOTS} clients stand for all." if len(drawn.ids) > MOST_DOTS else ""
        picture = simplex_chart(drawn.ids, drawn.memberships)
    shares = [
        element(
            "li", swatch(at), element("b", words(letter(at))), words(f" {share:.0%}, {plural(clear, 'clear client')}")
        )
        for at, (share, clear) in enumerate(zip(drawn.shares, drawn.clear, strict=True))
    ]
    shares.append(element("li", words(f"{drawn.mixed} mixed")))
    head = element("p", words("Share of the population:"))
    return [figure(picture, said), element("div", head, element("ul", *shares), class_="legend")]


def _portrait(drawn: Population) -> Portrait:
    c = torch.tensor(drawn.memberships, dtype=torch.float64)
    order = by_kind(c)
    ids = tuple(drawn.ids[at] for at in order.tolist())
    return Portrait(drawn.client, ids, c[order], tuple(range(drawn.k)), None, (), c.new_empty(0, *c.shape))


def _scores(drawn: Population) -> list[Markup]:
    charts = []
    width = _HALF if len(drawn.metrics) > 1 else _WHOLE
    for metric in drawn.metrics:
        direction = "higher" if metric.higher_is_better else "lower"
        bars = [ScoreBar(score.label, score.figures[metric.name]) for score in drawn.scores]
        charts.append(titled(f"{metric.words.capitalize()}, {direction} is better", score_bars(bars, metric, width)))
    times = ", ".join(f"{score.label} {_seconds(score)}" for score in drawn.scores)
    notes = [
        f"On {plural(drawn.held_out_rows, 'row')}, a part of each client's, that no model has seen. Seconds to fit "
        f"and predict: {times}.",
        "A model for each client has its own rows alone, held by a ridge so that it stays finite with few of them.",
    ]
    return [element("div", *charts, class_="pair"), _notes(notes)]


def _seconds(score: Score) -> str:
    return f"{score.seconds:.2f}" if score.seconds < 10 else f"{score.seconds:,.0f}"


def _candidates(drawn: Population) -> list[Markup]:
    metric = drawn.metrics[0] if drawn.metrics else None
    names = ["canonical models", "BIC", "AIC", *([f"held-out {metric.words}"] if metric else [])]
    lowest = min(tried.bic for tried in drawn.candidates)
    rows = []
    for tried in drawn.candidates:
        cells = [str(tried.k), f"{tried.bic:,.1f}", f"{tried.aic:,.1f}"]
        cells += [metric.show(tried.score.figures[metric.name])] if metric and tried.score else []
        shown = [element("b", words(cell)) if tried.bic == lowest else words(cell) for cell in cells]
        rows.append(element("tr", *(element("td", cell, class_="number") for cell in shown)))
    heads = [element("th", words(name), scope="col", class_="number") for name in names]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    said = "The lowest BIC is taken: it asks whether the data of the clients pay for more canonical models."
    said += f" Held-out rows are predicted best with {other}." if (other := drawn.best_predicting) else ""
    return [element("div", table), _notes([said])]


def _client_table(drawn: Population) -> Markup:
    order = by_kind(torch.tensor(drawn.memberships)).tolist()
    names = [drawn.client, "rows", *(letter(at) for at in range(drawn.k))]
    heads = [
        element("th", *([swatch(at - 2)] if at > 1 else []), words(name), scope="col", class_="number" if at else None)
        for at, name in enumerate(names)
    ]
    rows = []
    for i in order[:MOST_CLIENTS]:
        largest = max(drawn.memberships[i])
        shown = [
            element("b", words(f"{share:.2f}")) if share == largest else words(f"{share:.2f}")
            for share in drawn.memberships[i]
        ]
        numbers = [element("td", cell, class_="number") for cell in (words(drawn.sizes[i]), *shown)]
        rows.append(element("tr", element("th", words(drawn.ids[i]), scope="row"), *numbers))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    kept = element("div", table, class_="wide")
    if len(order) <= MOST_CLIENTS:
        return kept
    return join([element("p", words(f"The first {MOST_CLIENTS} of {len(order)}; all are in memberships.csv.")), kept])


def _notes(notes: Sequence[str]) -> Markup:
    return element("ul", *(element("li", words(note)) for note in notes), class_="notes")
