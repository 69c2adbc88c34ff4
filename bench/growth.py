"""How cost grows: the exponent e of seconds ~ size^e."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cases import Case, Growth
from turns import Measured, measure_in_turns


class Grown(NamedTuple):
    part: str
    title: str
    along: str
    curves: dict[str, list[tuple[int, Measured]]]  # method -> size and what it gave, in the order of sizes

    def exponent(self, method: str) -> float | None:
        """None where too little was measured."""
        points = [(size, one.seconds) for size, one in self.curves[method] if not one.failed]
        return exponent(points) if len(points) > 1 else None

    def describe(self, method: str) -> str:
        """The method and its exponent."""
        found = self.exponent(method)
        return f"{method}: exponent {'unknown' if found is None else f'{found:.2f}'}"

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "title": self.title,
            "along": self.along,
            "exponents": {method: self.exponent(method) for method in self.curves},
            "curves": {method: [[size, one.as_json()] for size, one in curve] for method, curve in self.curves.items()},
        }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Least squares slope of log seconds over log size."""
    x, y = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread


def measure_growth(growth: Growth, turns: int, *, alone: bool = False) -> Grown:
    """All sizes and methods in turns, or each alone on the machine, the large ones with fewer turns."""
    cases = [case for along_sizes in growth.cases.values() for case in along_sizes]
    found = [_alone(case, turns) for case in cases] if alone else measure_in_turns(cases, turns)[0]
    rest = iter(found)
    curves = {method: [(size, next(rest)) for size in growth.sizes] for method in growth.cases}
    return Grown(growth.part, growth.title, growth.along, curves)


def _alone(case: Case, turns: int) -> Measured:
    ((one,), _) = measure_in_turns([case], min(turns, 2) if case.sizes["clients"] >= 10**6 else turns)
    return one
