"""A finished run folder is a fitted population: it predicts as the run did, without the data."""

from pathlib import Path

import pytest
import torch

from kit.experiments import small_experiment
from ppfl.core.errors import CheckpointError
from ppfl.data import Federation
from ppfl.fitted import load
from ppfl.runs import RunFolder, load_run, run
from ppfl.runs.run import read_data
from ppfl.runs.storage import read_json, write_json

METHODS = {
    "ppfl": {"algorithm": {"name": "ppfl", "lr": 0.3}, "population": {"k": 2, "mix": "predictions"}},
    "best": {"watch": {"output": "best"}, "population": {"k": 2, "mix": "weights"}},
    "private": {"algorithm": {"name": "ppfl", "lr": 0.3, "share_memberships": False}},
    "ditto": {"algorithm": {"name": "ditto", "lr": 0.3}, "population": {"k": 1}},
    "finetune": {
        "algorithm": {"name": "finetune", "method": {"name": "fedavg", "lr": 0.3}},
        "population": {"k": 1},
        "model": {"name": "perceptron", "hidden": [4, 3]},
    },
    "newcomers": {"newcomers": 0.4, "engine": "loop"},
    "auto": {"algorithm": {"name": "ppfl"}, "seeds": [3]},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_folder_scores_as_the_run_did(name: str, tmp_path: Path) -> None:
    experiment = small_experiment(**METHODS[name])
    (record,) = run(experiment, tmp_path)
    fitted = load(record.folder)
    assert fitted.ids == record.ids and len(fitted.history) == experiment.rounds
    found = fitted.evaluate(read_data(experiment, None).select(record.ids))
    assert found.pooled == pytest.approx(record.scores[record.metric])
    assert [round(float(s), 6) for s in found.score] == record.scores["per_client"]
    if record.memberships is not None:
        assert torch.equal(fitted.memberships, record.memberships)


def test_images_are_loaded_too(tmp_path: Path) -> None:
    images = Federation.from_arrays(torch.rand(40, 1, 8, 8), list(range(10)) * 4, ["a", "b", "c", "d"] * 10)
    experiment = small_experiment(model={"name": "cnn", "channels": [4]}, rounds=1)
    (record,) = run(experiment, tmp_path, read=lambda *_: images)
    fitted = load(tmp_path)  # the only run there
    assert fitted.kind.shape == (1, 8, 8) and fitted.kind.n_classes == 10
    assert fitted.predict(record.ids[0], torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_run_that_is_not_finished_or_not_one_is_refused(tmp_path: Path) -> None:
    run(small_experiment(seeds=[0, 1]), tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"has 2 runs; give the folder of one.*seed-0"):
        load(tmp_path / "two")
    folder = RunFolder(tmp_path / "two" / "seed-0")
    before = read_json(folder.clients_file)
    write_json(folder.clients_file, {key: value for key, value in before.items() if key != "kind"})
    load_run(folder.path)  # older runs can still be shown
    with pytest.raises(CheckpointError, match="does not say what a sample is"):
        load(folder.path)
    folder = RunFolder(tmp_path / "two" / "seed-1")
    folder.result_file.unlink()
    with pytest.raises(CheckpointError, match="not finished; finish it with"):
        load(folder.path)


def test_a_run_of_an_older_ppfl_can_be_resumed(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(_seed, end) -> None:
        if end.state.round == 4:
            raise StopError

    with pytest.raises(StopError):
        run(small_experiment(), tmp_path, checkpoint_every=2, on_round_end=stop)
    folder = RunFolder(tmp_path / "seed-0")
    clients = read_json(folder.clients_file)
    write_json(folder.clients_file, {key: value for key, value in clients.items() if key != "kind"})
    (record,) = run(small_experiment(), tmp_path, resume=True)
    assert record.finished
