"""Shakespeare's plays in the files of TFF: every role is a client, and the next character is predicted."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppfl.data.arrays import Integers
from ppfl.data.client_files import choose_clients, find_files
from ppfl.data.federation import Federation
from ppfl.data.next_tokens import Vocabulary, next_token_rows, row_counts
from ppfl.data.readers import Pool
from ppfl.data.tff_files import open_tff

# the 86 characters, in the order in which TFF numbers them from 1
SHAKESPEARE_CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
_VOCABULARY = Vocabulary(tuple(SHAKESPEARE_CHARACTERS))
_TOKEN_OF_BYTE = np.full(256, _VOCABULARY.oov, np.int64)
_TOKEN_OF_BYTE[list(SHAKESPEARE_CHARACTERS.encode())] = np.arange(1, 1 + len(SHAKESPEARE_CHARACTERS))


def read_shakespeare(
    path: str | Path,
    length: int = 80,
    min_samples: int = 1,
    clients: int | None = None,
    seed: int = 0,
    **split: Any,
) -> Federation:
    """Shakespeare by role: x are `length` characters as tokens, and y is the next character after each of them.

    `path` is a folder with `shakespeare_train.h5` and `shakespeare_test.h5` of TFF, or one such file, of which
    `test_fraction` is held out. A text begins with the token bos and ends with eos, and is cut into rows; y is -100
    after its end. Roles with fewer than `min_samples` rows, test rows included, are left out; `clients` takes so many
    of the others at random. There are 90 classes: pad, 86 characters, oov (any other character), bos and eos.

    >>> read_shakespeare("no such folder")
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no shakespeare_train.h5 in no such folder; ...
    """
    files = find_files(path, [("shakespeare_train.h5", "shakespeare_test.h5")], "shakespeare_train.h5")
    texts: dict[str, list[tuple[bytes, bool]]] = {}
    with ExitStack() as stack:
        parts = [(stack.enter_context(open_tff(file)), is_test) for file, is_test in files.marked()]

        def size_of(role: str) -> int:
            found = [(text, is_test) for part, is_test in parts for text in part.texts(role, "snippets") if text]
            rows = int(row_counts(_lengths(text for text, _ in found), length).sum())
            if rows >= min_samples:
                texts[role] = found
            return rows

        chosen = choose_clients([*parts[0][0].clients], size_of, min_samples, clients, seed, "samples")
    pairs = [pair for role in chosen for pair in texts[role]]
    characters = np.frombuffer(b"".join(text for text, _ in pairs), np.uint8)
    rows = next_token_rows(_TOKEN_OF_BYTE[characters], _lengths(text for text, _ in pairs), length, _VOCABULARY)
    roles = np.repeat(np.array(chosen, dtype=object), [len(texts[role]) for role in chosen])
    is_test = np.array([is_test for _, is_test in pairs])[rows.text] if files.test else None
    pool = Pool(torch.from_numpy(rows.x), rows.y, roles[rows.text], is_test)
    return pool.federation(seed=seed, classes=_VOCABULARY.names, **{"name": "shakespeare", **split})


def _lengths(texts: Iterable[bytes]) -> Integers:
    return np.fromiter(map(len, texts), np.int64)
