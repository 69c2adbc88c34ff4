"""Texts as samples of next-token prediction: rows of one length, each with the same row moved by one token."""

from typing import Any, NamedTuple

import numpy as np

from ppfl.core.losses import IGNORED
from ppfl.data.arrays import Integers
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
