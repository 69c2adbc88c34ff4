"""Numbers from one end of the floats to the other: features, targets, weights, step sizes, and one bad client.

Survives: exit code 0 or 2, no traceback; with code 0 every number in the files is finite, and the clients with good
data are not much worse than without the bad one.
"""

import contextlib
import io
import json
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import tomli_w
from safetensors.numpy import load_file
from trial import Trial

from ppfl.cli import main

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedprox": {}, "scaffold": {}, "local": {}, "ditto": {}, "pfedme": {}, "finetune": {},
    "ppfl": {"k": 2, "mix": "weights"}, "ppfl, outputs": {"k": 2, "mix": "outputs"},
    "fedem": {"k": 2, "mix": "predictions"}, "ifca": {"k": 2},
}  # fmt: skip
SCALES = (1e-320, 5e-324, 1e-300, 1e-45, 1e-38, 1e-30, 1e-9, 0.0, 1e6, 1e19, 1e30, 3e38, 1e39, 1e150, 1e300, 1.7e308)
STEPS = (1e-300, 1e-45, 1e-12, 0.1, 1e3, 1e12, 1e30, 1e38, 1e300)
RATES = (1e-6, 1e-3, 1.0, 1e3, 1e9)
CLIENTS, SAMPLES, COLUMNS, ROUNDS = 8, 24, 3, 3
CLOSE = 0.15  # of accuracy, between good clients with and without a bad one; a sample of 40 is this uncertain
Data = dict[str, np.ndarray[Any, Any]]


class Called(NamedTuple):
    code: int | None  # None: a traceback
    error: str


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    """Trials of all kinds in turn."""
    kinds: tuple[Callable[[Random, Path], Trial], ...] = (
        _scaled_features, _one_bad_client, _odd_clients, _steps, _glm, _scaled_targets, _weights,
    )  # fmt: skip
    for number in range(count):
        place = folder / str(number)
        place.mkdir(parents=True)
        yield kinds[number % len(kinds)](Random(random.getrandbits(64)), place)


def make_data(random: Random, *, task: str = "labels", samples: int = SAMPLES) -> Data:
    """Clients that learn from each other, in two groups."""
    rng = np.random.default_rng(random.getrandbits(32))
    x = rng.normal(size=(CLIENTS, samples, COLUMNS))
    signal = np.einsum("csf,cf->cs", x, np.array([[2, 1, 0], [-1, 2, 0]])[np.arange(CLIENTS) % 2])
    y = signal + 0.1 * rng.normal(size=signal.shape) if task == "regression" else (signal > 0).astype(int)
    names = np.repeat(np.array([f"c{i}" for i in range(CLIENTS)]), samples)
    return {"x": x.reshape(-1, COLUMNS), "y": y.reshape(-1), "client": names}


def _scaled_features(random: Random, folder: Path) -> Trial:
    data, scale = make_data(random), random.choice(SCALES)
    columns = random.choice([slice(None), slice(0, 1)])
    with np.errstate(all="ignore"):
        data["x"][:, columns] *= scale
    return _run("features scaled", random, folder, data, f"features times {scale}")


def _scaled_targets(random: Random, folder: Path) -> Trial:
    data, scale = make_data(random, task="regression"), random.choice(SCALES)
    with np.errstate(all="ignore"):
        data["y"] *= scale
    return _run("targets scaled", random, folder, data, f"targets times {scale}")


def _odd_clients(random: Random, folder: Path) -> Trial:
    data = make_data(random)
    kind = random.choice(["constant", "zero", "denormal", "one sample", "one class", "copies"])
    rows = data["client"] == "c1"
    if kind == "one sample":
        kept = ~rows | (np.cumsum(rows) == 1)
        data = {name: array[kept] for name, array in data.items()}
    elif kind == "one class":
        data["y"][rows] = 1
    elif kind == "copies":
        data["x"][:] = data["x"][0]
    else:
        data["x"][rows if random.random() < 0.5 else slice(None)] = {"constant": 3.0, "zero": 0.0, "denormal": 1e-42}[
            kind
        ]
    return _run("odd clients", random, folder, data, kind)


def _steps(random: Random, folder: Path) -> Trial:
    step = random.choice(STEPS)
    return _run("step sizes", random, folder, make_data(random), f"lr {step}", settings={"lr": step})


def _weights(random: Random, folder: Path) -> Trial:
    """Clients of very unequal size, which is what their weight is, and penalties of all sizes."""
    data, rate = make_data(random), random.choice(RATES)
    kept = (data["client"] != "c1") | (np.cumsum(data["client"] == "c1") <= 2)
    data = {name: np.concatenate([array[kept], *[array[data["client"] == "c0"]] * 20]) for name, array in data.items()}
    settings = {"membership_lr": rate} if random.random() < 0.5 else {"penalty": rate}
    return _run("weights", random, folder, data, str(settings), method="ppfl", settings=settings)


def _one_bad_client(random: Random, folder: Path) -> Trial:
    """Good clients must not be much worse off than without it."""
    data = make_data(random, samples=50)
    method, scale = random.choice(list(METHODS)), random.choice([1e3, 1e4, 1e6, 1e12, 1e19, 1e30, 3e37])
    bad = data["client"] == "c3"
    without = {name: array[~bad] for name, array in data.items()}
    data["x"][bad] *= scale
    told = f"{method}, features of client c3 times {scale}"
    scores = []
    for name, of_run in (("with", data), ("without", without)):
        trial = _run("one bad client", random, folder / name, of_run, told, method=method, rounds=10)
        if trial.failure:
            return trial
        rows = _metrics(folder / name)
        if not rows:
            return Trial("one bad client", f"{told}: ended in an error instead of a result")
        ids = json.loads((folder / name / "out" / "seed-0" / "clients.json").read_text(encoding="utf-8"))["ids"]
        good = [score for client, score in zip(ids, rows[-1]["per_client"], strict=True) if client != "c3"]
        scores.append(sum(good) / len(good))
    lost = scores[1] - scores[0]
    failure = f"{told}: accuracy of the others {scores[0]:.3f}, {scores[1]:.3f} without it" if lost > CLOSE else None
    return Trial("one bad client", failure, {"accuracy lost by others": max(0.0, lost)})


def _glm(random: Random, folder: Path) -> Trial:
    data, scale = make_data(random, task="regression"), random.choice(SCALES)
    family = random.choice(["gaussian", "poisson", "gamma", "bernoulli"])
    with np.errstate(all="ignore"):
        columns = {f"x{at}": data["x"][:, at] * (scale if at == 0 else 1) for at in range(COLUMNS)}
        positive = np.abs(data["y"]) + 1e-3
        y = {
            "gaussian": data["y"] * scale,
            "gamma": positive * scale,
            "poisson": np.round(positive * min(scale, 1e300)),
        }
    columns |= {"y": y.get(family, (data["y"] > 0).astype(int)), "who": data["client"]}
    pd.DataFrame(columns).to_csv(folder / "table.csv", index=False)
    chosen = ("--client", "who", "--target", "y", "--family", family, "-k", "2", "--n-init", "1")
    mix = random.choice(["weights", "predictions"])
    called = _call(folder, "glm", "table.csv", *chosen, "--mix", mix, "--out", "out")
    told = f"glm {family}, {mix}, times {scale}, data in {folder}"
    return Trial("glm", _failure(called, folder / "out", told))


def _run(
    attack: str, random: Random, folder: Path, data: Data, told: str,
    method: str = "", rounds: int = ROUNDS, settings: Mapping[str, float] = MappingProxyType({}),
) -> Trial:  # fmt: skip
    folder.mkdir(exist_ok=True)
    method = method or random.choice(list(METHODS))
    with np.errstate(all="ignore"):
        kind = random.choice(["float32", "float64"])
        np.savez(folder / "data.npz", **{**data, "x": data["x"].astype(kind)})
    asked = {
        "rounds": rounds, "data": {"name": "npz", "file": "data.npz"}, "model": {"name": "linear"},
        "method": {"name": method.split(",")[0], **{"lr": 0.1, **settings}}, "population": METHODS[method],
    }  # fmt: skip
    (folder / "run.toml").write_text(tomli_w.dumps(asked), encoding="utf-8")
    called = _call(folder, "run", "run.toml", "--out", "out", "--quiet")
    return Trial(attack, _failure(called, folder / "out", f"{told}, {method}, {kind}, data in {folder}"))


def _call(folder: Path, *arguments: str) -> Called:
    here, out, err = Path.cwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as stop:
        return Called(int(stop.code or 0), err.getvalue())
    except Exception:
        return Called(None, traceback.format_exc(limit=-4))
    finally:
        os.chdir(here)
    return Called(0, err.getvalue())


def _failure(called: Called, out: Path, told: str) -> str | None:
    if called.code is None:
        return f"{told}: {called.error}"
    if called.code not in (0, 2):
        return f"{told}: code {called.code}, {called.error}"
    if called.code == 2 and not called.error.startswith(("error: ", "warning: ", "fitting ", "Usage:")):
        return f"{told}: no message of ours but {called.error!r}"
    files = sorted(out.rglob("*")) if called.code == 0 else []
    bad = [file.name for file in files if file.is_file() and not _is_finite(file)]
    return f"{told}: numbers that are not finite in {bad}" if bad else None


def _is_finite(file: Path) -> bool:
    if file.suffix == ".safetensors":
        return all(np.isfinite(array).all() for array in load_file(file).values() if array.dtype.kind == "f")
    if file.suffix == ".csv":
        return bool(np.isfinite(pd.read_csv(file).select_dtypes("number").to_numpy(dtype=float)).all())
    if file.suffix == ".log":  # memberships, which are checked when they are read
        return True
    text = _without_programs(file.read_text(encoding="utf-8"))
    try:
        if file.suffix in (".json", ".jsonl"):
            for line in text.splitlines() if file.suffix == ".jsonl" else [text]:
                json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except ValueError:
        return False
    return not (file.suffix in (".html", ".svg") and (">nan<" in text or ">inf<" in text or "NaN" in text))


def _without_programs(text: str) -> str:
    """A page without the program that draws its charts, which knows numbers that are not finite; its data stay."""
    return re.sub(r"<script type=.module.>.*?</script>", "", text, flags=re.DOTALL)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not finite")


def _metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "out" / "seed-0" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
