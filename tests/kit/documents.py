"""Code in documents, and the files that they show."""

import re

import torch

from ppfl.runs.comparison import load_comparison as methods_of

__all__ = ["blocks", "methods_of", "run_blocks"]


def blocks(text: str, language: str = "python") -> list[str]:
    """All blocks of code of a page of Markdown, at least one."""
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found


def run_blocks(*code: str, **names: object) -> dict[str, object]:
    """Run blocks of Python one after the other, and return what they define."""
    with torch.random.fork_rng(devices=[]):
        for block in code:
            exec(compile(block, "a block of the docs", "exec"), names)
    return names
