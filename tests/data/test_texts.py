"""Shakespeare, Stack Exchange and TFF's HDF5 files: every token is predicted once, and hostile files are refused."""

import json
import sys
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from readers import shakespeare, stackexchange

from kit.files import limited, write_bytes, write_tff
from kit.refusals import DataError, assert_refused
from ppfl.data import build
from ppfl.data.datasets.client_files import open_tff

h5py = pytest.importorskip("h5py")
IGNORED = torch.nn.CrossEntropyLoss().ignore_index

ROLES = {
    "train": {"HAMLET": ["To be, or not to be", "Words."], "LEAR": ["a" * n for n in (1, 4, 5, 6, 29, 30, 31, 2)]},
    "test": {"HAMLET": ["The rest is silence."], "LEAR": ["Howl!"]},
}
POSTS = {
    "ann": ["How do I store coffee beans?", "Keep the beans dry; don't freeze the coffee.", "The coffee is dry."],
    "bob": ["Is the grinder's setting right for the beans?", "The coffee tastes bitter."],
    "eve": ["Thanks!"],
}


def write_posts(path, texts=POSTS):
    """The latest post of the last user first, as readers must sort by time."""
    numbered = [(user, f"2015-01-{at:02}", text) for user, found in texts.items() for at, text in enumerate(found, 1)]
    lines = [json.dumps({"site": "coffee", "user": u, "date": d, "text": text}) for u, d, text in reversed(numbered)]
    return write_bytes(path, "\n".join(lines).encode())


def posts(folder=None, min_words=1, **settings):
    return stackexchange.read(folder, min_words=min_words, **settings).federation()


def words(text):
    return [word.strip(";.?!") for word in text.lower().split()]


def naive_rows(texts, classes, length):
    """Inputs and targets of texts, each a sequence of tokens: every token and the end is predicted once."""
    number = {name: at for at, name in enumerate(classes)}
    x, y = [], []
    for text in texts:
        whole = [number["<bos>"], *(number.get(token, number["<oov>"]) for token in text), number["<eos>"]]
        for start in range(0, len(whole) - 1, length):
            inputs, targets = whole[:-1][start : start + length], whole[1:][start : start + length]
            x.append(inputs + [number["<pad>"]] * (length - len(inputs)))
            y.append(targets + [IGNORED] * (length - len(targets)))
    return x, y


def assert_rows(part, texts, classes, length):
    assert (part.x.tolist(), part.y.tolist()) == naive_rows(texts, classes, length)


def plays(folder):
    for part, roles in ROLES.items():
        write_tff(folder / f"shakespeare_{part}.h5", {role: {"snippets": texts} for role, texts in roles.items()})
    return lambda length: shakespeare.read(folder, length=length).federation(), ROLES


def stackoverflow(folder):
    """The test file is kept, with words that training has not."""
    train = {user: list(map(words, texts)) for user, texts in POSTS.items()}
    test = {"bob": [["the", "coffee", "tastes", "stale"]], "ann": []}
    for part, texts in (("train", train), ("test", test | {"zoe": [["hello"]]})):
        fields = {user: {"tokens": [" ".join(text) for text in found]} for user, found in texts.items()}
        write_tff(folder / f"stackoverflow_{part}.h5", fields)
    read = lambda length: posts(folder, length=length, test_fraction=0.9)  # noqa: E731
    return read, {"train": train, "test": test}


@pytest.mark.parametrize("length", [2, 5, 30])
@pytest.mark.parametrize("write", [plays, stackoverflow])
def test_rows_of_every_client_are_those_of_a_loop_over_its_texts(tmp_path, write, length):
    read, expected = write(tmp_path)
    f = read(length)
    assert set(f.ids) == set(expected["train"]) and set(f.splits) == set(expected)
    for split, clients in expected.items():
        for client, texts in clients.items():
            assert_rows(f.client(client)[split], texts, f.classes, length)


def test_characters_have_the_numbers_of_tff(tmp_path):
    write_tff(tmp_path / "shakespeare_train.h5", {"ALL": {"snippets": [shakespeare.SHAKESPEARE_CHARACTERS + "}"]}})
    f = shakespeare.read(tmp_path, length=90).federation(test_fraction=0)
    assert f.train.x[0].tolist() == [88, *range(1, 87), 87, 0, 0]
    assert f.train.y[0].tolist() == [*range(1, 87), 87, 89, *[IGNORED] * 2]


@pytest.mark.parametrize("fraction", [0, 0.1, 0.3, 0.9])
def test_the_latest_posts_of_a_user_are_its_test_part_and_no_post_is_in_both_parts(tmp_path, fraction):
    random = Random(7)
    draw = lambda: " ".join(random.choices("abcdefgh", k=random.randrange(1, 30)))  # noqa: E731
    texts = POSTS | {f"user {i}": [draw() for _ in range(1 + i)] for i in range(8)}
    write_posts(tmp_path / "posts.jsonl.gz", texts)
    f = posts(tmp_path, length=4, test_fraction=fraction)
    for user, found in texts.items():
        parts, split = f.client(f"coffee/{user}"), list(map(words, found))
        cut = int((parts["train"].y == f.classes.index("<eos>")).sum())
        assert_rows(parts["train"], split[:cut], f.classes, 4)
        if fraction == 0 or len(found) == 1:
            assert cut == len(found)
            continue
        assert_rows(parts["test"], split[cut:], f.classes, 4)
        rows = [len(naive_rows([text], f.classes, 4)[0]) for text in split]
        # no other cut between two posts is nearer to the fraction
        away = {at: abs(sum(rows[at:]) - fraction * sum(rows)) for at in range(1, len(found))}
        assert away[cut] == min(away.values())


def test_the_vocabulary_is_the_most_frequent_words_of_the_training_part(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl")
    everything = posts(file=path, length=3, test_fraction=0.3)
    counts = Counter(everything.classes[token] for token in everything.train.y.flatten().tolist() if token != IGNORED)
    del counts["<eos>"]
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    assert everything.classes == ("<pad>", *ranked, "<oov>", "<bos>", "<eos>")
    assert set(posts(file=path, min_words=12).ids) == {"coffee/ann", "coffee/bob"}
    assert "bitter" not in ranked  # of the test part only
    few = posts(file=path, length=3, words=4, test_fraction=0.3)
    assert few.classes == ("<pad>", *ranked[:4], "<oov>", "<bos>", "<eos>")
    assert_rows(few.client("coffee/eve")["train"], [["thanks"]], few.classes, 3)  # now an unknown word


def test_broken_posts_and_texts_beyond_the_limits_are_refused(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl.gz")
    read = lambda: posts(file=path)  # noqa: E731
    for name, most in (("bytes", 500), ("classes", 10), ("features", 10)):
        with limited(**{name: most}):
            assert_refused(read, DataError, f"limit of {most}")
    broken = {b"\n7": "line 2 has no text", b'{"date": "", "text": ""}': "line 1 has no text", b"": "0 of 0 clients"}
    for content, said in (broken | dict.fromkeys([b"\xff\xfe", b"[" * 100_000], "is not a file of posts")).items():
        write_bytes(path, content)
        assert_refused(read, DataError, said)
    write_posts(path, {"a\0": ["to be or not to be"]})
    assert_refused(read, DataError, "NUL")
    path = write_tff(tmp_path / "a.h5", {f"user {i}": {"tokens": ["a b c d e"]} for i in range(200)})
    with limited(bytes=2_000):  # no more clients are read than are asked for
        assert build("readers.stackexchange:read", file=str(path), length=5, min_words=1, clients=4).n_clients == 4
        assert_refused(lambda: posts(file=path, length=5), DataError, "more than the limit")


def read_field(path, field="x", kinds="fiu", client="ann"):
    with open_tff(path) as file:
        return file.read(client, field, kinds).tolist()


def test_what_was_written_is_read_and_damage_is_refused(tmp_path, monkeypatch):
    texts = ["to be", "", "né\n" * 30]
    path = write_tff(tmp_path / "a.h5", {"b/c": {}, "ann": {"x": np.arange(6).reshape(3, 2), "s": texts}})
    np.testing.assert_array_equal(read_field(path), np.arange(6).reshape(3, 2))
    assert [text.decode() for text in read_field(path, "s", "S")] == texts
    with limited(clients=1):
        assert_refused(lambda: read_field(path), DataError, "has 2 clients, more than the limit of 1")
    with limited(bytes=80), pytest.raises(DataError, match="96 bytes"), open_tff(path) as file:
        _ = [file.read("ann", "x") for _ in range(2)]  # all that is read of a file counts
    whole = path.read_bytes()
    for content in (b"text", whole[:8] + bytes(100), *(whole[:cut] for cut in range(0, len(whole), 500))):
        path.write_bytes(content)
        assert_refused(lambda: [read_field(path), read_field(path, "s", "S")], DataError, "download it again")
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert_refused(lambda: read_field(path), DataError, "needs h5py", "ppfl[hdf5]")


def test_links_other_types_and_sizes_in_hdf5_are_refused_before_anything_is_read(tmp_path):
    path, secret = tmp_path / "a.h5", write_bytes(tmp_path / "secret", bytes(range(80)))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.arange(3.0)
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(3.0)
        ann = file.create_group("examples/ann")
        ann.create_group("group")
        ann["record"] = np.zeros(2, [("a", "i4")])
        ann.create_dataset("words", 2, dtype=h5py.string_dtype())
        ann["soft link"], ann["link to a file"] = h5py.SoftLink("/y"), h5py.ExternalLink("b.h5", "/x")
        ann.create_dataset("stored in a file", (10,), "f8", external=[(str(secret), 0, 80)])
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource("b.h5", "x", (3,))
        ann.create_virtual_dataset("virtual", layout)
        ann.create_dataset("few chunks", (1 << 40,), "f4", chunks=(1024,))
        ann.create_dataset("tiny chunks", (1 << 28,), "f4", chunks=(1,))
        ann.create_dataset("large text", (1 << 30,), "S8", chunks=(1 << 26,))
        ann.create_dataset("large chunk", (2,), "f4", chunks=(1 << 29,), maxshape=(None,))
        file["examples/link"] = h5py.SoftLink("/examples/ann")
    assert path.stat().st_size < 1e5
    hostile = {
        "absent": "is missing",
        "group": "is a Group",
        "record": "expected numbers",
        "words": "without a fixed length",
        "soft link": "is a link",
        "link to a file": "is a link",
        "stored in a file": "no rows in this file",
        "virtual": "no rows in this file",
        "few chunks": "in chunks of (1024,)",
        "tiny chunks": "in chunks of (1,)",
        "large chunk": "more than the limit",
        "large text": "more than the limit",
    }
    with limited(bytes=1 << 29):
        for field, said in hostile.items():
            kinds = "S" if field in ("words", "large text") else "fiu"
            assert_refused(lambda: read_field(path, field, kinds), DataError, said)
    assert_refused(lambda: read_field(path, client="link"), DataError, "'link' is a link")
