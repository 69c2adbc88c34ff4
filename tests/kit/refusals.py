"""Bad input ends in one error that says what was found and what to do."""

from collections.abc import Callable

import pytest

from ppfl.errors import AffinityError, CheckpointError, DataError, ModelError, PPFLError, SettingError, WriteError

__all__ = ["AffinityError", "CheckpointError", "DataError", "ModelError", "PPFLError", "SettingError", "WriteError"]


def assert_refused(call: Callable[[], object], error: type[Exception], *words: str) -> None:
    """`call` raises this class, with one line that has these words.

    The words are what a user needs: the name that was found, or the remedy. The rest of the sentence may change.
    """
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message, f"more than one line: {message}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
