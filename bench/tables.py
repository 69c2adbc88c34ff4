"""The results as tables for a terminal."""

from collections.abc import Sequence

from cases import CONVOLUTIONS, FEDAVG, PASSES, local_steps
from growth import Grown
from results import Compared
from targets import Target
from turns import Measured

NOTHING = "–"
MIB = 2**20


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their content; the first aligned left, the others right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        return "  ".join([f"  {first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()

    return "\n".join([line(head), "  " + "─" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)])


def compared_table(compared: Compared) -> str:
    head = ("", "s per round", "x plain", "x FedAvg", "of limit", "peak MiB", "above data", "B up", "B down")
    title = f"({compared.part}) {compared.title}; matmul limit {compared.limit / 1e9:.0f} Gflop/s"
    rows = table(head, [_row(compared, label) for label in compared.found])
    return f"{title}\n\n{rows}{_of_convolutions(compared)}{_split(compared)}"


def _of_convolutions(compared: Compared) -> str:
    """How much of a round's time its convolutions alone would take, one client per core and in their best layout."""
    alone = compared.found.get(CONVOLUTIONS)
    if alone is None or alone.failed:
        return ""
    others = [one for one in compared.found.values() if one is not alone and not one.failed]
    parts = ", ".join(f"{one.case.label} {alone.seconds / one.seconds:.0%}" for one in others)
    return f"\n  of the convolution limit: {parts}"


def _split(compared: Compared) -> str:
    """A round of FedAvg as arithmetic, memory and Python."""
    parts = [compared.found.get(label) for label in (FEDAVG, local_steps(FEDAVG), PASSES)]
    seconds = [one.seconds for one in parts if one is not None and not one.failed]
    if len(seconds) < len(parts):
        return ""
    whole, steps, passes = seconds
    named = {"arithmetic": steps, "passes over memory": passes, "Python": whole - steps - passes}
    return "\n  a round of FedAvg: " + ", ".join(f"{name} {of / whole:.0%}" for name, of in named.items())


def _row(compared: Compared, label: str) -> tuple[str, ...]:
    one, fedavg = compared.found[label], compared.found[FEDAVG]
    if one.failed:
        return (f"{label}: {one.failed}", *[NOTHING] * 8)
    faster = compared.times_faster(label)
    of_fedavg = NOTHING if fedavg.failed else f"{one.seconds / fedavg.seconds:.2f}"
    return (
        label,
        f"{one.seconds:.4f}",
        NOTHING if faster is None else f"{faster:.1f}",
        of_fedavg,
        f"{compared.of_limit(label):.1%}",
        *_costs(one),
    )


def _costs(one: Measured) -> tuple[str, ...]:
    sent = (NOTHING if value is None else f"{value:,.0f}" for value in (one.up, one.down))
    return (f"{one.peak / MIB:,.0f}", f"{one.above_data / MIB:,.0f}", *sent)


def grown_table(grown: Grown) -> str:
    head = (grown.along, "first s", "s per round", "peak MiB", "above data", "B up", "B down")
    parts = [f"({grown.part}) growth with {grown.title}"]
    for method, curve in grown.curves.items():
        rows = [_grown_row(size, one) for size, one in curve]
        parts.append(f"  {grown.describe(method)}\n{table(head, rows)}")
    return "\n\n".join(parts)


def _grown_row(size: int, one: Measured) -> tuple[str, ...]:
    if one.failed:
        return (f"{size:,}: {one.failed}", *[NOTHING] * 6)
    return (f"{size:,}", f"{one.first_seconds:.3f}", f"{one.seconds:.4f}", *_costs(one))


def ranks_table(ranks: dict[int, float]) -> str:
    rows = [(str(n), f"{seconds:.4f}") for n, seconds in ranks.items()]
    return f"(e) perceptron on ranks of one thread each\n\n{table(('ranks', 's per round'), rows)}"


def targets_table(found: Sequence[Target]) -> str:
    words = {True: "met", False: "NOT met", None: NOTHING}
    rows = [(f"({one.part}) {one.what}", one.wanted, one.measured, words[one.met]) for one in found]
    return f"Targets\n\n{table(('', 'target', 'measured', ''), rows)}"


LEGEND = """x plain: times as fast as the plain PyTorch loop that does the same work
x FedAvg: seconds against ppfl's FedAvg
of limit: seconds that the necessary matrix products would take at the speed of a large matmul, over measured seconds
peak: resident memory of its process, with building the data; above data: memory that training needed besides the data
B up, B down: bytes per client and round, as reported; first s: the first round (a survey, where the start has one)"""
