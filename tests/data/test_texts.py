"""Shakespeare, Stack Exchange and TFF's HDF5 files: every token is predicted once, and hostile files are refused."""

import json
import sys
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from kit.files import write_bytes, write_tff
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import SHAKESPEARE_CHARACTERS, build, read_shakespeare, read_stackexchange
from ppfl.data.limits import limited
from ppfl.data.tff_files import open_tff

h5py = pytest.importorskip("h5py")
IGNORED = torch.nn.CrossEntropyLoss().ignore_index

ROLES = {
    "train": {"HAMLET": ["To be, or not to be", "Words, words, words."], "YORICK": ["Alas"],
              "LEAR": ["a" * size for size in (1, 4, 5, 6, 29, 30, 31, 2)]},
    "test": {"HAMLET": ["The rest is silence."], "LEAR": ["Howl!"], "YORICK": ["Poor"]},
}  # fmt: skip
POSTS = {
    "ann": ["How do I store coffee beans?", "Keep the beans dry; don't freeze the coffee.", "The coffee is dry."],
    "bob": ["Is the grinder's setting right for the beans?", "The coffee tastes bitter."],
    "eve": ["Thanks!"],
}


def post(user: str, at: int, text: str, **changes) -> dict:
    return {"site": "coffee", "user": user, "date": f"2015-01-{at + 1:02}T20:00:00", "text": text} | changes


def write_posts(path, texts=POSTS, **changes):
    """The latest post of the last user first, as readers must sort by time."""
    posts = [post(user, at, text, **changes) for user, found in texts.items() for at, text in enumerate(found)]
    return write_bytes(path, "\n".join(json.dumps(each) for each in reversed(posts)).encode())


def words(text: str) -> list[str]:
    return [word.strip(";.?!") for word in text.lower().split()]


def naive_rows(texts, classes, length: int) -> tuple[list[list[int]], list[list[int]]]:
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


def assert_rows(part, texts, classes, length: int) -> None:
    assert (part.x.tolist(), part.y.tolist()) == naive_rows(texts, classes, length)


def shakespeare(folder):
    for part, roles in ROLES.items():
        write_tff(folder / f"shakespeare_{part}.h5", {role: {"snippets": texts} for role, texts in roles.items()})
    return lambda length: read_shakespeare(folder, length), ROLES


def posts(folder):
    write_posts(folder / "posts.jsonl.gz")
    expected = {"train": {f"coffee/{user}": list(map(words, texts)) for user, texts in POSTS.items()}}
    return lambda length: read_stackexchange(folder, length, min_words=1, test_fraction=0), expected


def stackoverflow(folder):
    """The test file is kept, with words that training has not."""
    train = {user: list(map(words, texts)) for user, texts in POSTS.items()}
    test = {"bob": [["the", "coffee", "tastes", "stale"]], "ann": []}
    for part, texts in (("train", train), ("test", test | {"zoe": [["hello"]]})):
        fields = {user: {"tokens": [" ".join(text) for text in found]} for user, found in texts.items()}
        write_tff(folder / f"stackoverflow_{part}.h5", fields)
    expected = {"train": train, "test": test}
    return lambda length: read_stackexchange(folder, length, min_words=1, test_fraction=0.9), expected


@pytest.mark.parametrize("length", [2, 5, 30])
@pytest.mark.parametrize("write", [shakespeare, posts, stackoverflow])
def test_rows_of_every_client_are_those_of_a_loop_over_its_texts(tmp_path, write, length):
    read, expected = write(tmp_path)
    f = read(length)
    assert set(f.ids) == set(expected["train"]) and set(f.splits) == set(expected)
    assert (f.train.x.dtype, f.train.x.shape[1:]) == (torch.int64, (length,))
    for split, clients in expected.items():
        for client, texts in clients.items():
            assert_rows(f.client(client)[split], texts, f.classes, length)


def test_characters_have_the_numbers_of_tff(tmp_path):
    write_tff(tmp_path / "shakespeare_train.h5", {"ALL": {"snippets": [SHAKESPEARE_CHARACTERS, "}~"]}})
    f = read_shakespeare(tmp_path, length=90, test_fraction=0)
    assert f.train.x[0].tolist() == [88, *range(1, 87), 0, 0, 0]
    assert f.train.y[0].tolist() == [*range(1, 87), 89, *[IGNORED] * 3]
    assert f.train.y[1, :3].tolist() == [87, 87, 89]
    assert [f.classes[i] for i in (0, 87, 88, 89)] == ["<pad>", "<oov>", "<bos>", "<eos>"]


def test_roles_by_settings_and_seed(tmp_path):
    shakespeare(tmp_path)
    f = build("shakespeare", base=tmp_path.parent, folder=tmp_path.name, length=4, min_samples=9, clients=1)
    assert f.ids[0] in ("HAMLET", "LEAR") and f.n_clients == 1
    path = tmp_path / "shakespeare_train.h5"
    first, again, other = (read_shakespeare(path, 3, seed=seed, test_fraction=0.4) for seed in (0, 0, 1))
    assert torch.equal(first.test.x, again.test.x) and not torch.equal(first.test.x, other.test.x)
    whole = read_shakespeare(path, 3, test_fraction=0)
    assert torch.equal(first.train.sizes + first.test.sizes, whole.train.sizes)


@pytest.mark.parametrize("fraction", [0, 0.1, 0.3, 0.9])
def test_the_latest_posts_of_a_user_are_its_test_part_and_no_post_is_in_both_parts(tmp_path, fraction):
    random = Random(7)
    texts = {
        f"user {i}": [" ".join(random.choices("abcdefgh", k=random.randrange(1, 30))) for _ in range(1 + i)]
        for i in range(8)
    }
    path = write_posts(tmp_path / "posts.jsonl", texts)
    f = read_stackexchange(path, 4, min_words=1, test_fraction=fraction)
    for user, found in texts.items():
        parts = f.client(f"coffee/{user}")
        split = [text.split() for text in found]
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
    everything = read_stackexchange(path, 3, min_words=1, test_fraction=0.3)
    counts = Counter(everything.classes[token] for token in everything.train.y.flatten().tolist() if token != IGNORED)
    del counts["<eos>"]
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    assert everything.classes == ("<pad>", *ranked, "<oov>", "<bos>", "<eos>")
    assert "bitter" not in ranked  # of the test part only
    few = read_stackexchange(path, 3, words=4, min_words=1, test_fraction=0.3)
    assert few.classes == ("<pad>", *ranked[:4], "<oov>", "<bos>", "<eos>")
    assert_rows(few.client("coffee/eve")["train"], [["thanks"]], few.classes, 3)  # now an unknown word


def test_users_by_words_and_site(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl")
    assert set(read_stackexchange(path, min_words=12).ids) == {"coffee/ann", "coffee/bob"}
    lines = [json.dumps(post("7", 0, "one two\ud800three", site=site)) for site in ("a", "b")]
    two = read_stackexchange(write_bytes(path, "\n".join(lines).encode()), min_words=1)
    assert two.ids == ("a/7", "b/7") and "three" in two.classes  # half a character is no part of a word
    alone = json.dumps({"user": "7", "date": "2015", "text": "one two"}).encode()
    assert read_stackexchange(write_bytes(path, alone), min_words=1).ids == ("7",)


def test_no_more_users_than_needed_are_read(tmp_path):
    path = write_tff(tmp_path / "stackoverflow.h5", {f"user {i}": {"tokens": ["a b c d e"]} for i in range(200)})
    with limited(bytes=2_000):
        assert build("stackexchange", folder=tmp_path, length=5, min_words=1, clients=4).n_clients == 4
        assert_refused(lambda: read_stackexchange(path, 5, min_words=1), DataError, "more than the limit")


BROKEN = {
    "a number": (b"7", "line 1 has no text for user, date, text"),
    "no user": (b'{"date": "", "text": ""}', "line 1 has no text"),
    "text that is none": (b"\n" + json.dumps(post("a", 0, "") | {"text": ["a"]}).encode(), "line 2 has no text"),
    "bytes": (b"\xff\xfe", "is not a file of posts"),
    "empty": (b"", "0 of 0 clients have at least 1 words"),
    "a NUL in a name": (json.dumps(post("a\0", 0, "to be or not to be")).encode(), "NUL"),
    "nested too deep": (b"[" * 100_000, "is not a file of posts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_posts_are_refused(tmp_path, case):
    content, words = BROKEN[case]
    path = write_bytes(tmp_path / "posts.jsonl", content)
    assert_refused(lambda: read_stackexchange(path, min_words=1), DataError, words)


def test_texts_beyond_the_limits_and_other_files_are_refused(tmp_path):
    shakespeare(tmp_path)
    path = write_posts(tmp_path / "posts.jsonl.gz")
    other = write_tff(tmp_path / "a.h5", {"ann": {"tokens": np.array([b"\xff\xfe"]), "snippets": np.zeros(3)}})
    for limits, call, *words in (
        ({"bytes": 500}, lambda: read_stackexchange(path, min_words=1), "limit of 500"),
        ({"classes": 10}, lambda: read_stackexchange(path, min_words=1), "limit of 10", "fewer words"),
        ({}, lambda: build("stackexchange", file=path, min_words=1, length=10**9), "limit"),
        ({"features": 10}, lambda: read_shakespeare(tmp_path), "a row has 80 tokens", "limit"),
        ({}, lambda: read_shakespeare(tmp_path / "nowhere"), "no shakespeare_train.h5"),
        ({}, lambda: read_shakespeare(tmp_path, min_samples=100), "0 of 3 clients", "100 samples"),
        ({}, lambda: read_stackexchange(other, min_words=1), "'ann' that are no text"),
        ({}, lambda: read_shakespeare(other), "'snippets' of client 'ann' is float64"),
    ):
        with limited(**limits):
            assert_refused(call, DataError, *words)
    assert_refused(lambda: read_shakespeare(tmp_path, length=1), SettingError, "length is 1")


def read_field(path, field="x", kind="numbers", client="ann"):
    with open_tff(path) as file:
        return getattr(file, kind)(client, field)


def test_what_was_written_is_read_and_damage_is_refused(tmp_path, monkeypatch):
    texts = ["to be", "", "né\n" * 30]
    path = write_tff(tmp_path / "a.h5", {"b/c": {}, "ann": {"x": np.arange(6).reshape(3, 2), "s": texts}})
    np.testing.assert_array_equal(read_field(path), np.arange(6).reshape(3, 2))
    assert [text.decode() for text in read_field(path, "s", "texts")] == texts
    assert (read_field(path, kind="length"), read_field(path, kind="length", client="nobody")) == (3, 0)
    whole = path.read_bytes()
    for content in (b"text", whole[:8] + bytes(100), *(whole[:cut] for cut in range(0, len(whole), 500))):
        path.write_bytes(content)
        assert_refused(lambda: [read_field(path), read_field(path, "s", "texts")], DataError, "download it again")
    for name, words in (("examples", "is a Dataset"), ("examples/ann", "'ann' is a Dataset"), ("x", "is missing")):
        with h5py.File(path, "w") as file:
            file[name] = 1
        assert_refused(lambda: read_field(path), DataError, words)
    assert_refused(lambda: read_field(tmp_path / "b.h5"), DataError, "no file")
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert_refused(lambda: read_field(path), DataError, "needs h5py", "ppfl[hdf5]")


HOSTILE = {  # field: how it is asked for, and what is said
    "number": ("numbers", "no rows"),
    "nothing": ("numbers", "no rows"),
    "bytes": ("numbers", "expected numbers"),
    "record": ("numbers", "expected numbers"),
    "matrix": ("texts", "expected texts"),
    "words": ("texts", "without a fixed length"),
    "lists": ("texts", "without a fixed length"),
    "soft link": ("numbers", "is a link"),
    "link to a file": ("numbers", "is a link"),
    "stored in a file": ("numbers", "no rows in this file"),
    "virtual": ("numbers", "no rows in this file"),
    "few chunks": ("numbers", "in chunks of (1024,)"),
    "tiny chunks": ("numbers", "in chunks of (1,)"),
    "large": ("numbers", "more than the limit"),
    "large text": ("texts", "more than the limit"),
    "large chunk": ("numbers", "more than the limit"),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A small file with one attack per field."""
    path = tmp_path_factory.mktemp("hostile") / "a.h5"
    secret = write_bytes(path.with_name("secret"), bytes(range(80)))
    with h5py.File(path.with_name("b.h5"), "w") as file:
        file["x"] = np.arange(3.0)
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(3.0)
        ann = file.create_group("examples/ann")
        ann["number"], ann["nothing"], ann["bytes"] = 1.0, h5py.Empty("f4"), np.array([b"a"])
        ann["record"], ann["matrix"] = np.zeros(2, [("a", "i4")]), np.zeros((2, 2))
        ann.create_dataset("words", 2, dtype=h5py.string_dtype())
        ann.create_dataset("lists", 2, dtype=h5py.vlen_dtype(np.int32))
        ann["soft link"], ann["link to a file"] = h5py.SoftLink("/y"), h5py.ExternalLink("b.h5", "/x")
        ann.create_dataset("stored in a file", (10,), "f8", external=[(str(secret), 0, 80)])
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource("b.h5", "x", (3,))
        ann.create_virtual_dataset("virtual", layout)
        ann.create_dataset("few chunks", (1 << 40,), "f4", chunks=(1024,))
        ann.create_dataset("tiny chunks", (1 << 28,), "f4", chunks=(1,))
        ann.create_dataset("large", (1 << 31,), "f4", chunks=(1 << 28,))
        ann.create_dataset("large text", (1 << 30,), "S8", chunks=(1 << 26,))
        ann.create_dataset("large chunk", (2,), "f4", chunks=(1 << 29,), maxshape=(None,))
        file["examples/link"] = h5py.SoftLink("/examples/ann")
    assert path.stat().st_size < 1e5
    return path


@pytest.mark.parametrize("field", HOSTILE)
def test_links_other_types_and_sizes_in_hdf5_are_refused_before_anything_is_read(hostile, field):
    kind, words = HOSTILE[field]
    with limited(bytes=1 << 29):
        assert_refused(lambda: read_field(hostile, field, kind), DataError, words)
    assert_refused(lambda: read_field(hostile, "matrix", client="link"), DataError, "'link' is a link")


def test_all_that_is_read_of_a_file_counts(tmp_path):
    path = write_tff(tmp_path / "a.h5", {name: {"x": np.zeros(100)} for name in ("ann", "bob", "eve")})
    with limited(bytes=1700), pytest.raises(DataError, match="2,400 bytes"), open_tff(path) as file:
        _ = [file.numbers(name, "x") for name in file.clients]
    with limited(clients=2):
        assert_refused(lambda: read_field(path), DataError, "has 3 clients, more than the limit of 2")
