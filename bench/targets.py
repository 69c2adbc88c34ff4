"""The speed that the package promises, and whether this run reached it."""

from collections.abc import Iterator
from typing import NamedTuple

from cases import FEDAVG, KS, PLAIN_FEDAVG, PLAIN_PROCESSES, label, local_steps
from results import Compared, Results

GIB = 2**30


class Target(NamedTuple):
    part: str
    what: str
    wanted: str
    measured: str
    met: bool | None  # None: not measured


def targets(results: Results) -> list[Target]:
    return [
        *_perceptron(results),
        *_linear(results),
        *_images(results),
        *_millions(results),
        *_ranks(results),
        *_small(results),
    ]


def at_least(part: str, what: str, bound: float, measured: float | None, form: str = "{:.2f} x") -> Target:
    said = "not measured" if measured is None else form.format(measured)
    return Target(part, what, f">= {form.format(bound)}", said, None if measured is None else measured >= bound)


def at_most(part: str, what: str, bound: float, measured: float | None, form: str = "{:.2f} x") -> Target:
    said = "not measured" if measured is None else form.format(measured)
    return Target(part, what, f"<= {form.format(bound)}", said, None if measured is None else measured <= bound)


def _perceptron(results: Results) -> Iterator[Target]:
    a = results.compared.get("a")
    if a is None:
        return
    w4, w16 = label(4, "weights", True, 0), label(16, "weights", True, 0)
    theta, one = label(4, "outputs", True, 0), label(4, "outputs", False, 1)
    yield at_least("a", "FedAvg against the plain loop", 2, a.times_faster(FEDAVG))
    yield at_least("a", "FedAvg, of the matmul limit", 0.4, _of_limit(a, FEDAVG), "{:.0%}")
    yield at_most("a", f"{w4}, against FedAvg", 1.25, _ratio(a, w4, FEDAVG))
    yield at_most("a", f"{w16}, against FedAvg", 1.4, _ratio(a, w16, FEDAVG))
    yield at_most("a", f"{theta}, against FedAvg", 1.1 * 4, _ratio(a, theta, FEDAVG))
    yield at_most("a", f"{one}, against its theta", 0.45, _ratio(a, one, theta))
    yield at_most("a", "20 membership steps against 1", 1.3, _ratio(a, label(4, "outputs", False, 20), one))
    yield _upload(results)


def _upload(results: Results) -> Target:
    """Mixed weights send one model and K floats, whatever K is."""
    curve = next((grown.curves.get("PPFL weights") for grown in results.grown if grown.along == "K"), None)
    extra = {k: one.up - one.prepared["model_bytes"] for k, one in curve or [] if not one.failed and one.up}
    met = all(beyond == 4 * k for k, beyond in extra.items()) if len(extra) == len(KS) else None
    wanted, measured = _ends({k: 4 * k for k in KS}), _ends(extra)
    return Target("a", "upload of mixed weights beyond one model", wanted, measured, met)


def _ends(extra: dict[int, float]) -> str:
    """The bytes at the smallest and the largest K."""
    return " to ".join(f"{extra[k]:g} B (K={k})" for k in sorted(extra)[:: max(1, len(extra) - 1)]) or "not measured"


def _linear(results: Results) -> Iterator[Target]:
    b = results.compared.get("b")
    if b is not None:
        ppfl = label(3, "outputs", True, 1)
        yield at_least("b", "FedAvg against the plain loop", 10, b.times_faster(FEDAVG), "{:.1f} x")
        yield at_least("b", f"{ppfl}, against its plain loop", 15, b.times_faster(ppfl), "{:.1f} x")


def _images(results: Results) -> Iterator[Target]:
    c = results.compared.get("c")
    if c is not None:
        yield at_least("c", "FedAvg against the plain loop", 1, c.times_faster(FEDAVG))


def _millions(results: Results) -> Iterator[Target]:
    grown = next((grown for grown in results.grown if grown.part == "d"), None)
    if grown is None:
        return
    ((method, curve),) = grown.curves.items()
    peaks = {size: one.peak / GIB for size, one in curve if not one.failed}
    yield at_most("d", "exponent in the number of clients", 1.1, grown.exponent(method), "{:.2f}")
    yield at_most("d", "peak memory with 10^6 clients", 6, peaks.get(10**6), "{:.1f} GiB")


def _ranks(results: Results) -> Iterator[Target]:
    if results.ranks:
        yield at_least("e", "two ranks against one", 1.6, results.ranks[1] / results.ranks[2])


def _small(results: Results) -> Iterator[Target]:
    f = results.compared.get("f")
    if f is not None:
        ppfl = label(4, "weights", True, 1)
        yield at_least("f", "FedAvg against the plain loop on two processes", 2, _ratio(f, PLAIN_PROCESSES, FEDAVG))
        for method, bound in ((FEDAVG, 0.25), (ppfl, 0.45)):
            what = f"{method}, a round besides its local steps, of the plain FedAvg loop"
            yield at_most("f", what, bound, _besides_steps(f, method), "{:.0%}")


def _besides_steps(compared: Compared, method: str) -> float | None:
    """Seconds of a round less those of its local steps alone, over the seconds of a round of the plain FedAvg loop."""
    steps, whole = _ratio(compared, local_steps(method), PLAIN_FEDAVG), _ratio(compared, method, PLAIN_FEDAVG)
    return None if steps is None or whole is None else whole - steps


def _ratio(compared: Compared, label: str, other: str) -> float | None:
    one, two = compared.found[label], compared.found[other]
    return None if one.failed or two.failed else one.seconds / two.seconds


def _of_limit(compared: Compared, label: str) -> float | None:
    return None if compared.found[label].failed else compared.of_limit(label)
