"""The code in docs/extending.md runs as it stands, from the first block to the last."""

import re
from pathlib import Path

import pytest

from ppfl.runs import run
from ppfl.runs.load import load_experiment

DOCS = Path(__file__).parents[1] / "docs"
PARTS = re.split(r"^## ", (DOCS / "extending.md").read_text(), flags=re.MULTILINE)[1:]
FILES = [part for part in PARTS if "```toml" in part]
SECTIONS = [part for part in PARTS if part not in FILES]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_the_code_of_a_section_runs(section: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), names)
    fitted = names["fitted"]
    assert len(fitted.history) == 5 and fitted.memberships.shape[0] == len(fitted.ids)


def test_the_experiment_file_with_factories_runs(tmp_path: Path) -> None:
    (section,) = FILES
    ((toml,), (module,)) = (
        re.findall(rf"```{kind}\n(.*?)```", section, flags=re.DOTALL) for kind in ("toml", "python")
    )
    lines = [f"shop-{at % 4},{at % 3},{at % 5},{at % 7}" for at in range(60)]
    for name, text in (("mine.toml", toml), ("shops.py", module), ("reviews.txt", "\n".join(lines))):
        (tmp_path / name).write_text(text)
    experiment = load_experiment(tmp_path / "mine.toml", ["rounds=2", "algorithm.lr=0.1"])
    (record,) = run(experiment, tmp_path / "out", base=tmp_path)
    assert record.finished
