"""Texts as rows of tokens, each with the next tokens, and Shakespeare's plays in the files of TFF by role."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ppfl.core.losses import IGNORED
from ppfl.core.settings import Count
from ppfl.data import Pool
from ppfl.data.arrays import Integers
from ppfl.data.datasets.client_files import choose_clients, find_files, open_tff
from ppfl.data.files import check_limit
from ppfl.errors import SettingError


class Vocabulary(NamedTuple):
    """Tokens by number, as TFF numbers them: 0 is padding, then the words, out of vocabulary, begin and end of text.

    >>> letters = Vocabulary(("a", "b"))
    >>> letters.oov, letters.bos, letters.eos, letters.names[:3]
    (3, 4, 5, ('<pad>', 'a', 'b'))
    """

    words: tuple[str, ...]

    @property
    def oov(self) -> int:
        """The token of every word that is not in the vocabulary."""
        return len(self.words) + 1

    @property
    def bos(self) -> int:
        """The token before the first word of a text."""
        return len(self.words) + 2

    @property
    def eos(self) -> int:
        """The token after the last word of a text."""
        return len(self.words) + 3

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tokens; these are the classes of the federation."""
        return ("<pad>", *self.words, "<oov>", "<bos>", "<eos>")


class TokenRows(NamedTuple):
    """Samples of next-token prediction."""

    x: Integers  # (n, length) tokens, 0 after the end of a text
    y: Integers  # (n, length) the token that follows, IGNORED after the end of a text
    text: Integers  # (n,) position of the text that a row is from


def next_token_rows(tokens: Any, sizes: Any, length: int, vocabulary: Vocabulary) -> TokenRows:
    """Cut texts into rows of `length`, so that every token of a text, and its end, is predicted exactly once.

    `tokens` holds all texts one after the other, and `sizes` the number of tokens of each.

    >>> rows = next_token_rows([1, 2, 1, 2], [3, 1], length=3, vocabulary=Vocabulary(("a", "b")))
    >>> rows.x.tolist(), rows.text.tolist()
    ([[4, 1, 2], [1, 0, 0], [4, 2, 0]], [0, 0, 1])
    >>> rows.y.tolist()
    [[1, 2, 1], [5, -100, -100], [2, 5, -100]]
    """
    sizes = np.asarray(sizes, np.int64)
    ends = np.cumsum(sizes + 2) - 1
    starts = ends - sizes - 1
    whole = np.zeros(len(tokens) + 2 * len(sizes), np.int64)
    whole[starts], whole[ends] = vocabulary.bos, vocabulary.eos
    inside = np.ones(len(whole), dtype=bool)
    inside[starts] = inside[ends] = False
    whole[inside] = tokens

    counts = row_counts(sizes, length)
    total = int(counts.sum())
    size = 2 * 8 * total * length
    check_limit("features", length, f"a row has {length:,} tokens", "set a smaller length, or ")
    check_limit("bytes", size, f"{total:,} rows of {length} tokens take {size:,} bytes", "take fewer clients, or ")
    text = np.repeat(np.arange(len(sizes)), counts)
    first = starts[text] + length * (np.arange(total) - (np.cumsum(counts) - counts)[text])
    at = first[:, None] + np.arange(length)
    real = at < ends[text, None]
    at[~real] = 0
    return TokenRows(np.where(real, whole[at], 0), np.where(real, whole[at + 1], IGNORED), text)


def row_counts(sizes: Integers, length: int) -> Integers:
    """Number of rows of texts with so many tokens; the end of a text is a token more to predict.

    >>> row_counts(np.array([2, 3]), length=3)
    array([1, 2])
    """
    if length < 2:
        raise SettingError(f"length is {length}; expected 2 tokens or more, such as 20")
    return -(-(sizes + 1) // length)


# the 86 characters, in the order in which TFF numbers them from 1
SHAKESPEARE_CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
_VOCABULARY = Vocabulary(tuple(SHAKESPEARE_CHARACTERS))
_TOKEN_OF_BYTE = np.full(256, _VOCABULARY.oov, np.int64)
_TOKEN_OF_BYTE[list(SHAKESPEARE_CHARACTERS.encode())] = np.arange(1, 1 + len(SHAKESPEARE_CHARACTERS))


def read(
    folder: Path | None = None,
    file: Path | None = None,
    length: Count = 80,
    min_samples: Count = 1,
    clients: Count | None = None,
    seed: int = 0,
) -> Pool:
    """Shakespeare by role: x are `length` characters as tokens, and y is the next character after each of them.

    A text begins with the token bos and ends with eos, and is cut into rows; y is -100 after its end. There are 90
    classes: pad, 86 characters, oov (any other character), bos and eos.

    Args:
        folder: A folder with `shakespeare_train.h5` and `shakespeare_test.h5` of TFF. By default the folder
            shakespeare/ in PPFL_DATA.
        file: One such file, in the place of a folder.
        length: Number of characters in a row.
        min_samples: Roles with fewer rows, test rows included, are left out.
        clients: Number of the other roles that are taken at random; None: all.
        seed: Seeds the choice of roles.

    >>> read(Path("no such folder"))
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no shakespeare_train.h5 in no such folder; ...
    """
    patterns = [("shakespeare_train.h5", "shakespeare_test.h5")]
    files = find_files("shakespeare", file, folder, patterns, "shakespeare_train.h5")
    texts: dict[str, list[tuple[bytes, bool | None]]] = {}
    with ExitStack() as stack:
        parts = [(stack.enter_context(open_tff(path)), is_test) for path, is_test in files]

        def size_of(role: str) -> int:
            read = [(part.read(role, "snippets", "S"), is_test) for part, is_test in parts if role in part.clients]
            found = [(text, is_test) for snippets, is_test in read for text in snippets.tolist() if text]
            rows = int(row_counts(_lengths(text for text, _ in found), length).sum())
            if rows >= min_samples:
                texts[role] = found
            return rows

        chosen = choose_clients([*parts[0][0].clients], size_of, min_samples, clients, seed, "samples")
    pairs = [pair for role in chosen for pair in texts[role]]
    characters = np.frombuffer(b"".join(text for text, _ in pairs), np.uint8)
    rows = next_token_rows(_TOKEN_OF_BYTE[characters], _lengths(text for text, _ in pairs), length, _VOCABULARY)
    roles = np.repeat(np.array(chosen, dtype=object), [len(texts[role]) for role in chosen])
    is_test = None if pairs[0][1] is None else np.array([is_test for _, is_test in pairs])[rows.text]
    return Pool(torch.from_numpy(rows.x), rows.y, roles[rows.text], is_test, "shakespeare", _VOCABULARY.names)


def _lengths(texts: Iterable[bytes]) -> Integers:
    return np.fromiter(map(len, texts), np.int64)
