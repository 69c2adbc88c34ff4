"""Hostile data files and settings: each ends in a valid object or in an error of ours, in bounded time and memory.

Inputs are valid files that were changed (bits, cuts, splices, header fields) and values that were made up. They are
tried in batches, each in a process of its own with little memory, so that even a crash is only a failed trial.

    python trust/fuzz.py files|settings SEED FIRST COUNT FOLDER   # what a batch runs
    python trust/fuzz.py guided SECONDS FOLDER                    # coverage-guided, if atheris is installed
"""

import bz2
import contextlib
import faulthandler
import gzip
import io
import json
import lzma
import math
import resource
import signal
import struct
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from trial import Trial

BATCH = 1000  # inputs per process
SECONDS = 10  # for one input
MEMORY = 3 << 30  # bytes of address space beyond what the imports take
SMALL = "bytes=3e8,classes=1e4,features=1e5,clients=1e4"  # limits, so that MEMORY is never needed


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    """Half of the trials are files, half are settings."""
    for kind, share in (("files", count - count // 2), ("settings", count // 2)):
        seed = random.randrange(2**32)
        for first in range(0, share, BATCH):
            yield from _batch(kind, seed, first, min(BATCH, share - first), folder)


def _batch(kind: str, seed: int, first: int, count: int, folder: Path) -> Iterator[Trial]:
    """Run inputs in a process; if it dies at one, that one has failed, and another process continues behind it."""
    end = first + count
    while first < end:
        command = [sys.executable, __file__, kind, str(seed), str(first), str(end - first), str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 + count * SECONDS, check=False)
            output, end_of_it = done.stdout, f"exit code {done.returncode}, {done.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            output, end_of_it = (error.stdout or b"").decode(), "no end"
        reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        for report in reports:
            yield Trial(report["attack"], report["failure"], {"peak MB": report["peak"], "seconds": report["seconds"]})
        first += len(reports)
        if first < end:
            yield Trial(f"{kind}: crash", f"fuzz.py {kind} {seed} {first} 1 {folder}: {end_of_it}")
            first += 1


def _run(kind: str, seed: int, first: int, count: int, folder: Path) -> None:
    """Try the inputs one by one, and print a line about each."""
    import os

    from ppfl.server.loop import RefusedUpdateWarning

    os.environ["PPFL_LIMITS"] = SMALL
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", RefusedUpdateWarning)  # of clients that diverge
    faulthandler.enable()
    make = {"files": files, "settings": settings}[kind]
    load_all()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    signal.signal(signal.SIGALRM, _too_slow)
    for number in range(first, first + count):
        name, use, content = make(Random(f"{kind} {seed} {number}"), folder)
        start = time.perf_counter()
        failure = survives(use)
        if failure is not None:
            saved = folder / f"failed-{kind}-{seed}-{number}"
            saved.write_bytes(content)
            failure = f"fuzz.py {kind} {seed} {number} 1 {folder} (saved as {saved.name}): {failure}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {"attack": f"{kind}: {name}", "failure": failure, "peak": peak, "seconds": time.perf_counter() - start}
        print(json.dumps(line), flush=True)


def survives(use: Callable[[], object]) -> str | None:
    """None if `use` ends in a value or in an error of ours, else what happened."""
    from ppfl.core.errors import PPFLError

    signal.alarm(SECONDS)
    try:
        use()
    except PPFLError as error:
        return None if "\n" not in str(error) else f"a message of several lines: {error}"
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        signal.alarm(0)
    return None


@contextlib.contextmanager
def alarms() -> Iterator[None]:
    """Inputs that take too long are failures."""
    before = signal.signal(signal.SIGALRM, _too_slow)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class TooSlowError(BaseException):
    """Not an Exception, so that nobody takes it for a damaged file."""


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"no answer after {SECONDS} seconds")


def load_all() -> None:
    """Import what readers import late, before memory is limited."""
    import pandas  # noqa: F401
    import sklearn.datasets  # noqa: F401

    import ppfl.glm.table
    import ppfl.runs  # noqa: F401


Input = tuple[str, Callable[[], object], bytes]  # its name, how to use it, and its content to be saved if that fails


# ---- files


def files(random: Random, folder: Path) -> Input:
    """One file of some kind, valid in the beginning, and changed up to a few times."""
    name, suffix, make = random.choice(FORMATS)
    content = make(random)
    for _ in range(random.choice([0, 0, 1, 1, 1, 2, 4])):
        content = changed(content, random)
    path = folder / f"input{suffix}"
    path.write_bytes(content)
    return name, lambda: read(path, Random(repr(random.getstate()[1][:3]))), content


def read(path: Path, random: Random) -> object:
    """Read a file as its name says, up to the federation or the prepared table."""
    from ppfl.data import read_csv, read_idx, read_npz, read_parquet
    from ppfl.data.cifar import read_cifar10_batch
    from ppfl.data.table_readers import read_frame
    from ppfl.glm.table.prepare import TableSettings, prepare_table

    if ".npz" in path.suffixes:
        pool = read_npz(path, tokens=random.random() < 0.2)
        return pool.federation(seed=random.randrange(9))
    if ".idx" in path.suffixes:
        return read_idx(path)
    if ".batch" in path.suffixes:
        return read_cifar10_batch(path)
    if random.random() < 0.3:
        return prepare_table(read_frame(path, "who"), TableSettings("who", "y", ks=(1,))).encoding.terms
    reader = read_parquet if ".parquet" in path.suffixes else read_csv
    return reader(path, "who", "y", task=random.choice(["auto", "auto", "classification", "regression"]))


def changed(content: bytes, random: Random) -> bytes:
    """The same content with some bytes flipped, cut, repeated, or replaced by an extreme number."""
    if not content:
        return random.randbytes(8)
    data, at = bytearray(content), random.randrange(len(content))
    if random.random() < 0.4:  # headers are at the ends
        at = (
            min(len(data) - 1, random.randrange(64))
            if random.random() < 0.5
            else max(0, len(data) - 1 - random.randrange(96))
        )
    match random.randrange(7):
        case 0:
            data[at] ^= 1 << random.randrange(8)
        case 1:
            del data[at:]
        case 2:
            del data[at : at + random.randrange(1, 40)]
        case 3:
            data[at:at] = data[random.randrange(len(data)) :][: random.randrange(1, 200)]
        case 4:
            size = random.choice([1, 2, 4, 8])
            number = random.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, random.randrange(2**64)])
            data[at : at + size] = (number % 256**size).to_bytes(size, random.choice(["big", "little"]))
        case 5:
            data[at : at + 1] = random.choice([b"\0", b"\xff", b"\n", b",", b'"', b"\xed\xa0\x80", b"9" * 400, b"\x1a"])
        case 6:
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                at = random.choice(digits)
                data[at : at + 1] = random.choice([b"9999999999", b"-1", b"0", b"1e400", b"nan", b"None", b"1" * 5000])
    return bytes(data)


TYPES = [
    "f4",
    "f8",
    ">f8",
    ">f4",
    "f2",
    "g",
    "i8",
    ">i4",
    "u1",
    "u8",
    "i2",
    "?",
    "c8",
    "c16",
    "S3",
    "U3",
    ">U3",
    "M8[s]",
    "m8",
    "V4",
    "O",
]


def array(random: Random, shape: tuple[int, ...]) -> Any:
    """An array of any type, often with extreme values."""
    kind = random.choice(TYPES)
    values = np.random.default_rng(random.randrange(2**32)).integers(0, 3, shape)
    with np.errstate(all="ignore"):
        found = values.astype(np.dtype(kind) if kind != "V4" else np.int32)
    if kind == "V4":
        return found.view("V4") if found.ndim and found.size else found
    if found.size and random.random() < 0.3:
        extremes = [math.inf, math.nan, 1e300, -1, 2**31, 2**63 - 1, 2**40, "\ud800", b"\xff\xfe", "a\0", 1e-320, None]
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[(0,) * found.ndim] = random.choice(extremes)
    return found


def npz_bytes(random: Random) -> bytes:
    n = random.choice([0, 1, 2, *[12] * 8, 40])
    shape = random.choice([*[(n, 3)] * 12, (n,), (n, 0), (n, 2, 2), (n, 4, 4, 3), (), (n + 1, 2), (n, *[1] * 30)])
    parts: dict[str, Any] = {"x": array(random, shape) if random.random() < 0.3 else np.ones(shape, "f4")}
    parts["y"] = array(random, (n,)) if random.random() < 0.3 else np.arange(n) % 2
    parts["client"] = array(random, (n,)) if random.random() < 0.3 else np.arange(n) % 3
    if random.random() < 0.3:
        parts["is_test"] = array(random, (n,))
    if random.random() < 0.2:
        parts |= {f"{key}_{part}": parts[key] for key in ("x", "y") for part in ("train", "test")}
    file = io.BytesIO()
    (np.savez_compressed if random.random() < 0.5 else np.savez)(file, **parts)
    return bomb(random) if random.random() < 0.03 else lying(file.getvalue(), random)


def bomb(random: Random) -> bytes:
    """A small archive of zeros that are many."""
    file = io.BytesIO()
    rows = random.choice([10**8, 2**31])
    with zipfile.ZipFile(
        file, "w", random.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    ) as archive:
        for name in ("x", "y", "client"):
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (rows, 1)})
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(random.choice([0, 10**6, 3 * 10**7])))
    return file.getvalue()


def lying(content: bytes, random: Random) -> bytes:
    """Sometimes an npy header with another shape or type, in an archive that is otherwise right."""
    if random.random() < 0.7:
        return content
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, changed(old.read(name), random) if random.random() < 0.5 else old.read(name))
    return file.getvalue()


def idx_bytes(random: Random) -> bytes:
    axes = random.choice([0, 1, 2, 3, 3, 3, 9, 100, 255])
    lengths = [random.choice([0, 1, 2, 3]) if axes < 5 else 1 for _ in range(axes)]
    kind = random.choice([8, 8, 9, 11, 12, 13, 14, 0, 255])
    size = {8: 1, 9: 1, 11: 2, 12: 4, 13: 4, 14: 8}.get(kind, 1) * math.prod(lengths)
    return struct.pack(f">BBBB{axes}I", 0, 0, kind, axes, *lengths) + random.randbytes(size)


CELLS = [
    "0",
    "1",
    "2.5",
    "-1",
    "",
    "nan",
    "inf",
    "1e400",
    "9" * 5000,
    "a",
    "b ",
    '"a,b"',
    "True",
    "\ud7ff",
    "7.0",
    "1800000000",
    "1+2j",
    "0x10",
]


def csv_bytes(random: Random) -> bytes:
    names = random.choice([["who", "y", "x", "z"]] * 6 + [["who", "y"], ["who", "y", "x", "x"], ["a"], []])
    odd = random.choice([0, 0, 0, 0.05, 0.5])
    rows = [
        [random.choice(CELLS) if random.random() < odd else str((i + 2 * at) % (2 + at)) for at in range(len(names))]
        for i in range(random.choice([0, 1, *[20] * 6, 200]))
    ]
    return "\n".join(",".join(row) for row in [names, *rows]).encode()


def zip_bytes(random: Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", random.choice([0, 8, 8, 12, 14])) as archive:
        for i in range(random.choice([1, 1, 1, 0, 2])):
            archive.writestr(f"{i}.csv", csv_bytes(random))
    return file.getvalue()


def zst_bytes(random: Random) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(csv_bytes(random), "zstd", asbytes=True))


def long_zeros(random: Random) -> bytes:
    """Text that becomes many times longer when it is decompressed."""
    return (b"who,y,x\n" if random.random() < 0.5 else b"") + random.choice([b"1,0,1\n", b",", b"1", b"\n"]) * 10**6


def parquet_bytes(random: Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = random.choice([0, 1, *[20] * 6, 200])
    columns = {name: column(random, n) for name in random.choice([["who", "y", "x", "z"]] * 5 + [["who", "y"], ["x"]])}
    names = list(columns) if random.random() < 0.9 else ["x"] * len(columns)
    file = io.BytesIO()
    pq.write_table(
        pa.table(list(columns.values()), names=names),
        file,
        compression=random.choice(["snappy", "none", "gzip", "zstd"]),
    )
    return file.getvalue()


def column(random: Random, n: int) -> Any:
    import pyarrow as pa

    whole = [i % 3 for i in range(n)]
    match random.randrange(24):
        case 0:
            return pa.array([f"c{i}" for i in whole])
        case 1:
            return pa.array([b"\xff%d" % i for i in whole], pa.binary())
        case 2:
            return pa.array([[i] for i in whole])
        case 3:
            return pa.array([None if i == 0 else i for i in whole])
        case 4:
            return pa.array(["a\0" if i else "a" for i in whole]).dictionary_encode()
        case 5:
            return pa.array(whole).cast(pa.decimal128(30, 2)) if n else pa.array([], pa.date32())
        case _:
            return pa.array(
                whole, random.choice([pa.int8(), *[pa.int64(), pa.float32(), pa.float64()] * 3, pa.timestamp("s")])
            )


def batch_bytes(random: Random) -> bytes:
    """A CIFAR-10 batch of a few images."""
    import pickle

    n = random.choice([0, 1, 2])
    batch = {b"data": np.zeros((n, 3072), np.uint8), b"labels": [1] * n, b"names": ["a", ("b", None)]}
    content = pickle.dumps(batch, protocol=random.choice([0, 1, 2, 3, 4, 5]))
    return (
        content.replace(b".", random.choice([b"r\xff\xff\xff\x7f.", b"p999999999999\n.", b"2\x86.", b"."]))
        if random.random() < 0.2
        else content
    )


def packed(compress: Callable[[bytes], bytes], make: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    return lambda random: compress((make if random.random() < 0.98 else long_zeros)(random))


FORMATS: list[tuple[str, str, Callable[[Random], bytes]]] = [
    ("npz", ".npz", npz_bytes),
    ("npz", ".npz", npz_bytes),
    ("idx", ".idx", idx_bytes),
    ("idx.gz", ".idx.gz", packed(gzip.compress, idx_bytes)),
    ("csv", ".csv", csv_bytes),
    ("csv.gz", ".csv.gz", packed(gzip.compress, csv_bytes)),
    ("csv.bz2", ".csv.bz2", packed(bz2.compress, csv_bytes)),
    ("csv.xz", ".csv.xz", packed(lzma.compress, csv_bytes)),
    ("csv.zst", ".csv.zst", zst_bytes),
    ("csv.zip", ".csv.zip", zip_bytes),
    ("csv.tar", ".csv.tar", csv_bytes),
    ("parquet", ".parquet", parquet_bytes),
    ("parquet", ".parquet", parquet_bytes),
    ("cifar", ".batch", batch_bytes),
]


# ---- settings

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
                "name": "logistic_population",
                "n_clients": 4,
                "samples": 5,
                "dim": 3,
                "k": 2,
                "alpha": 0.3,
                "scale": 1.0,
                "test_points": 2,
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
                    "equal": False,
                    "groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
                },
            },
            {
                "name": "digits",
                "partition": {"name": "label_groups", "clients": 2, "groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]},
            },
            {"name": "digit_domains", "domains": ["drawn"], "samples": 8, "clients_per_domain": 2, "folder": "x"},
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
        "algorithm": [{"name": name, **_plain(method())} for name, method in METHODS.items()],
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

    from ppfl.core.errors import SettingError
    from ppfl.runs import Experiment
    from ppfl.runs.explain import explain
    from ppfl.runs.tuning import attempt, without_test

    try:
        checked = Experiment.model_validate(table)
    except ValidationError as error:
        raise SettingError(explain(error, table)) from None
    if Experiment.model_validate(json.loads(json.dumps(checked.model_dump(mode="json")))) != checked:
        raise AssertionError("json brings another experiment back")
    federation = checked.data.build(Path("nowhere"))
    if checked.data.name == "digit_domains" and len(federation.train) > 100:
        return federation
    checked.affinity.build(federation, checked.algorithm)
    checked.build_population(federation, checked.seeds[0])
    counts = [value for value in checked.algorithm.model_dump().values() if isinstance(value, int)]
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

    key = ".".join(random.choices([*KEYS, *TEXTS[:6], "algorithm", "population"], k=random.choice([1, 1, 2, 3, 5000])))
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


# ---- coverage-guided


def guided(seconds: int, folder: Path) -> None:
    """Readers and settings on bytes that atheris chooses by the code they reach; a failure ends the run."""
    import atheris

    with atheris.instrument_imports(include=["ppfl.data", "ppfl.runs"]):
        load_all()

    formats = [(suffix, make) for _, suffix, make in FORMATS]

    def one(content: bytes) -> None:
        at = content[0] % (len(formats) + 1) if content else 0
        if at == len(formats):
            (folder / "input.toml").write_bytes(content[1:])
            from ppfl.runs import load_experiment

            failure = survives(lambda: load_experiment(folder / "input.toml"))
        else:
            path = folder / f"input{formats[at][0]}"
            path.write_bytes(content[1:])
            failure = survives(lambda: read(path, Random(0)))
        if failure is not None:
            raise RuntimeError(failure)

    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(40 * len(formats)):
        at = i % len(formats)
        (corpus / str(i)).write_bytes(bytes([at]) + formats[at][1](Random(i))[:4000])
    signal.signal(signal.SIGALRM, _too_slow)
    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-artifact_prefix={folder}/failed-"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "guided":
        guided(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        kind, *numbers, folder = sys.argv[1:]
        _run(kind, *map(int, numbers), Path(folder))
