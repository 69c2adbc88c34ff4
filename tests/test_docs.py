"""The code in docs/extending.md and docs/data.md runs as it stands, from the first block to the last."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = re.split(r"^## ", (DOCS / "extending.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_the_code_of_a_section_runs(section: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), names)
    fitted = names["fitted"]
    assert len(fitted.history) == 5 and fitted.memberships.shape[0] == len(fitted.ids)


def test_the_code_about_data_runs() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "data.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), names)
    assert "in a file" in names["federation"].describe()
