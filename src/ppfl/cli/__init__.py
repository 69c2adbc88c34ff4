"""The command line: parse, call, print. Typer and rich are used here and nowhere else."""

from .app import main

__all__ = ["main"]
