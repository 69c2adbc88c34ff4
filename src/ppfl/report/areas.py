"""Memberships over rounds: how the canonical models came to divide the population, or a client, among them."""

from collections.abc import Sequence

from torch import Tensor

from .drawing import Axis, axis, drawing, hint, marks, rules, text
from .lines import thinned, whole
from .markup import Markup, element
from .palette import model_colour
from .portrait import Portrait, letter

_MOST_ROUNDS = 200
_FEW = 6


def share_chart(drawn: Portrait) -> Markup:
    """The share of each canonical model, over all clients."""
    left, right, top, bottom = 50.0, 404.0, 12.0, 228.0
    x_axis = axis([float(t) for t in drawn.rounds], left, right)
    y_axis = Axis(0, 1, bottom, top)
    mean = drawn.history.mean(1)
    parts = _layers(drawn.rounds, mean, x_axis, y_axis)
    parts += rules(y_axis, left, right, "{:.0%}".format) + marks(x_axis, bottom + 18, whole)
    parts.append(text((left + right) / 2, bottom + 36, "round", anchor="middle"))
    before = 0.0
    for j, share in enumerate(float(s) for s in mean[-1]):
        if share > 0.06:
            parts.append(text(right + 6, y_axis.at(before + share / 2) + 4, f"{letter(j)} {share:.0%}"))
        before += share
    return drawing(460, 270, "Share of each canonical model over rounds", *parts)


def client_chart(drawn: Portrait, position: int) -> Markup:
    """The memberships of one client, small."""
    x_axis = axis([float(t) for t in drawn.rounds], 2, 148)
    layers = _layers(drawn.rounds, drawn.history[:, position], x_axis, Axis(0, 1, 64, 2))
    ends = [
        text(2, 80, f"round {drawn.rounds[0]}", opacity=0.75),
        text(148, 80, str(drawn.rounds[-1]), anchor="end", opacity=0.75),
    ]
    return drawing(150, 84, f"Memberships of {drawn.ids[position]} over rounds", *layers, *ends)


def telling_clients(drawn: Portrait) -> list[int]:
    """A few positions that show the most: the purest client of each large kind, then the most mixed ones."""
    starts, before = [], 0
    for count in drawn.counts:
        if count:
            starts.append(before)  # sorted by kind and size, so a kind begins with its purest
        before += count
    mixed = drawn.memberships.amax(1).argsort(stable=True).tolist()
    chosen = starts[: _FEW - 2]
    return chosen + [i for i in mixed if i not in chosen][: _FEW - len(chosen)]


def _layers(rounds: Sequence[int], shares: Tensor, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    """shares: (T, K). Bands on top of each other that fill the height."""
    kept = thinned(range(len(rounds)), _MOST_ROUNDS)
    xs = [x_axis.at(rounds[at]) for at in kept]
    if len(xs) == 1:
        xs, kept = [x_axis.start, x_axis.end], kept * 2
    edges = shares[kept].cumsum(1).clamp(max=1)
    lower = [y_axis.start] * len(xs)
    parts = []
    for j in range(shares.shape[1]):
        upper = [y_axis.at(float(edge)) for edge in edges[:, j]]
        outline = list(zip(xs, lower, strict=True)) + list(zip(xs, upper, strict=True))[::-1]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in outline) + "Z"
        said = hint(f"{letter(j)}: {float(shares[0, j]):.0%} at first, {float(shares[-1, j]):.0%} at last")
        parts.append(element("path", said, d=path, fill=model_colour(j)))
        lower = upper
    return parts
