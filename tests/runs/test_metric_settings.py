"""Metrics that an experiment file names, from modules beside it."""

import pytest

from ppfl.core import SettingError
from ppfl.runs import load_experiment, run
from ppfl.runs.comparison import load_comparison

FILE = """
rounds = 2
[data]
name = "synthetic_groups"
n_clients = 6
groups = 2
dim = 3
samples = 9
test_points = 4
[model]
name = "linear"
[population]
k = 2
[algorithm]
name = "ppfl"
lr = 0.3
[watch]
metrics = METRICS
"""
MODULE = "def share_right(prediction, target):\n    return (prediction.argmax(-1) == target).float().mean()\n"


def write(tmp_path, metrics, module="metrics_beside_the_file"):
    (tmp_path / f"{module}.py").write_text(MODULE)
    file = tmp_path / "small.toml"
    file.write_text(FILE.replace("METRICS", metrics))
    return file


def test_a_metric_beside_the_experiment_file_is_recorded(tmp_path):
    file = write(tmp_path, '["metrics_beside_the_file:share_right"]')
    (record,) = run(load_experiment(file), tmp_path / "out", base=tmp_path)
    assert record.metric == "accuracy"  # the loss's own stays the first
    for figure in ("", "_mean", "_worst_tenth"):
        assert record.scores[f"share_right{figure}"] == pytest.approx(record.scores[f"accuracy{figure}"])


def test_a_comparison_finds_it_too(tmp_path):
    file = write(tmp_path, '["metrics_of_a_comparison:share_right"]', "metrics_of_a_comparison")
    (experiment,) = load_comparison(file).values()
    assert list(experiment.watch.build(tmp_path).known_metrics) == ["share_right"]


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("f1", "watch.metrics.0 is 'f1'"),
        ("no_such_module:f1", "there is no module.*the folder of the experiment file"),
        ("math:no_such_name", "has no 'no_such_name'"),
        ("torchmetrics:F1Score", "class that needs arguments"),
    ],
)
def test_a_metric_that_is_not_there_is_an_error_of_one_line(tmp_path, metric, words):
    with pytest.raises(SettingError, match=words) as error:
        load_experiment(write(tmp_path, f'["{metric}"]')).watch.build(tmp_path)
    assert "\n" not in str(error.value)
