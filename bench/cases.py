"""Which methods are measured on which workloads, and with which sizes their cost is expected to grow."""

from collections.abc import Sequence
from typing import Any, NamedTuple

PLAIN_FEDAVG, FEDAVG = "plain FedAvg loop", "FedAvg"
PLAIN_PROCESSES = "plain FedAvg loop, two processes"
CONVOLUTIONS = "the convolutions alone"
PASSES = "passes over memory alone: FedAvg"
WIDTHS, KS, POPULATIONS = (32, 64, 128, 256, 512), (1, 2, 4, 8, 16), (10_000, 100_000, 1_000_000)


class Case(NamedTuple):
    """A method on a workload, with all that a new process needs to run it."""

    label: str
    workload: str
    sizes: dict[str, int]
    method: str
    settings: dict[str, Any]
    against: str | None = None  # the plain loop that does the same work


class Comparison(NamedTuple):
    part: str
    title: str
    cases: Sequence[Case]


class Growth(NamedTuple):
    """Cases of some methods, over one size."""

    part: str
    title: str
    along: str
    sizes: Sequence[int]
    cases: dict[str, Sequence[Case]]  # by the label of the method, one case per size


def label(k: int, mix: str, theta: bool, steps: int) -> str:
    """The name of a kind of PPFL round in tables."""
    many = f"{steps} membership step{'s' * (steps != 1)}"
    blocks = "theta" if not steps else f"theta and {many}" if theta else many
    return f"PPFL {mix} K={k}, {blocks}"


def local_steps(of: str) -> str:
    """The name of the local steps of a kind of round in tables."""
    return f"local steps alone: {of}"


class On(NamedTuple):
    """A workload, from which cases are made."""

    workload: str
    sizes: dict[str, int]

    def plain_fedavg(self) -> Case:
        return Case(PLAIN_FEDAVG, *self, "plain_fedavg", {})

    def plain_processes(self) -> Case:
        return Case(PLAIN_PROCESSES, *self, "plain_processes", {})

    def convolutions_alone(self) -> Case:
        return Case(CONVOLUTIONS, *self, "convolutions_alone", {})

    def fedavg(self, against: str | None = PLAIN_FEDAVG) -> Case:
        return Case(FEDAVG, *self, "fedavg", {}, against)

    def fedavg_steps(self) -> Case:
        return Case(local_steps(FEDAVG), *self, "local_steps", {})

    def fedavg_passes(self) -> Case:
        return Case(PASSES, *self, "memory_passes", {})

    def ppfl_steps(self, k: int, mix: str, steps: int) -> Case:
        name = local_steps(label(k, mix, True, steps))
        return Case(name, *self, "local_steps", {"k": k, "mix": mix, "steps": steps})

    def plain_ppfl(self, k: int, mix: str, steps: int) -> Case:
        name = f"plain {label(k, mix, True, steps)}"
        return Case(name, *self, "plain_ppfl", {"k": k, "mix": mix, "steps": steps})

    def ppfl(self, k: int, mix: str, *, theta: bool = True, steps: int = 0, start: str = "uniform") -> Case:
        name = label(k, mix, theta, steps)
        settings = {"k": k, "mix": mix, "theta": theta, "steps": steps, "start": start}
        return Case(name, *self, "ppfl", settings, f"plain {name}")


def comparisons() -> list[Comparison]:
    perceptron, linear, images = On("perceptron", {}), On("linear", {}), On("convolutions", {})
    small = On("small_rounds", {})
    return [
        Comparison(
            "a",
            "perceptron 784-128-10, 100 clients of 560 samples",
            [
                perceptron.plain_fedavg(),
                perceptron.fedavg(),
                perceptron.ppfl(4, "weights"),
                perceptron.ppfl(16, "weights"),
                perceptron.ppfl(4, "outputs"),
                perceptron.ppfl(4, "weights", theta=False, steps=1),
                perceptron.ppfl(4, "outputs", theta=False, steps=1),
                perceptron.ppfl(4, "outputs", theta=False, steps=20),
                perceptron.plain_ppfl(4, "weights", steps=1),
                perceptron.ppfl(4, "weights", steps=1),
                perceptron.plain_ppfl(4, "outputs", steps=1),
                perceptron.ppfl(4, "outputs", steps=1),
            ],
        ),
        Comparison(
            "b",
            "linear model 150-2, 300 clients of 50 to 1000 samples",
            [
                linear.plain_fedavg(),
                linear.fedavg(),
                linear.plain_ppfl(3, "outputs", steps=1),
                linear.ppfl(3, "outputs", steps=1),
                linear.plain_ppfl(3, "outputs", steps=20),
                linear.ppfl(3, "outputs", steps=20),
            ],
        ),
        Comparison(
            "c",
            "two convolutions and two layers on 3 x 32 x 32, 20 clients of 250 samples",
            [images.convolutions_alone(), images.plain_fedavg(), images.fedavg(), images.ppfl(4, "weights")],
        ),
        Comparison(
            "f",
            "small rounds: perceptron 784-128-10, 10 of 1,000 clients of 56 samples",
            [
                small.plain_fedavg(),
                small.plain_processes(),
                small.fedavg_steps(),
                small.fedavg_passes(),
                small.fedavg(),
                small.ppfl(4, "weights"),
                small.ppfl_steps(4, "weights", steps=1),
                small.ppfl(4, "weights", steps=1),
                small.ppfl_steps(4, "outputs", steps=1),
                small.ppfl(4, "outputs", steps=1),
            ],
        ),
    ]


def growths() -> list[Growth]:
    few = {"clients": 25}
    on_perceptron = On("perceptron", few)
    clients = (75, 150, 300, 600, 1200)
    return [
        Growth(
            "a",
            "canonical models, perceptron, 25 clients",
            "K",
            KS,
            {f"PPFL {mix}": [on_perceptron.ppfl(k, mix) for k in KS] for mix in ("weights", "outputs")},
        ),
        Growth(
            "a",
            "hidden units, perceptron, 25 clients",
            "hidden units",
            WIDTHS,
            {FEDAVG: [On("perceptron", few | {"hidden": width}).fedavg(None) for width in WIDTHS]},
        ),
        Growth(
            "b",
            "clients, linear model",
            "clients",
            clients,
            {
                FEDAVG: [On("linear", {"clients": m}).fedavg(None) for m in clients],
                "PPFL outputs": [On("linear", {"clients": m}).ppfl(3, "outputs", steps=1) for m in clients],
            },
        ),
    ]


def many_clients(most: int) -> Growth:
    """(d): ten thousand logistic clients and more, each size alone on the machine. The first round is a survey."""
    sizes = [m for m in POPULATIONS if m <= most]

    def case(clients: int) -> Case:
        found = On("logistic", {"clients": clients}).ppfl(5, "predictions", steps=20, start="gradients")
        return found._replace(against=None)

    return Growth(
        "d", "clients, logistic model, 10 samples each", "clients", sizes, {"PPFL predictions": list(map(case, sizes))}
    )
