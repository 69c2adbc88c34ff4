"""What is stored comes back with the same bits, or is refused; a write that fails leaves the old file."""

import os
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ppfl.core import CheckpointError, WriteError
from ppfl.core.trees import named_leaves
from ppfl.runs.storage import read_tensors, restore, save_tree, write_json, write_toml


class Server(NamedTuple):
    shared: dict[str, torch.Tensor]
    memberships: torch.Tensor


def make_tree() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=generator)
    return {
        "server": Server({"0.weight": weight, "again": weight}, torch.full((2, 3), 1 / 3)),  # shared memory
        "clients": {
            "spread": weight.expand(5, 3, 4),
            "turned": torch.randn(2, 3, generator=generator).T,
            "counts": torch.arange(4),
            "exact": torch.randn(3, generator=generator, dtype=torch.float64),
            "nothing": {},
        },
    }


def load(path: Path, template: object) -> object:
    return restore(path, read_tensors(path)[0], template)


def test_a_tree_comes_back_with_the_same_bits(tmp_path):
    tree, path = make_tree(), tmp_path / "tree.safetensors"
    save_tree(path, tree, {"round": 3})
    back = load(path, make_tree())
    assert isinstance(back["server"], Server)
    assert back["clients"]["nothing"] == {}
    for name, leaf in named_leaves(tree).items():
        assert torch.equal(named_leaves(back)[name], leaf)
    assert read_tensors(path)[1] == {"round": 3}
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_as_open_as_their_folder(tmp_path):
    tmp_path.chmod(0o750)
    save_tree(tmp_path / "tree.safetensors", make_tree(), {})
    assert (tmp_path / "tree.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "tree.safetensors"
    save_tree(path, make_tree(), {})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="tree.safetensors cannot be read"):
            read_tensors(path)
        assert path.read_bytes() == whole[:length]


def test_a_file_of_another_writer_is_refused(tmp_path):
    path = tmp_path / "tree.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="there is no"):
        read_tensors(tmp_path / "nowhere.safetensors")


BAD = {
    "lacks tensor 'b'": {"a": torch.zeros(2)},
    "unknown tensor 'c'": {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)},
    r"has 'b' as torch.float32 \(4,\), expected torch.float32 \(3,\)": {"a": torch.zeros(2), "b": torch.zeros(4)},
    "has 'b' as torch.float64": {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.float64)},
    "values in 'b' that are not finite": {"a": torch.zeros(2), "b": torch.tensor([0, torch.nan, 1])},
}


@pytest.mark.parametrize("fault", BAD)
def test_what_does_not_fit_is_refused_by_name(tmp_path, fault):
    path = tmp_path / "tree.safetensors"
    save_tree(path, BAD[fault], {})
    with pytest.raises(CheckpointError, match=fault):
        load(path, {"a": torch.zeros(2), "b": torch.zeros(3)})


def test_memberships_off_the_simplex_are_refused(tmp_path):
    path = tmp_path / "tree.safetensors"
    save_tree(path, {"server": {"memberships": torch.tensor([[0.5, 0.4]])}}, {})
    with pytest.raises(CheckpointError, match=r"server.memberships\[0\].*a sum of 1"):
        read_tensors(path)


def test_only_tensors_with_names_of_their_own_are_stored(tmp_path):
    with pytest.raises(AttributeError):
        save_tree(tmp_path / "tree.safetensors", {"a": 3}, {})
    with pytest.raises(TypeError, match="two leaves share a name"):
        save_tree(tmp_path / "tree.safetensors", {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, {})
    assert list(tmp_path.iterdir()) == []


KEYS, VALUES = st.text(min_size=1, max_size=5), st.integers(-9, 9) | st.booleans() | st.text(max_size=5)
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=3), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=5
)


@given(settings=TABLES)
def test_settings_survive_a_round_trip_through_toml(tmp_path_factory, settings: dict) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    write_toml(path, settings)
    assert tomllib.loads(path.read_text(encoding="utf-8")) == settings


def test_toml_keeps_infinity_and_lists_of_tables_and_leaves_out_none(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    kept = {"limit": float("inf"), "methods": [{"lr": 0.1}, {"lr": float("-inf"), "seeds": [0, 1]}]}
    write_toml(path, {**kept, "path": None, "methods": [{**kept["methods"][0], "path": None}, kept["methods"][1]]})
    assert tomllib.loads(path.read_text(encoding="utf-8")) == kept


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    tree, text = tmp_path / "tree.safetensors", tmp_path / "a.json"
    save_tree(tree, {"a": torch.zeros(2)}, {})
    write_json(text, {"a": 1})
    before = tree.read_bytes(), text.read_bytes()

    def fail(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match="tree.safetensors cannot be written .No space"):
        save_tree(tree, {"a": torch.ones(2)}, {})
    with pytest.raises(WriteError, match="a.json cannot be written .No space"):
        write_json(text, {"a": 2})
    assert (tree.read_bytes(), text.read_bytes()) == before
