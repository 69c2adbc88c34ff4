"""Settings with values that nobody would write: as tables, as TOML texts and after --set."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hostile_files import Input, changed

IN_RANGE = [0, 1, 2, 50, 1e-12, 1e-9, 0.999999, 1e5, 1e9, 10**6, 10**9, 2**63 - 1]
NUMBERS = [
    0,
    1,
    2,
    3,
    5,
    -1,
    0.5,
    1e-300,
    1e300,
    math.inf,
    math.nan,
    10**6,
    10**9,
    10**12,
    2**31,
    2**63,
    2**64,
    10**400,
]
TEXTS = [
    "",
    "a",
    "digits",
    "auto",
    "all",
    "~nobody/x",
    "x" * 5000,
    "\0",
    "a\0b",
    "é",
    "\ud800",
    "cpu",
    "[1, 2",
    "{a=1}",
    "classifier",
]


def junk(random: Random, depth: int = 3) -> Any:
    """Any value, of which a TOML file or a Python program could contain one."""
    match random.randrange(9 if depth else 6):
        case 0 | 1 | 2:
            return random.choice(NUMBERS)
        case 3:
            return random.choice(TEXTS)
        case 4:
            return random.choice([True, False, None, b"x", (1, 2), {1: 2}, {None: {}}, object, [[]], {}])
        case 5:
            return random.choice(
                [[{"name": "digits"}], [1] * 3, ["a"] * 3, {"name": "ppfl"}, {"name": ["a"]}, {"name": {}}]
            )
        case 6 | 7:
            return {random.choice([*TEXTS, *KEYS]): junk(random, depth - 1) for _ in range(random.randrange(4))}
        case _:
            return [junk(random, depth - 1) for _ in range(random.randrange(4))]


def tables() -> dict[str, list[dict[str, Any]]]:
    """Every table that an experiment may contain, with all of its keys, at small sizes."""
    from ppfl.algorithms import METHODS

    return {
        "data": [
            {
                "name": "synthetic",
                "n_clients": 4,
                "dim": 3,
                "sources": 2,
                "alpha": 0.4,
                "noise": 0.1,
                "test_points": 2,
                "seed": 0,
                "min_size": 2,
                "max_size": 5,
            },
            {
                "name": "synthetic_groups",
                "n_clients": 4,
                "groups": 2,
                "dim": 3,
                "samples": 5,
                "test_points": 2,
                "noise": 0.1,
                "task": "regression",
                "seed": 0,
            },
            {
                "name": "synthetic_linear",
                "n_clients": 4,
                "dim": 3,
                "k": 2,
                "alpha": 0.5,
                "samples": 5,
                "test_points": 2,
                "noise": 0.1,
                "seed": 0,
            },
            {
                "name": "digits",
                "partition": {"name": "iid", "clients": 4},
                "test_fraction": 0.2,
                "validation_fraction": 0.0,
                "seed": 0,
            },
            {"name": "digits", "partition": {"name": "dirichlet_labels", "clients": 4, "alpha": 0.5, "min_samples": 2}},
            {
                "name": "digits",
                "partition": {
                    "name": "dirichlet_sources",
                    "clients": 4,
                    "alpha": 0.5,
                    "groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
                },
            },
            {
                "name": "digits",
                "partition": {"name": "label_groups", "clients": 2, "groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]},
            },
            {"name": "readers.digit_domains:read", "domains": ["drawn"], "samples": 8, "folder": "x"},
            {
                "name": "csv",
                "file": "nowhere.csv",
                "client": "a",
                "target": "b",
                "columns": ["x"],
                "drop": [],
                "task": "auto",
            },
            {"name": "npz", "file": "nowhere.npz", "tokens": False, "image": False},
            {"name": "mnist", "folder": "nowhere", "samples": 5},
        ],
        "model": [
            {"name": "linear", "bias": True},
            {"name": "perceptron", "hidden": [4]},
            {"name": "cnn", "channels": [4], "hidden": [4], "groups": 2},
        ],
        "population": [{"k": 2, "mix": "outputs", "canonical": "all", "loss": "squared"}, {"k": 1}],
        "method": [{"name": name, **_plain(method())} for name, method in METHODS.items()],
        "affinity": [{"name": name} for name in ("auto", "labels", "features", "uniform", "none")]
        + [{"name": "nearest", "neighbours": 1}],
        "watch": [{"every": 1, "objective": False, "stationarity": False, "output": "last", "smoothness": [0.0, 0.0]}],
    }


def _plain(method: Any) -> dict[str, Any]:
    return {key: value for key, value in method.model_dump(mode="json").items() if value is not None}


KEYS = [
    "name",
    "rounds",
    "seeds",
    "data",
    "model",
    "k",
    "lr",
    "file",
    "partition",
    "hidden",
    "n_clients",
    "engine",
    "chunk",
]


def experiment(random: Random) -> dict[str, Any]:
    """The settings of an experiment, with some values replaced by others."""
    chosen: dict[str, Any] = {
        "name": "fuzz",
        "rounds": 2,
        "seeds": [0],
        "engine": "stacked",
        "device": "cpu",
        "newcomers": 0.0,
        "dropout": 0.0,
    }
    chosen |= {key: json.loads(json.dumps(random.choice(choices))) for key, choices in tables().items()}
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        spot: Any = chosen
        while True:
            key = random.choice(list(spot)) if isinstance(spot, dict) else random.randrange(len(spot))
            if isinstance(spot[key], dict | list) and spot[key] and random.random() < 0.85:
                spot = spot[key]
                continue
            spot[key] = extreme(spot[key], random)
            break
        if isinstance(spot, dict) and random.random() < 0.1:
            spot[random.choice([*KEYS, *TEXTS])] = junk(random)
    return chosen


def extreme(value: Any, random: Random) -> Any:
    return (
        random.choice(random.choice([NUMBERS, IN_RANGE]))
        if isinstance(value, int | float) and random.random() < 0.7
        else junk(random)
    )


def settings(random: Random, folder: Path) -> Input:
    """A table, a TOML text or a text after --set."""
    name, make = random.choice(
        [("tables", table_input), ("tables", table_input), ("TOML texts", toml_input), ("--set", set_input)]
    )
    use, content = make(random, folder)
    return name, use, content


def table_input(random: Random, folder: Path) -> tuple[Callable[[], object], bytes]:
    table = experiment(random) if random.random() < 0.9 else junk(random)
    return lambda: check_and_build(table), repr(table).encode(errors="backslashreplace")


def check_and_build(table: Any) -> object:
    """An experiment, its data, its population and one round of it."""
    from pydantic import ValidationError

    from ppfl.data import SampleSpec
    from ppfl.errors import SettingError
    from ppfl.runs import Experiment
    from ppfl.runs.load import explain
    from ppfl.runs.tuning import attempt, without_test

    try:
        checked = Experiment.model_validate(table)
    except ValidationError as error:
        raise SettingError(explain(error, table)) from None
    if Experiment.model_validate(json.loads(json.dumps(checked.model_dump(mode="json")))) != checked:
        raise AssertionError("json brings another experiment back")
    federation = checked.build_data(Path("nowhere"))
    if checked.data.name == "readers.digit_domains:read" and len(federation.train) > 100:
        return federation
    checked.build_affinity(federation)
    checked.build_population(SampleSpec.of(federation), checked.seeds[0])
    counts = [value for value in checked.method.model_dump().values() if isinstance(value, int)]
    if federation.train.x.numel() < 5000 and max(counts, default=0) < 200:
        return attempt(checked, without_test(federation), {}, rounds=1)
    return federation


PIECES = [
    "rounds = 2\n", "[data]\n", 'name = "digits"\n', "[model]\n", "a.b.c = 1\n", "[[data]]\n", "x = [1, 2]\n",
    "d = 2020-01-01\n", "t = 12:00:00\n", "rounds = " + "9" * 5000 + "\n", "lr = 1e999\n", "x = " + "[" * 20000 + "\n",
    "x = " + "{a=" * 3000 + "\n", "a" + ".a" * 20000 + " = 1\n", "[" + "a." * 3000 + "a]\n", "x = nan\n", "x = -inf\n",
    "seeds = [0, 0]\n", '"" = 1\n', "x = 0x" + "f" * 300 + "\n", "\r\n", "\0", "'''", "k = [[[[[[]]]]]]\n",
]  # fmt: skip


def toml_input(random: Random, folder: Path) -> tuple[Callable[[], object], bytes]:
    from ppfl.runs import load_experiment
    from ppfl.runs.comparison import load_comparison

    content = "".join(random.choices(PIECES, k=random.randrange(8))).encode()
    if random.random() < 0.6:
        import tomli_w

        with contextlib.suppress(Exception):
            content = tomli_w.dumps(experiment(random)).encode()
    for _ in range(random.choice([0, 1, 1, 3])):
        content = changed(content, random)
    path = folder / "input.toml"
    path.write_bytes(content)
    return lambda: (load_experiment if random.random() < 0.7 else load_comparison)(path), content


def set_input(random: Random, folder: Path) -> tuple[Callable[[], object], bytes]:
    from ppfl.runs.experiment import Experiment  # noqa: F401 (imported before the clock starts)
    from ppfl.runs.load import set_by_text

    key = ".".join(random.choices([*KEYS, *TEXTS[:6], "method", "population"], k=random.choice([1, 1, 2, 3, 5000])))
    value = random.choice(
        [
            *map(str, NUMBERS[:-1]),
            *TEXTS,
            "1" * 5000,
            "[" * 20000,
            "{a=" * 5000,
            "[1,2]",
            '"a"',
            "{name='npz'}",
            "1\nx=2",
        ]
    )
    text = (
        f"{key}={value}"
        if random.random() < 0.95
        else changed(f"{key}={value}".encode(errors="replace"), random).decode(errors="replace")
    )

    def use() -> object:
        table = experiment(random)
        set_by_text(table, text)
        return check_and_build(table)

    return use, text.encode(errors="backslashreplace")
