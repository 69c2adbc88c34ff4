"""`ppfl export`: the file holds the client's model, and a run folder needs no data to give it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ppfl.fitted import load


@pytest.fixture
def finished(ppfl, experiment: Path, tmp_path: Path) -> Path:
    assert ppfl("run", experiment, "--out", tmp_path / "runs", "-q").code == 0
    return tmp_path / "runs" / "seed-0"


def test_weights_are_those_of_the_clients_model(ppfl, finished: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = load(finished).ids[1]
    done = ppfl("export", finished, "--client", client)
    assert done.code == 0 and f"{client}.safetensors" in done.out and not done.err
    model = load(finished).model(client)
    found = load_file(tmp_path / f"{client}.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert found.keys() == model.state_dict().keys()
    again = ppfl("export", finished.parent, "--client", client)
    assert again.code == 2 and "exists; choose another --out" in again.err


def test_onnx(ppfl, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    fitted = load(finished)
    done = ppfl("export", finished, "--client", fitted.ids[0], "--onnx", "--out", tmp_path / "model.onnx")
    assert done.code == 0 and done.out.count("\n") == 1, done
    x = torch.randn(3, *fitted.kind.shape)
    (found,) = runtime.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), fitted.predict(fitted.ids[0], x), rtol=0, atol=1e-6)


def test_errors_are_one_line(ppfl, finished: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ((finished, "--client", "nobody"), "no client 'nobody'"),
        ((tmp_path / "nowhere", "--client", "a"), "there is no"),
        ((tmp_path, "--client", "a"), "no run in"),
    ):
        done = ppfl("export", *arguments, "--out", tmp_path / "out")
        assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    client = load(finished).ids[0]
    done = ppfl("export", finished, "--client", client, "--out", tmp_path / "a" / "b" / "out")
    assert done.code == 2 and done.err.count("\n") == 1
