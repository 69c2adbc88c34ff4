"""Area charts of memberships over rounds, for the whole population and for single clients."""

from collections.abc import Sequence

from torch import Tensor

from .drawing import Axis, axis, drawing, grid_lines, text, tick_labels, tooltip
from .line_chart import round_label, thin_out
from .markup import Markup, element
from .palette import model_colour
from .sorted_memberships import SortedMemberships, letter

_MAX_ROUNDS = 200
_MAX_EXAMPLES = 6  # clients


def share_chart(shown: SortedMemberships) -> Markup:
    """The mean membership in each canonical model over all clients."""
    left, right, top, bottom = 50.0, 404.0, 12.0, 228.0
    x_axis = axis([float(t) for t in shown.rounds], left, right)
    y_axis = Axis(0, 1, bottom, top)
    mean = shown.history.mean(1)
    parts = _layers(shown.rounds, mean, x_axis, y_axis)
    parts += grid_lines(y_axis, left, right, "{:.0%}".format) + tick_labels(x_axis, bottom + 18, round_label)
    parts.append(text((left + right) / 2, bottom + 36, "round", anchor="middle"))
    before = 0.0
    for j, share in enumerate(float(s) for s in mean[-1]):
        if share > 0.06:
            parts.append(text(right + 6, y_axis.at(before + share / 2) + 4, f"{letter(j)} {share:.0%}"))
        before += share
    return drawing(460, 270, "Share of each canonical model over rounds", *parts)


def client_chart(shown: SortedMemberships, position: int) -> Markup:
    """A small chart of the memberships of one client."""
    x_axis = axis([float(t) for t in shown.rounds], 2, 148)
    layers = _layers(shown.rounds, shown.history[:, position], x_axis, Axis(0, 1, 64, 2))
    ends = [
        text(2, 80, f"round {shown.rounds[0]}", opacity=0.75),
        text(148, 80, str(shown.rounds[-1]), anchor="end", opacity=0.75),
    ]
    return drawing(150, 84, f"Memberships of {shown.ids[position]} over rounds", *layers, *ends)


def example_clients(shown: SortedMemberships) -> list[int]:
    """Positions of a few clients: the largest membership in each model, then the most mixed clients."""
    starts, before = [], 0
    for count in shown.counts:
        if count:
            starts.append(before)  # clients are sorted, so the first of each model has the largest membership
        before += count
    mixed = shown.memberships.amax(1).argsort(stable=True).tolist()
    chosen = starts[: _MAX_EXAMPLES - 2]
    return chosen + [i for i in mixed if i not in chosen][: _MAX_EXAMPLES - len(chosen)]


def _layers(rounds: Sequence[int], shares: Tensor, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    """Stacked bands that fill the height; shares: (T, K)."""
    kept = thin_out(range(len(rounds)), _MAX_ROUNDS)
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
        tip = tooltip(f"{letter(j)}: {float(shares[0, j]):.0%} at first, {float(shares[-1, j]):.0%} at last")
        parts.append(element("path", tip, d=path, fill=model_colour(j)))
        lower = upper
    return parts
