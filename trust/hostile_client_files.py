"""Files of data sets by client that were valid once: HDF5 as TFF has it, JSON as LEAF has it, posts line by line."""

import gzip
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "experiments"))  # the readers of our studies
SUFFIXES = (".writers", ".roles", ".users")  # what a file holds, before the suffix of its format


def read(path: Path, random: Random) -> object:
    """Read a file of writers, roles or users, up to the federation."""
    from readers import shakespeare, stackexchange

    from ppfl.data import femnist

    seed, least = random.randrange(9), random.choice([1, 1, 1, 5])
    asked = {"file": path, "clients": random.choice([None, None, 1, 3]), "seed": seed}
    if ".writers" in path.suffixes:
        return femnist(min_samples=least, image=random.random() < 0.5, **asked).federation(seed=seed)
    if ".roles" in path.suffixes:
        return shakespeare.read(length=random.choice([2, 5, 80]), min_samples=least, **asked).federation(seed=seed)
    words = random.choice([1, 5, 10_000])
    return stackexchange.read(length=5, words=words, min_words=least, **asked).federation(seed=seed)


def writers_h5(random: Random) -> bytes:
    """FEMNIST: pixels and labels of every writer."""
    return _h5(random, lambda n: {"pixels": _pixels(random, n), "label": _labels(random, n)})


def roles_h5(random: Random) -> bytes:
    """Shakespeare: snippets of every role."""
    return _h5(random, lambda n: {"snippets": _texts(random, n)})


def users_h5(random: Random) -> bytes:
    """StackOverflow: tokens of every user, and other fields that are not read."""
    return _h5(random, lambda n: {"tokens": _texts(random, n), "score": np.arange(n)})


def leaf_json(random: Random) -> bytes:
    """FEMNIST as LEAF has it, sometimes with a part that is missing or another value."""
    names = random.choice([["a", "b", "c"]] * 6 + [["a"], [], ["a", "a"], ["", "\ud800"]])
    sizes = [_size(random) for _ in names]
    data: Any = {name: _leaf_writer(random, n) for name, n in zip(names, sizes, strict=True)}
    content: Any = {"users": names, "num_samples": sizes, "user_data": data}
    if random.random() < 0.2:
        content[random.choice([*content])] = random.choice(_ODD)
    if random.random() < 0.1:
        del content[random.choice([*content])]
    return json.dumps(content).encode()


def posts_jsonl(random: Random) -> bytes:
    """Posts, one JSON object per line."""
    odd = random.choice([0, 0, 0, 0.05, 0.5])
    lines = []
    for at in range(random.choice([0, 1, *[20] * 6, 200])):
        post: Any = {"site": "s", "user": f"u{at % 3}", "date": f"2020-01-{at:02}", "text": _text(random)}
        if random.random() < odd:
            post[random.choice([*post])] = random.choice(_ODD)
        if random.random() < odd:
            del post[random.choice([*post])]
        lines.append(json.dumps(post if random.random() >= odd / 5 else random.choice(_ODD)))
    return random.choice(["\n", "\n", "\r\n", "\n\n"]).join(lines).encode()


def posts_gz(random: Random) -> bytes:
    """The same, compressed; sometimes a few bytes that become many."""
    if random.random() < 0.02:
        return gzip.compress(random.choice([b"\n", b"[", b" ", b"0"]) * 10**6)
    return gzip.compress(posts_jsonl(random))


CLIENT_FORMATS: list[tuple[str, str, Callable[[Random], bytes]]] = [
    ("TFF writers", ".writers.h5", writers_h5),
    ("TFF roles", ".roles.h5", roles_h5),
    ("TFF users", ".users.h5", users_h5),
    ("LEAF", ".writers.json", leaf_json),
    ("posts", ".users.jsonl", posts_jsonl),
    ("posts.gz", ".users.jsonl.gz", posts_gz),
]

_ODD: list[Any] = [None, True, -1, 1e400, math.nan, 2**70, "", "\0", "\ud800", [], [[]], [None], {}, {"x": 1}, {"": []}]


def _size(random: Random) -> int:
    return random.choice([0, 1, 2, *[5] * 6])


def _h5(random: Random, fields_of: Callable[[int], dict[str, Any]]) -> bytes:
    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w", libver=random.choice(["earliest", "latest"])) as h5:
        examples = h5.create_group("examples" if random.random() < 0.97 else "other")
        for client in random.choice([["a", "b"]] * 6 + [[], ["é"], ["x" * 300]]):
            group = examples.create_group(client)
            for field, values in fields_of(_size(random)).items():
                if random.random() < 0.97:
                    _write(random, group, field, values)
    return file.getvalue()


def _write(random: Random, group: Any, field: str, values: Any) -> None:
    import h5py

    chance = random.random()
    if chance < 0.03:
        group[field] = random.choice([h5py.SoftLink("/examples"), h5py.ExternalLink("/etc/passwd", "/")])
    elif chance < 0.05:
        group[field] = random.choice([1.0, h5py.Empty("f4"), "text", np.zeros(3, [("a", "i4")])])
    elif chance < 0.07:
        kind = random.choice([h5py.string_dtype(), h5py.vlen_dtype(np.int32), h5py.ref_dtype])
        group.create_dataset(field, (3,), dtype=kind)
    elif chance < 0.09:
        group.create_dataset(field, (random.choice([2**20, 2**40]), 28, 28), "f4", chunks=(64, 28, 28))
    else:
        packed = {"compression": "gzip"} if values.ndim and values.size and random.random() < 0.6 else {}
        if packed and random.random() < 0.3:
            packed |= {"shuffle": True, "fletcher32": True}
        group.create_dataset(field, data=values, **packed)


def _pixels(random: Random, n: int) -> Any:
    shape = random.choice([(n, 28, 28)] * 40 + [(n, 784)] * 5 + [(n, 27, 28), (n,), (), (n + 1, 28, 28)])
    pixels = np.ones(shape, random.choice(["f4", "f4", "f4", "f8", ">f4", "f2"]))
    if pixels.size and random.random() < 0.1:
        pixels.flat[0] = random.choice([math.nan, math.inf, -1, 2, 0.5])
    return pixels if random.random() < 0.95 else np.full(shape, 255, np.uint8)


def _labels(random: Random, n: int) -> Any:
    labels = np.arange(n).astype(random.choice(["i4", "i4", "i8", "u1", ">i2", "u8"] * 3 + ["f4"]))
    if n and random.random() < 0.1:
        labels[0] = random.choice([61, 62, 127])
    return labels


def _leaf_writer(random: Random, n: int) -> Any:
    images = [[random.choice([1.0, 1.0, 0.0])] * 784 for _ in range(n)]
    writer: Any = {"x": images, "y": [random.randrange(62) for _ in range(n)]}
    if random.random() < 0.1:
        writer[random.choice("xy")] = random.choice(_ODD)
    return writer


def _texts(random: Random, n: int) -> Any:
    texts = [_text(random).encode("utf-8", "replace") for _ in range(n)]
    if n and random.random() < 0.1:
        texts[0] = random.choice([b"\xff\xfe", b"a\0b", b"", b"word " * 2000])
    return np.array(texts, "S") if n else np.zeros(0, "S1")


def _text(random: Random) -> str:
    return " ".join(random.choices(["to", "be", "or", "don't", "é", "\t", "1", "?"], k=random.randrange(12)))
