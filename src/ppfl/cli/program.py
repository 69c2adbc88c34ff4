"""What to type to run this program again."""

import sys
from pathlib import Path


def program() -> str:
    """The command as it was typed, where a virtual environment is not on the path; else its name."""
    typed = Path(sys.argv[0])
    return str(typed) if typed.name == "ppfl" else "ppfl"
