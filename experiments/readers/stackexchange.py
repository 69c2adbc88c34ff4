"""Questions and answers of Stack Exchange and StackOverflow: every user is a client, the next word is predicted."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ppfl.core.losses import IGNORED
from ppfl.core.settings import Count
from ppfl.data import Pool
from ppfl.data.arrays import Integers
from ppfl.data.datasets.client_files import Files, choose_clients, find_files, open_tff
from ppfl.data.files import check_limit, open_bounded, reading

from .shakespeare import TokenRows, Vocabulary, next_token_rows

_PATTERNS = (("posts.jsonl*", ""), ("stackoverflow_train.h5", "stackoverflow_test.h5"), ("stackoverflow.h5", ""))
_FIELDS = ("user", "date", "text")
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_Choose = Callable[[Sequence[str], Callable[[str], int]], list[str]]


class _UserTexts(NamedTuple):
    words: Integers  # (n,) numbers of the words of all texts, one text after the other
    sizes: Integers  # (texts,)
    is_test: Integers  # (texts,) 1 for texts of a test file


class _Numbers(dict[str, int]):
    """Numbers words from 1, in the order in which they are first seen."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self) + 1
        return number

    def of_texts(self, texts: Iterable[tuple[list[str], bool]]) -> _UserTexts:
        kept = [(words, is_test) for words, is_test in texts if words]
        flat = np.fromiter((self[word] for words, _ in kept for word in words), np.int64)
        sizes, marks = zip(*((len(words), is_test) for words, is_test in kept), strict=True) if kept else ((), ())
        return _UserTexts(flat, np.array(sizes, np.int64), np.array(marks, np.int64))


def read(
    folder: Path | None = None,
    file: Path | None = None,
    length: Count = 20,
    words: Count = 10_000,
    min_words: Count = 500,
    clients: Count | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Pool:
    r"""Posts by user: x are `length` words as tokens, and y is the next word after each of them.

    A file, or one in the folder: posts.jsonl (may be compressed), one JSON object per line with the texts `user`,
    `date` and `text`, and optionally `site`; or stackoverflow_train.h5 of TFF, optionally with stackoverflow_test.h5.
    By default the folder is stackexchange/ in PPFL_DATA. A post begins with the token bos and ends with eos, and is cut
    into rows; y is -100 after its end.

    The latest posts of every user are its test part, unless the source has a test file: whole posts, with about
    `test_fraction` of its rows. A user with one post has no test part. The vocabulary is the most frequent `words` of
    the training part of all users; other words are oov. Users with fewer than `min_words` words, test part included,
    are left out; `clients` takes so many of the others at random. In posts.jsonl a word is a run of letters and digits,
    so that "well-known" is two words and "don't" is one; TFF has its words apart already.

    >>> from tempfile import TemporaryDirectory
    >>> posts = [{"user": name, "date": "2024-01-01", "text": "To be, or not to be"} for name in ("ann", "bob")]
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "posts.jsonl").write_text("\n".join(map(json.dumps, posts)))
    ...     f = read(Path(folder), length=4, min_words=6, test_fraction=0).federation()
    >>> f.train.client(0).x.tolist(), f.classes
    ([[6, 2, 1, 4], [3, 2, 1, 0]], ('<pad>', 'be', 'to', 'not', 'or', '<oov>', '<bos>', '<eos>'))
    """
    files = find_files("stackexchange", file, folder, _PATTERNS, "posts.jsonl or stackoverflow_train.h5")
    read = _from_tff if files[0][0].suffix.lower() in (".h5", ".hdf5") else _from_posts
    numbers = _Numbers()
    users = read(files, numbers, lambda names, size: choose_clients(names, size, min_words, clients, seed, "words"))
    texts = _UserTexts(*(np.concatenate(parts) for parts in zip(*users.values(), strict=True)))
    rows = next_token_rows(texts.words, texts.sizes, length, all_words := Vocabulary(tuple(numbers)))
    user_of_text = np.repeat(np.arange(len(users)), [len(each.sizes) for each in users.values()])
    user = user_of_text[rows.text]
    has_test = files[0][1] is not None
    is_test = (texts.is_test if has_test else _latest(user_of_text, np.bincount(rows.text), test_fraction))[rows.text]
    rows, vocabulary = _with_frequent_words(rows, is_test == 0, all_words, words)
    ids = np.array([*users], dtype=object)[user]
    return Pool(torch.from_numpy(rows.x), rows.y, ids, is_test, "stackexchange", vocabulary.names)


def _from_posts(files: Files, numbers: _Numbers, choose: _Choose) -> dict[str, _UserTexts]:
    posts: dict[str, list[tuple[str, str]]] = {}
    for path, _ in files:
        remedy = "write one JSON object per line, with user, date and text"
        with reading(path, "is not a file of posts", remedy), open_bounded(path) as file:
            for at, line in enumerate(file, 1):
                if not line.strip():
                    continue
                post: dict[str, str] = json.loads(line)
                if not isinstance(post, dict) or not all(type(post.get(key)) is str for key in _FIELDS):
                    raise ValueError(f"line {at} has no text for {', '.join(_FIELDS)}")
                user = f"{post['site']}/{post['user']}" if "site" in post else post["user"]
                posts.setdefault(user, []).append((post["date"], post["text"]))

    def texts_of(user: str) -> list[tuple[list[str], bool]]:
        return [(_WORD.findall(text.lower()), False) for _, text in sorted(posts[user])]

    return _chosen_texts([*posts], texts_of, numbers, choose)


def _from_tff(files: Files, numbers: _Numbers, choose: _Choose) -> dict[str, _UserTexts]:
    with ExitStack() as stack:
        parts = [(stack.enter_context(open_tff(path)), is_test) for path, is_test in files]

        def texts_of(user: str) -> list[tuple[list[str], bool]]:
            found = []
            for part, is_test in (each for each in parts if user in each[0].clients):
                with reading(part.path, f"has tokens of client {user!r} that are no text", "download it again"):
                    texts = part.read(user, "tokens", "S").tolist()
                    found += [(text.decode().split(), bool(is_test)) for text in texts]
            return found

        return _chosen_texts([*parts[0][0].clients], texts_of, numbers, choose)


def _chosen_texts(
    names: list[str], texts_of: Callable[[str], list[tuple[list[str], bool]]], numbers: _Numbers, choose: _Choose
) -> dict[str, _UserTexts]:
    found: dict[str, _UserTexts] = {}

    def size_of(user: str) -> int:
        found[user] = numbers.of_texts(texts_of(user))
        return len(found[user].words)

    return {user: found[user] for user in choose(names, size_of)}


def _latest(users: Integers, sizes: Integers, fraction: float) -> Integers:
    """A mark (texts,) of each user's last texts that together have about `fraction` of its rows.

    At least one text is marked if the fraction is above 0, but never all. `users` and `sizes` are each text's user and
    number of rows; texts of a user are neighbours.

    >>> _latest(np.array([0, 0, 0, 1]), np.array([6, 3, 1, 9]), fraction=0.4).tolist()
    [0, 1, 1, 0]
    """
    marks = np.zeros(len(users), np.int64)
    bounds = np.flatnonzero(np.diff(users, prepend=-1, append=-1))
    for first, end in pairwise(bounds.tolist()):
        held = np.cumsum(sizes[first:end][::-1])  # rows in the last text, in the last two, ...
        if fraction > 0 and len(held) > 1:
            nearest = int(np.abs(held[:-1] - fraction * held[-1]).argmin())
            marks[end - 1 - nearest : end] = 1
    return marks


def _with_frequent_words(
    rows: TokenRows, is_train: np.ndarray[Any, Any], every: Vocabulary, words: int
) -> tuple[TokenRows, Vocabulary]:
    """The same rows with the numbers of a vocabulary of the most frequent words; of equal ones, the first by name."""
    targets = rows.y[is_train]
    counts = np.bincount(targets[targets != IGNORED], minlength=len(every.names))[1 : every.oov].tolist()
    ranked = sorted((-count, word, at) for at, (count, word) in enumerate(zip(counts, every.words, strict=True), 1))
    frequent = [(word, at) for count, word, at in ranked[:words] if count]
    found = Vocabulary(tuple(word for word, _ in frequent))
    check_limit("classes", len(found.names), f"there are {len(found.names):,} words", "set fewer words, or ")
    new = np.full(len(every.names), found.oov, np.int64)
    new[[at for _, at in frequent]] = np.arange(1, found.oov)
    new[[0, every.bos, every.eos]] = 0, found.bos, found.eos
    y = np.where(rows.y == IGNORED, IGNORED, new[np.maximum(rows.y, 0)])
    return TokenRows(new[rows.x], y, rows.text), found
