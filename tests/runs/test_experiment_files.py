"""An experiment file is read as it is written, or refused in one line that says what to change."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kit.experiments import TEXT as GROUPS
from kit.experiments import memory_limit, small_experiment, write_experiment
from kit.refusals import AffinityError, ModelError, SettingError, assert_refused
from ppfl.algorithms import METHODS, PPFL, FedAvg, FineTune, Method
from ppfl.core import affinity
from ppfl.data import Federation, synthetic_groups
from ppfl.runs import Experiment, load_experiment, run
from ppfl.runs.comparison import load_comparison
from ppfl.runs.explain import explain
from ppfl.server import Watch
from ppfl.sites import Loop, Stacked

TEXT = """
rounds = 3
seeds = [0, 4]

[data]
name = "digits"
partition = { name = "label_groups", clients = 5 }

[model]
name = "perceptron"
hidden = 16

[population]
k = 4
mix = "weights"

[algorithm]
name = "ppfl"
lr = 0.2
"""
NESTED = 'algorithm={name="finetune", steps=5, method={name="fedavg", lr=0.2}}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experiment(tmp_path, TEXT, "digits")


def test_a_file_becomes_an_experiment_that_does_not_change(file):
    experiment = load_experiment(file)
    assert experiment.name == "digits"  # the file's
    assert experiment.seeds == (0, 4)
    assert experiment.model.hidden == (16,)
    assert experiment.algorithm == PPFL(lr=0.2)
    with pytest.raises(ValidationError, match="frozen"):
        experiment.rounds = 5


def test_an_override_is_an_edit_of_the_file(file):
    changed = load_experiment(file, ["population.k=2", "algorithm.order=random", "name=other", "watch.every=2"])
    edited = TEXT.replace("k = 4", "k = 2").replace("lr = 0.2", 'lr = 0.2\norder = "random"\n[watch]\nevery = 2')
    file.write_text(edited)
    assert changed == load_experiment(file).model_copy(update={"name": "other"})


def test_every_method_can_be_named_and_json_brings_the_same_experiment_back(file):
    table = 'algorithm={name="fedalt", personal_part=%s}'
    parts = {'"body"': "body", '["body.1", "output"]': ("body.1", "output"), "[]": ()}
    experiments = {
        **{(name,): load_experiment(file, [f'algorithm={{name="{name}"}}', "population.k=1"]) for name in METHODS},
        **{("fedalt", part): load_experiment(file, [table % written]) for written, part in parts.items()},
        ("finetune", "nested"): load_experiment(file, [NESTED, "algorithm.method.momentum=0.5"]),
    }
    for (name, *part), experiment in experiments.items():
        assert type(experiment.algorithm) is METHODS[name]
        assert name != "fedalt" or not part or experiment.algorithm.personal_part == part[0]
        stored = json.loads(json.dumps(experiment.model_dump(mode="json")))
        assert stored["algorithm"]["name"] == name
        assert Experiment.model_validate(stored) == experiment
    nested = experiments["finetune", "nested"].algorithm
    assert nested == FineTune(steps=5, method=FedAvg(lr=0.2, momentum=0.5))


def test_engines_and_what_is_watched_are_as_asked(file):
    assert isinstance(load_experiment(file, ["engine=loop"]).build_engine(), Loop)
    stacked = load_experiment(file, ["chunk=3"]).build_engine()
    assert isinstance(stacked, Stacked) and stacked.chunk == 3
    for kind in (Loop, Stacked):
        usual = load_experiment(file, [f"engine={kind.name}"])
        asked = load_experiment(file, [f"engine={kind.name}", "precision=bfloat16", "checkpoint_activations=true"])
        assert usual.build_engine().passes == kind().passes
        assert asked.build_engine().passes == kind(precision="bfloat16", checkpoint_activations=True).passes
    assert load_experiment(file).watch.build() == Watch()
    changed = load_experiment(file, ["watch={every=3, objective=true, output='best', report_clients=false}"])
    assert changed.watch.build() == Watch(every=3, objective=True, output="best", report_clients=False)


LABELS, NUMBERS = synthetic_groups(), synthetic_groups(task="regression")


def affinity_of(federation: Federation, method: Method, name: str) -> object:
    settings = {"name": name} | ({"neighbours": 2} if name == "nearest" else {})
    return small_experiment(affinity=settings).affinity.build(federation, method)


def test_affinities_are_those_of_the_core():
    counts = torch.nn.functional.normalize(LABELS.label_counts().float(), dim=1)
    labels, nearest = (affinity_of(LABELS, PPFL(), name) for name in ("labels", "nearest"))
    torch.testing.assert_close(labels.neighbours(torch.eye(12)), counts @ counts.T)
    assert isinstance(nearest, affinity.Sparse) and bool((nearest.degree >= 2).all())
    assert isinstance(affinity_of(LABELS, PPFL(), "features"), affinity.Dense)
    assert isinstance(affinity_of(LABELS, PPFL(), "uniform"), affinity.Uniform)
    assert affinity_of(LABELS, PPFL(), "none") is None
    # the usual one is by labels where there are labels, and a penalty to pull memberships together
    assert isinstance(affinity_of(LABELS, PPFL(penalty=1e-5), "auto"), affinity.Factored)
    for federation, method in ((NUMBERS, PPFL(penalty=1e-5)), (LABELS, PPFL(penalty=0)), (LABELS, FedAvg())):
        assert affinity_of(federation, method, "auto") is None


# ---------------------------------------------------------------------- refusals

WRONG: dict[str, tuple[str, ...]] = {
    "rounds=0": ("rounds is 0", "greater than 0"),
    "seeds=[1, 1]": ("seeds [1, 1] repeat",),
    "seeds=[0, -2]": ("seeds.1 is -2",),
    "name=a/b": ("name is 'a/b'",),
    "engine=lop": ("engine is 'lop'", "'loop', 'stacked'"),
    "engine=loop;chunk=3": ("leave chunk out",),
    "population.canonical=3": ("population.canonical is 3", "string, or it should be a list"),
    "watch.smoothness=[1]": ("watch.smoothness has 1 values, too few",),
    "watch.metrics=['f1']": ("watch.metrics.0 is 'f1'",),
    "algorithm.name=pplf": ("algorithm.name is 'pplf'", "did you mean 'ppfl'?", ", ".join(map(repr, METHODS))),
    "algorithm={lr=1}": ("[algorithm] has no name", ", ".join(map(repr, METHODS))),
    "algorithm.membershp_lr=1": ("unknown key 'algorithm.membershp_lr'", "did you mean 'membership_lr'?"),
    "algorithm.lr=-1": ("algorithm.lr is -1", "greater than 0, or it should be 'auto'"),
    "algorithm.local_epochs=2;algorithm.local_steps=2": ("[algorithm]: local_epochs and local_steps",),
    "rouns=3": ("unknown key 'rouns' (found 3)", "did you mean 'rounds'?", "watch"),
    "model={name='cnn', channels=[6]}": ("6 channels do not split into 4 groups",),
    "model={name='resnet18', width=5}": ("5 channels do not split into 2 groups",),
    "model={name='digits_cnn', hidden=[2048, 510]}": ("510 channels do not split into 4 groups",),
    "model={name='transformer', width=10, heads=4}": ("width 10 does not split into 4 heads",),
    "data.partition.alpha=3": ("unknown key 'data.partition.alpha'", "keys here are name, groups, clients"),
    "data={name='csv', target='client', file='csv'}": ("data.client is missing", "under [data]"),
    "start={}": ("[start]", "names one run", "set run"),
    # a method within a method, and its table
    f"{NESTED};algorithm.method.name=fedagv": ("algorithm.method.name is 'fedagv'", "did you mean 'fedavg'?"),
    f"{NESTED};algorithm.method.name=finetune": ("algorithm.method.name is 'finetune'", "use one of 'local'"),
    f"{NESTED};algorithm.method.momentm=0": ("unknown key 'algorithm.method.momentm'", "did you mean 'momentum'?"),
    f"{NESTED};algorithm.method={{lr=1}}": ("[algorithm.method] has no name", "'ppfl'"),
    # numbers that would overflow on the way
    "algorithm.lr=1e300": ("algorithm.lr", "should be"),
    "algorithm.lr=1e-300": ("algorithm.lr", "should be"),
    "algorithm.membership_lr=inf": ("algorithm.membership_lr", "should be"),
    "seeds=[9223372036854775808]": ("seeds.0", "should be"),
    "model.hidden=[1000000000000]": ("model.hidden", "should be"),
    "rounds=" + "9" * 4000: ("rounds is 999", "...; it should be less"),  # and not all of them
}


@pytest.mark.parametrize("overrides", WRONG)
def test_a_wrong_setting_is_one_line_with_file_key_and_remedy(file, overrides):
    assert_refused(lambda: load_experiment(file, overrides.split(";")), SettingError, f"{file}: ", *WRONG[overrides])


DEEP = "nested deeper than"
OVERRIDES: dict[str, str] = {
    "rounds.sub=3": "'rounds' is a value",
    **dict.fromkeys(("rounds", "=3", "a..b=3"), "key.sub=value"),
    **dict.fromkeys(("x=" + "[" * 20_000, "x=" + "{a=" * 20_000, "a" + ".a" * 20_000 + "=1"), DEEP),
    "rounds=" + "9" * 5000: "digits",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text[:20])
def test_an_override_that_sets_nothing_is_refused(file, override):
    assert_refused(lambda: load_experiment(file, [override]), SettingError, OVERRIDES[override])


FILES = {
    "no rounds": (TEXT.replace("rounds = 3", ""), "rounds is missing", "at the top"),
    "no model": (TEXT.replace('[model]\nname = "perceptron"\nhidden = 16', ""), "[model] is missing", "'linear'"),
    "not TOML": ("rounds = = 3", "is not TOML"),
    "not text": (b"\xff\xfe", "is not TOML"),
    "too large": ("#" * 2_000_000, "2,000,000 bytes"),
    "a number too long": (TEXT.replace("rounds = 3", "rounds = " + "9" * 5000), "digits"),
    "deep lists": ("x = " + "[" * 20_000, DEEP),
    "deep tables": ("x = " + "{a=" * 20_000, DEEP),
    "a deep key": ("a" + ".a" * 20_000 + " = 1", DEEP),
    "a deep header": ("[a" + ".a" * 20_000 + "]", DEEP),
    "deep but closed lists": ("x = " + "[" * 40 + "]" * 40, DEEP),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_experiment_is_refused_by_its_name(file, case):
    content, *words = FILES[case]
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(lambda: load_experiment(file), SettingError, "digits.toml", *words)
    assert_refused(lambda: load_experiment(file.with_name("nowhere.toml")), SettingError, "nowhere.toml")


TABLES = [
    *(None, [{"name": "digits"}], {"data": [{"name": "digits"}]}, {"name": "a", "rounds": 10**5000}),
    {"data": {"name": ["digits"]}, "algorithm": {"name": {}}},
    {1: 2, None: 3, "data": {1: {}}},
    {"algorithm": [[[]]], "seeds": {"a": object()}},
]


@pytest.mark.parametrize("table", TABLES)
def test_any_wrong_table_is_explained(table):
    with pytest.raises(ValidationError) as error:
        Experiment.model_validate(table)
    assert explain(error.value, table)


def test_what_does_not_fit_into_memory_is_refused(file):
    for hidden in ("[1000000000]", "[1000000, 1000000]"):
        experiment = load_experiment(file, [f"model.hidden={hidden}"])
        assert_refused(lambda: experiment.build_population(LABELS, 0), ModelError, "parameters")
    with memory_limit(500):
        assert_refused(lambda: affinity_of(LABELS, PPFL(), "features"), AffinityError, "12 clients take 576 bytes")


# ---------------------------------------------------------------------- metrics that a file names

MODULE = "def share_right(prediction, target):\n    return (prediction.argmax(-1) == target).float().mean()\n"


def test_a_metric_beside_the_experiment_file_is_recorded(tmp_path):
    (tmp_path / "metrics_beside_the_file.py").write_text(MODULE)
    file = write_experiment(tmp_path, GROUPS + '[watch]\nmetrics = ["metrics_beside_the_file:share_right"]')
    (record,) = run(load_experiment(file), tmp_path / "out", base=tmp_path)
    assert record.metric == "accuracy"  # the loss's own stays the first
    for figure in ("", "_mean", "_worst_tenth"):
        assert record.scores[f"share_right{figure}"] == pytest.approx(record.scores[f"accuracy{figure}"])
    (compared,) = load_comparison(file).values()
    assert list(compared.watch.build(tmp_path).known_metrics) == ["share_right"]


NO_METRIC = {
    "no_such_module:f1": ("there is no module", "the folder of the experiment file"),
    "math:no_such_name": ("has no 'no_such_name'",),
    "torchmetrics:F1Score": ("class that needs arguments",),
}


@pytest.mark.parametrize("metric", NO_METRIC)
def test_a_metric_that_is_not_there_is_refused(tmp_path, metric):
    experiment = small_experiment(watch={"metrics": [metric]})
    assert_refused(lambda: experiment.watch.build(tmp_path), SettingError, *NO_METRIC[metric])
