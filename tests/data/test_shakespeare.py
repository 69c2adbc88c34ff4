"""Next-character data by role: every character is predicted once, from the one before it, and padding never is."""

import numpy as np
import pytest
import torch

from kit.files import write_tff
from ppfl.core.errors import DataError, SettingError
from ppfl.core.losses import IGNORED, CrossEntropy
from ppfl.data import SHAKESPEARE_CHARACTERS, build, read_shakespeare
from ppfl.data.limits import limited
from ppfl.data.next_tokens import Vocabulary, next_token_rows

pytest.importorskip("h5py")
TRAIN = {"HAMLET": ["To be, or not to be", "Words, words, words."], "YORICK": ["Alas"], "GHOST": ["Adieu, adieu!"] * 3}
TEST = {"HAMLET": ["The rest is silence."], "GHOST": ["Swear."], "YORICK": ["Poor"]}


@pytest.fixture
def folder(tmp_path):
    for part, texts in (("train", TRAIN), ("test", TEST)):
        write_tff(tmp_path / f"shakespeare_{part}.h5", {role: {"snippets": lines} for role, lines in texts.items()})
    return tmp_path


def texts_of(samples, classes) -> list[str]:
    """The texts that the rows of a client were cut from."""
    targets = [classes[token] for row in samples.y.tolist() for token in row if token != IGNORED]
    return "".join(targets).split("<eos>")[:-1]


@pytest.mark.parametrize("length", [2, 4, 80])
def test_every_role_has_its_own_texts(folder, length):
    f = read_shakespeare(folder, length=length)
    assert (f.name, f.n_classes, f.train.x.dtype, f.train.x.shape[1:]) == ("shakespeare", 90, torch.int64, (length,))
    for role in TRAIN:
        assert texts_of(f.client(role)["train"], f.classes) == TRAIN[role]
        assert texts_of(f.client(role)["test"], f.classes) == TEST[role]


@pytest.mark.parametrize("length", [2, 7, 80])
def test_the_target_is_the_next_input_and_padding_is_no_target(folder, length):
    f = read_shakespeare(folder, length=length)
    for part in f.splits.values():
        real = part.y != IGNORED
        assert torch.equal(real, part.x != 0)
        assert real[:, 0].all()
        both = real[:, 1:]
        assert torch.equal(part.x[:, 1:][both], part.y[:, :-1][both])
        assert (real.long().diff(dim=1) <= 0).all()  # padding is at the end


def test_characters_have_the_numbers_of_tff(tmp_path):
    assert len(set(SHAKESPEARE_CHARACTERS)) == 86
    write_tff(tmp_path / "shakespeare_train.h5", {"ALL": {"snippets": [SHAKESPEARE_CHARACTERS, "}~"]}})
    f = read_shakespeare(tmp_path, length=90, test_fraction=0)
    assert f.train.x[0].tolist() == [88, *range(1, 87), 0, 0, 0]
    assert f.train.y[0].tolist() == [*range(1, 87), 89, *[IGNORED] * 3]
    assert f.train.y[1, :3].tolist() == [87, 87, 89]
    assert [f.classes[i] for i in (0, 87, 88, 89)] == ["<pad>", "<oov>", "<bos>", "<eos>"]


def test_roles_by_size_and_number(folder):
    assert set(read_shakespeare(folder, 4, min_samples=9).ids) == {"HAMLET", "GHOST"}
    few, more = (set(read_shakespeare(folder, clients=n).ids) for n in (1, 2))
    assert few < more < set(TRAIN)
    with pytest.raises(DataError, match="0 of 3 clients have at least 100 samples; expected 1 or more"):
        read_shakespeare(folder, min_samples=100)


def test_one_file_is_split_by_seed(folder):
    path = folder / "shakespeare_train.h5"
    first, again, other = (read_shakespeare(path, 3, seed=seed, test_fraction=0.4) for seed in (0, 0, 1))
    assert torch.equal(first.test.x, again.test.x)
    assert not torch.equal(first.test.x, other.test.x)
    whole = read_shakespeare(path, 3, test_fraction=0)
    for role in TRAIN:
        rows = sum(len(part) for part in first.client(role).values())
        assert rows == len(whole.client(role)["train"])


def test_settings_of_an_experiment_file(folder):
    f = build("shakespeare", base=folder.parent, folder=folder.name, length=5, min_samples=3, clients=1)
    assert (f.n_clients, f.train.x.shape[1]) == (1, 5)
    with pytest.raises(DataError, match=r"no shakespeare_train.h5 in .*nowhere"):
        build("shakespeare", folder=folder / "nowhere")
    with pytest.raises(SettingError, match="length is 1; expected 2 tokens or more"):
        build("shakespeare", folder=folder, length=1)
    with limited(features=10), pytest.raises(DataError, match="a row has 80 tokens, more than the limit"):
        build("shakespeare", folder=folder)
    with pytest.raises(DataError, match="more than the limit"):
        build("shakespeare", folder=folder, length=10**9)


def test_padding_is_never_scored(folder):
    f = read_shakespeare(folder, length=30)
    outputs = torch.randn(len(f.train), 30, f.n_classes, generator=torch.Generator().manual_seed(0))
    changed = torch.where((f.train.y == IGNORED)[..., None], 100 * outputs, outputs)
    assert (f.train.y == IGNORED).any(1).all()
    assert torch.equal(CrossEntropy().per_sample(outputs, f.train.y), CrossEntropy().per_sample(changed, f.train.y))


def test_texts_that_are_no_texts_are_refused(tmp_path):
    path = write_tff(tmp_path / "a.h5", {"HAMLET": {"snippets": np.zeros(3)}})
    with pytest.raises(DataError, match="'snippets' of client 'HAMLET' is float64"):
        read_shakespeare(path)


def test_rows_agree_with_a_loop_over_texts():
    rng, words = np.random.default_rng(0), Vocabulary(tuple("abcdefgh"))
    for length in (2, 5, 30):
        texts = [rng.integers(1, 9, size).tolist() for size in (1, 4, 5, 6, 29, 30, 31, 2)]
        x, y, owner = [], [], []
        for at, text in enumerate(texts):
            whole = [words.bos, *text, words.eos]
            for start in range(0, len(whole) - 1, length):
                inputs, targets = whole[:-1][start : start + length], whole[1:][start : start + length]
                x.append(inputs + [0] * (length - len(inputs)))
                y.append(targets + [IGNORED] * (length - len(targets)))
                owner.append(at)
        rows = next_token_rows(np.concatenate(texts), [len(text) for text in texts], length, words)
        assert (rows.x.tolist(), rows.y.tolist(), rows.text.tolist()) == (x, y, owner)


def test_real_plays(real_data, monkeypatch):
    if not (real_data / "shakespeare").is_dir():
        pytest.skip("no shakespeare/ in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build("shakespeare")
    assert (f.n_clients, f.n_classes) == (715, 90)
    assert "Yonder comes my master, your brother." in texts_of(
        f.client("ALL_S_WELL_THAT_ENDS_WELL_ADAM")["train"], f.classes
    )
    unknown = f.classes.index("<oov>")
    assert float((f.train.y == unknown).sum()) < 1e-5 * float((f.train.y != IGNORED).sum())
