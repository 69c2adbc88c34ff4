"""An experiment file is read as it is written, or refused in one line that says what to change."""

import json

import pytest
import torch
from pydantic import ValidationError

from kit.experiments import TEXT, memory_limit, small_experiment, write_experiment
from kit.refusals import AffinityError, SettingError, assert_refused
from ppfl.algorithms import METHODS, PPFL, FedAvg, FineTune
from ppfl.data import synthetic_groups
from ppfl.runs import Experiment, load_experiment, run
from ppfl.runs.comparison import load_comparison
from ppfl.server import Watch
from ppfl.sites import Loop, Stacked

NESTED = 'method={name="finetune", steps=5, method={name="fedavg", lr=0.2}}'


@pytest.fixture
def file(tmp_path):
    return write_experiment(tmp_path)


def test_a_file_becomes_an_experiment_that_does_not_change_and_an_override_is_an_edit(file):
    experiment = load_experiment(file)
    assert experiment.name == "groups"  # the file's
    assert experiment.method == PPFL(lr=0.3)
    with pytest.raises(ValidationError, match="frozen"):
        experiment.rounds = 5
    network = "model={name='perceptron', hidden=16}"
    changed = load_experiment(file, ["population.k=3", "seeds=[0, 4]", "name=other", "watch.every=2", network])
    assert changed.seeds == (0, 4) and changed.model.hidden == (16,)
    edited = TEXT.replace("k = 2", "k = 3").replace('"linear"', '"perceptron"\nhidden = 16')
    file.write_text(f"seeds = [0, 4]\n{edited}[watch]\nevery = 2")
    assert changed == load_experiment(file).model_copy(update={"name": "other"})


def test_every_method_can_be_named_and_json_brings_the_same_experiment_back(file):
    changes = {name: [f'method={{name="{name}"}}', "population.k=1"] for name in METHODS}
    changes["fedalt"] = ['method={name="fedalt", personal_part=["body.1", "output"]}']
    changes["finetune"] = [NESTED, "method.method.momentum=0.5"]
    experiments = {name: load_experiment(file, own) for name, own in changes.items()}
    for name, experiment in experiments.items():
        assert type(experiment.method) is METHODS[name]
        stored = json.loads(json.dumps(experiment.model_dump(mode="json")))
        assert stored["method"]["name"] == name
        assert Experiment.model_validate(stored) == experiment
    assert experiments["fedalt"].method.personal_part == ("body.1", "output")
    assert experiments["finetune"].method == FineTune(steps=5, method=FedAvg(lr=0.2, momentum=0.5))


def test_engines_are_as_asked(file):
    for kind in (Loop, Stacked):
        assert isinstance(load_experiment(file, [f"engine={kind.name}"]).build_engine(), kind)
    stacked = load_experiment(file, ["chunk=3", "threads=2"]).build_engine()
    assert (stacked.chunk, stacked.threads) == (3, 2)


LABELS, NUMBERS = synthetic_groups(), synthetic_groups(task="regression")


def affinity_by(name, federation=LABELS, method=None, **settings):
    return small_experiment(affinity={"name": name} | settings, method=method or PPFL()).build_affinity(federation)


def test_affinities_are_those_of_the_core_and_what_does_not_fit_into_memory_is_refused():
    counts = torch.nn.functional.normalize(LABELS.label_counts().float(), dim=1)
    torch.testing.assert_close(affinity_by("labels").neighbours(torch.eye(12)), counts @ counts.T)
    assert bool((affinity_by("nearest", neighbours=2).degree >= 2).all())
    assert bool((affinity_by("features").matrix.diagonal() == 1).all())
    assert affinity_by("uniform").degree.tolist() == [12] * 12
    assert affinity_by("none") is None
    # the usual one is by labels where there are labels, and a penalty to pull memberships together
    assert affinity_by("auto", LABELS, PPFL(penalty=1e-5)).degree.equal(affinity_by("labels").degree)
    for federation, method in ((NUMBERS, PPFL(penalty=0)), (LABELS, PPFL(penalty=0)), (LABELS, FedAvg())):
        assert affinity_by("auto", federation, method) is None
    assert_refused(lambda: affinity_by("auto", NUMBERS, PPFL(penalty=1e-5)), SettingError, "[affinity]", "penalty = 0")
    with memory_limit(500):
        assert_refused(lambda: affinity_by("features"), AffinityError, "12 clients take 576 bytes")


def test_what_is_watched_by_default_is_the_same_in_a_file_and_in_python(file):
    assert load_experiment(file).watch == Watch()


def test_a_metric_beside_the_experiment_file_is_recorded_and_one_that_is_not_there_refused(tmp_path):
    code = "def share_right(prediction, target):\n    return (prediction.argmax(-1) == target).float().mean()\n"
    (tmp_path / "metrics_beside_the_file.py").write_text(code)
    file = write_experiment(tmp_path, TEXT + '[watch]\nmetrics = ["metrics_beside_the_file:share_right"]')
    (record,) = run(load_experiment(file), tmp_path / "out", base=tmp_path)
    assert record.metric == "accuracy"  # the loss's own stays the first
    for figure in ("", "_mean", "_worst_tenth"):
        assert record.scores[f"share_right{figure}"] == pytest.approx(record.scores[f"accuracy{figure}"])
    (compared,) = load_comparison(file).values()
    assert list(compared.watch.with_functions(tmp_path).metrics) == ["share_right"]
    for metric, words in (("no_module:f1", "no module"), ("torchmetrics:F1Score", "class that needs arguments")):
        watch = small_experiment(watch={"metrics": [metric]}).watch
        assert_refused(lambda: watch.with_functions(tmp_path), SettingError, words)


WRONG: dict[str, tuple[str, ...]] = {
    "seeds=[1, 1]": ("seeds [1, 1] repeat",),
    "engine=loop;chunk=3": ("leave chunk out",),
    "method.name=pplf": ("[method]: there is no method 'pplf'", "did you mean 'ppfl'?", "module:Class"),
    "method.membershp_lr=1": ("unknown key 'method.membershp_lr'", "did you mean 'membership_lr'?"),
    "method.local_epochs=2;method.local_steps=2": ("[method]: local_epochs and local_steps",),
    "rouns=3": ("unknown key 'rouns' (found 3)", "did you mean 'rounds'?", "watch"),
    "k=3": ("unknown key 'k'", "did you mean 'population.k'?"),
    "start.frozen=output": ("[start]", "set run = <a run folder>"),
    "watch.rounds=3": ("unknown key 'watch.rounds'", "did you mean 'rounds' at the top"),
    "population.K=3": ("unknown key 'population.K'", "did you mean 'k'?"),
    "network.name=linear": ("unknown key 'network'", "did you mean 'model'?"),
    "data={name='csv', target='client', file='csv'}": ("data.client is missing", "under [data]"),
    f"{NESTED};method.method.name=finetune": ("[method.method]: the method 'finetune'", "use one of 'local'"),
    f"{NESTED};method.method.momentm=0": ("unknown key 'method.method.momentm'", "did you mean 'momentum'?"),
    "method={lr=0.3}": ("[method]: it has no name", "'fedavg'"),
    "method.name=nowhere:Mine": ("[method]: there is no module 'nowhere'",),
    "method.name=collections:OrderedDct": ("no 'OrderedDct'", "did you mean 'OrderedDict'?"),
    "method.name=json:dumps": ("'json:dumps' is a function, not a method", "ppfl.algorithms.Method"),
    "method.name=collections:OrderedDict": ("is the class OrderedDict, not a method",),
    "method.name=json:": ("[method]: 'json' has no ''",),
    f"{NESTED};method.method.name=nowhere:Mine": ("[method.method]: there is no module 'nowhere'",),
    # numbers that would overflow on the way
    "method.lr=1e-300": ("method.lr", "at least 1e-12"),
    "method.lr=1e300": ("method.lr", "should be"),
    "rounds=" + "9" * 4000: ("rounds is 999", "...; it should be less"),  # and not all of them
}
OVERRIDES = {
    "rounds.sub=3": "'rounds' is a value",
    "a" + ".a" * 1000 + "=3": "nested deeper",
    "rounds": "key.sub=value",
    "a..b=3": "key.sub=value",
}
DEEP = "nested deeper than"
FILES = {
    "no rounds": (TEXT.replace("rounds = 4", ""), "rounds is missing", "at the top"),
    "no data": (TEXT.replace("[data]", "[affinity]"), "table [data] is missing", "'digits'"),
    "an old name": (TEXT.replace("[method]", "[algorithm]"), "unknown key 'algorithm'", "did you mean 'method'?"),
    "not TOML": ("rounds = = 3", "is not TOML"),
    "not text": (b"\xff\xfe", "is not TOML"),
    "too large": ("#" * 2_000_000, "2,000,000 bytes"),
    "a number too long": (TEXT.replace("rounds = 4", "rounds = " + "9" * 5000), "digits"),
    "deep lists": ("x = " + "[" * 20_000, DEEP),
    "deep tables": ("x = " + "{a=" * 20_000, DEEP),
    "a deep key": ("a" + ".a" * 20_000 + " = 1", DEEP),
    "a deep header": ("[a" + ".a" * 20_000 + "]", DEEP),
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change[:40])
def test_a_wrong_setting_is_one_line_with_file_key_and_remedy(file, change):
    assert_refused(lambda: load_experiment(file, change.split(";")), SettingError, f"{file}: ", *WRONG[change])


@pytest.mark.parametrize("case", FILES)
def test_a_file_or_an_override_that_is_no_experiment_is_refused(file, case):
    for override, words in OVERRIDES.items():
        assert_refused(lambda: load_experiment(file, [override]), SettingError, words)
    content, *words = FILES[case]
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(lambda: load_experiment(file), SettingError, "groups.toml", *words)
    assert_refused(lambda: load_experiment(file.with_name("nowhere.toml")), SettingError, "nowhere.toml")
