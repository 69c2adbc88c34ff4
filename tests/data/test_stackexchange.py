"""Next-word data by user, from posts and from TFF's StackOverflow files."""

import gzip
import json
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from kit.files import write_tff
from ppfl.core.errors import DataError
from ppfl.core.losses import IGNORED
from ppfl.data import build, read_stackexchange
from ppfl.data.limits import limited

TEXTS = {
    "ann": ["How do I store coffee beans?", "Keep the beans dry; don't freeze the coffee.", "The coffee is dry."],
    "bob": ["Is the grinder's setting right for the beans?", "The coffee tastes bitter."],
    "eve": ["Thanks!"],
}


def post(user: str, at: int, text: str, **changes) -> dict:
    return {
        "site": "coffee",
        "user": user,
        "date": f"2015-01-{at + 1:02}T20:00:00",
        "text": text,
        "score": "3",
    } | changes


POSTS = [post(user, at, text) for user, texts in TEXTS.items() for at, text in enumerate(texts)]


def write_posts(path, posts=POSTS):
    text = "\n".join(json.dumps(post) for post in posts).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def words(text: str) -> list[str]:
    return [word.strip(";.?!") for word in text.lower().split()]


def texts_of(samples, classes) -> list[list[str]]:
    """The texts that the rows of a client were cut from."""
    found: list[list[str]] = [[]]
    for token in samples.y[samples.y != IGNORED].tolist():
        if classes[token] == "<eos>":
            found.append([])
        else:
            found[-1].append(classes[token])
    return found[:-1]


@pytest.mark.parametrize("name", ["posts.jsonl", "posts.jsonl.gz"])
@pytest.mark.parametrize("length", [3, 20])
def test_every_user_has_its_own_posts_in_the_order_of_time(tmp_path, name, length):
    write_posts(tmp_path / name, [*reversed(POSTS)])
    f = read_stackexchange(tmp_path, length, min_words=1, test_fraction=0)
    assert set(f.ids) == {"coffee/ann", "coffee/bob", "coffee/eve"}
    assert (f.train.x.dtype, f.train.x.shape[1:], f.train.y.shape[1:]) == (torch.int64, (length,), (length,))
    for user, texts in TEXTS.items():
        assert texts_of(f.client(f"coffee/{user}")["train"], f.classes) == [words(text) for text in texts]


def test_the_target_is_the_next_input_and_padding_is_no_target(tmp_path):
    f = read_stackexchange(write_posts(tmp_path / "posts.jsonl"), 4, min_words=1)
    for part in f.splits.values():
        real = part.y != IGNORED
        assert torch.equal(real, part.x != 0)
        assert real[:, 0].all()
        assert torch.equal(part.x[:, 1:][real[:, 1:]], part.y[:, :-1][real[:, 1:]])
        assert not (part.y == 0).any() and not (part.y == f.classes.index("<bos>")).any()


@pytest.mark.parametrize("fraction", [0, 0.1, 0.3, 0.9])
def test_the_latest_posts_of_a_user_are_its_test_part_and_no_post_is_in_both_parts(tmp_path, fraction):
    random = Random(7)
    texts = {
        f"user {i}": [" ".join(random.choices("abcdefgh", k=random.randrange(1, 30))) for _ in range(1 + i)]
        for i in range(8)
    }
    posts = [post(user, at, text) for user, found in texts.items() for at, text in enumerate(found)]
    path = write_posts(tmp_path / "posts.jsonl", posts)
    f = read_stackexchange(path, 4, min_words=1, test_fraction=fraction)
    for user, found in texts.items():
        parts = f.client(f"coffee/{user}")
        cut = len(texts_of(parts["train"], f.classes))
        assert texts_of(parts["train"], f.classes) == [text.split() for text in found[:cut]]
        if fraction == 0 or len(found) == 1:
            assert cut == len(found)
            continue
        assert texts_of(parts["test"], f.classes) == [text.split() for text in found[cut:]]
        rows = [-(-(len(text.split()) + 1) // 4) for text in found]
        assert (len(parts["train"]), len(parts["test"])) == (sum(rows[:cut]), sum(rows[cut:]))
        # no other cut between two posts is nearer to the fraction
        away = {at: abs(sum(rows[at:]) - fraction * sum(rows)) for at in range(1, len(found))}
        assert away[cut] == min(away.values())


def test_the_vocabulary_is_the_most_frequent_words_of_the_training_part(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl")
    everything = read_stackexchange(path, 3, min_words=1, test_fraction=0.3)
    train = everything.train.y[everything.train.y != IGNORED].tolist()
    counts = Counter(everything.classes[token] for token in train)
    del counts["<eos>"]
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    assert everything.classes == ("<pad>", *ranked, "<oov>", "<bos>", "<eos>")
    assert "bitter" not in ranked  # of the test part only
    few = read_stackexchange(path, 3, words=4, min_words=1, test_fraction=0.3)
    assert few.classes == ("<pad>", *ranked[:4], "<oov>", "<bos>", "<eos>")
    shared = (everything.train.y > 0) & (everything.train.y <= 4)
    assert torch.equal(few.train.y[shared], everything.train.y[shared])
    end = everything.train.y == everything.classes.index("<eos>")
    unknown = (everything.train.y != IGNORED) & ~shared & ~end
    assert (few.train.y[unknown] == 5).all() and (few.train.y[end] == 7).all()


def test_users_by_words_and_number(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl")
    assert read_stackexchange(path, min_words=12).ids == ("coffee/ann", "coffee/bob")
    assert read_stackexchange(path, min_words=13).ids == ("coffee/ann",)
    few, more = (set(read_stackexchange(path, min_words=1, clients=n, test_fraction=0).ids) for n in (1, 2))
    assert few < more
    with pytest.raises(DataError, match="0 of 3 clients have at least 500 words"):
        read_stackexchange(path)


def test_users_of_two_sites_are_two_clients(tmp_path):
    both = [post("7", 0, "one two three", site=site) for site in ("a", "b")]
    assert read_stackexchange(write_posts(tmp_path / "posts.jsonl", both), min_words=1).ids == ("a/7", "b/7")
    for each in both:
        del each["site"]
    assert read_stackexchange(write_posts(tmp_path / "posts.jsonl", both), min_words=1, test_fraction=0).ids == ("7",)


BROKEN = {
    "no json": (b"hello", "is not a file of posts"),
    "cut": (b'{"user": "a", "date": ', "is not a file of posts"),
    "a number": (b"7", "line 1 has no text for user, date, text"),
    "no user": (json.dumps({"date": "", "text": ""}).encode(), "line 1 has no text"),
    "text that is none": (b"\n" + json.dumps(post("a", 0, "") | {"text": ["a"]}).encode(), "line 2 has no text"),
    "bytes": (b"\xff\xfe", "is not a file of posts"),
    "empty": (b"", "0 of 0 clients have at least 1 words"),
    "no words": (json.dumps(post("a", 0, "?!")).encode(), "0 of 1 clients have at least 1 words"),
    "a NUL in a name": (json.dumps(post("a\0", 0, "to be or not to be")).encode(), "NUL"),
    "deep": (b"[" * 100_000, "is not a file of posts"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_posts_are_refused(tmp_path, case):
    content, pattern = BROKEN[case]
    path = tmp_path / "posts.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=pattern) as caught:
        read_stackexchange(path, min_words=1)
    assert "\n" not in str(caught.value)


def test_half_a_character_is_no_part_of_a_word(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl", [post("a", 0, "to\ud800be " * 9)])
    assert read_stackexchange(path, min_words=1).classes[1:3] == ("be", "to")


def test_sizes_are_limited(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl.gz")
    with limited(bytes=500), pytest.raises(DataError, match="more than the limit of 500"):
        read_stackexchange(path, min_words=1)
    with limited(classes=10), pytest.raises(DataError, match="words, more than the limit of 10; set fewer words"):
        read_stackexchange(path, min_words=1)
    with pytest.raises(DataError, match="more than the limit"):
        build("stackexchange", file=path, min_words=1, length=10**9)


def write_stackoverflow(folder, part: str, texts=None) -> None:
    pytest.importorskip("h5py")
    texts = texts or {user: [" ".join(words(text)) for text in found] for user, found in TEXTS.items()}
    write_tff(folder / f"stackoverflow{part}.h5", {user: {"tokens": found} for user, found in texts.items()})


def test_one_stackoverflow_file(tmp_path):
    write_stackoverflow(tmp_path, "")
    f = build("stackexchange", folder=tmp_path, length=3, min_words=1, test_fraction=0)
    posts = read_stackexchange(write_posts(tmp_path / "p.jsonl"), 3, min_words=1, test_fraction=0)
    assert set(f.ids) == set(TEXTS) and f.classes == posts.classes
    for user in f.ids:
        assert torch.equal(f.client(user)["train"].y, posts.client(f"coffee/{user}")["train"].y)


def test_the_test_file_of_stackoverflow_is_kept(tmp_path):
    write_stackoverflow(tmp_path, "_train")
    write_stackoverflow(tmp_path, "_test", {"bob": ["the coffee tastes stale"], "zoe": ["hello"], "ann": []})
    f = read_stackexchange(tmp_path, 3, min_words=1, test_fraction=0.9)
    assert set(f.ids) == set(TEXTS)  # zoe has no training text
    assert f.test.sizes.tolist() == [2 if user == "bob" else 0 for user in f.ids]
    assert texts_of(f.client("bob")["test"], f.classes) == [["the", "coffee", "tastes", "<oov>"]]
    assert [len(texts_of(f.client(user)["train"], f.classes)) for user in TEXTS] == [3, 2, 1]


def test_no_more_users_than_needed_are_read(tmp_path):
    pytest.importorskip("h5py")
    many = {f"user {i}": {"tokens": ["a b c d e"]} for i in range(200)}
    path = write_tff(tmp_path / "stackoverflow.h5", many)
    with limited(bytes=2_000):
        assert read_stackexchange(path, 5, min_words=1, clients=4, test_fraction=0).n_clients == 4
        with pytest.raises(DataError, match="more than the limit"):
            read_stackexchange(path, 5, min_words=1, test_fraction=0)


def test_tokens_that_are_no_text_are_refused(tmp_path):
    pytest.importorskip("h5py")
    path = write_tff(tmp_path / "stackoverflow.h5", {"ann": {"tokens": np.array([b"\xff\xfe"])}})
    with pytest.raises(DataError, match="tokens of client 'ann' that are no text"):
        read_stackexchange(path, min_words=1)


def test_real_posts(real_data, monkeypatch):
    if not (real_data / "stackexchange").is_dir():
        pytest.skip("no stackexchange/ in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build("stackexchange")
    assert f.n_clients > 400 and f.n_classes == 10_004
    assert f.classes[1] == "the"
    counted = f.train.y[f.train.y != IGNORED].bincount(minlength=f.n_classes)[1:10_001]
    assert (counted.diff() <= 0).all() and counted[-1] > 0
    few = build("stackexchange", clients=30, length=10, words=500)
    assert (few.n_clients, few.n_classes, few.train.x.shape[1]) == (30, 504, 10)
