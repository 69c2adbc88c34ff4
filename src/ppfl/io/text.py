"""Text from outside, such as client ids, labels and file names, made safe to show."""

import re

# Controls (C0, DEL, C1), line separators, marks and overrides of the writing direction, invisible joints, halves of
# surrogate pairs and what is no character: terminals obey some of them, XML allows few, and nobody sees any.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff"
    "\U000e0000-\U000e007f]"
)


def visible(text: object) -> str:
    r"""Any value as one line of text, with what cannot be seen written as in Python.

    >>> print(visible("a\x1b[31mb\nc"))
    a\x1b[31mb\nc
    """
    return _INVISIBLE.sub(lambda found: repr(found[0])[1:-1], str(text))
