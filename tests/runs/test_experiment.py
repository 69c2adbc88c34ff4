"""An experiment file is read as it is written, or refused in one line that says what to change."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from ppfl.algorithms import METHODS, PPFL, FedAvg, FineTune
from ppfl.core import SettingError
from ppfl.core.affinity import Dense, Factored, Sparse, Uniform
from ppfl.core.backends import Passes
from ppfl.core.errors import AffinityError, ModelError
from ppfl.data import synthetic_groups
from ppfl.data.limits import limited
from ppfl.runs import Experiment, load_experiment
from ppfl.runs.affinity_settings import (
    AutoAffinity,
    FeatureAffinity,
    LabelAffinity,
    NearestAffinity,
    NoAffinity,
    UniformAffinity,
)
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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "digits.toml"
    path.write_text(TEXT)
    return path


def test_a_file_becomes_an_experiment(file):
    experiment = load_experiment(file)
    assert experiment.name == "digits"  # the file's
    assert experiment.seeds == (0, 4)
    assert experiment.model.hidden == (16,)
    assert experiment.algorithm == PPFL(lr=0.2)


def test_json_brings_the_same_experiment_back(file):
    experiment = load_experiment(file)
    assert Experiment.model_validate(json.loads(json.dumps(experiment.model_dump(mode="json")))) == experiment


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_named(file, name):
    experiment = load_experiment(file, [f'algorithm={{name="{name}"}}', "population.k=1"])
    assert type(experiment.algorithm) is METHODS[name]
    assert experiment.model_dump(mode="json")["algorithm"]["name"] == name


@pytest.mark.parametrize("override", ['algorithm={name="unknown"}', "algorithm={lr=1}"])
def test_an_unknown_method_is_answered_with_all_there_are(file, override):
    with pytest.raises(SettingError) as error:
        load_experiment(file, [override])
    assert ", ".join(map(repr, METHODS)) in str(error.value)


def test_parts_of_a_network_are_read_as_one_name_or_several(file):
    table = 'algorithm={name="fedalt", personal_part=%s}'
    for written, meant in (('"body"', "body"), ('["body.1", "output"]', ("body.1", "output")), ("[]", ())):
        experiment = load_experiment(file, [table % written])
        assert experiment.algorithm.personal_part == meant
        assert Experiment.model_validate(json.loads(json.dumps(experiment.model_dump(mode="json")))) == experiment


NESTED = """[algorithm]
name = "finetune"
steps = 5

[algorithm.method]
name = "fedavg"
lr = 0.2
"""


@pytest.fixture
def nested(file: Path) -> Path:
    file.write_text(TEXT[: TEXT.index("[algorithm]")] + NESTED)
    return file


def test_a_method_within_a_method_is_a_table_within_its_table(nested):
    experiment = load_experiment(nested, ["algorithm.method.momentum=0.5"])
    assert experiment.algorithm == FineTune(steps=5, method=FedAvg(lr=0.2, momentum=0.5))
    assert Experiment.model_validate(json.loads(json.dumps(experiment.model_dump(mode="json")))) == experiment


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.method.lr=-1", ["algorithm.method.lr is -1", "greater than 0"]),
        ("algorithm.method.name=fedagv", ["algorithm.method.name is 'fedagv'", "did you mean 'fedavg'?"]),
        ("algorithm.method.name=finetune", ["algorithm.method.name is 'finetune'", "use one of 'local'"]),
        ("algorithm.method.momentm=0", ["unknown key 'algorithm.method.momentm'", "did you mean 'momentum'?"]),
        ("algorithm.method={lr=1}", ["[algorithm.method] has no name", "'ppfl'"]),
        ("algorithm.step=1", ["unknown key 'algorithm.step'", "did you mean 'steps'?"]),
        ("algorithm.epochs=1", ["[algorithm]: epochs and steps"]),
    ],
)
def test_a_wrong_setting_within_is_named_with_its_table(nested, override, parts):
    with pytest.raises(SettingError) as error:
        load_experiment(nested, [override])
    for part in parts:
        assert part in str(error.value)


def test_an_override_is_an_edit_of_the_file(file):
    changed = load_experiment(file, ["population.k=2", "algorithm.order=random", "name=other", "watch.every=2"])
    file.write_text(
        TEXT.replace("k = 4", "k = 2").replace("lr = 0.2", 'lr = 0.2\norder = "random"\n[watch]\nevery = 2')
    )
    assert changed == load_experiment(file).model_copy(update={"name": "other"})


def test_an_experiment_does_not_change(file):
    with pytest.raises(ValidationError, match="frozen"):
        load_experiment(file).rounds = 5


def test_engines_are_built_as_asked(file):
    assert isinstance(load_experiment(file, ["engine=loop"]).build_engine(), Loop)
    stacked = load_experiment(file, ["chunk=3"]).build_engine()
    assert isinstance(stacked, Stacked)
    assert stacked.chunk == 3
    for engine in ("loop", "stacked"):
        assert load_experiment(file, [f"engine={engine}"]).build_engine().passes == Passes()
        asked = load_experiment(file, [f"engine={engine}", "precision=bfloat16", "checkpoint_activations=true"])
        assert asked.build_engine().passes == Passes("bfloat16", checkpoint_activations=True)


def test_what_is_watched_is_what_the_server_takes(file):
    assert load_experiment(file).watch.build() == Watch()
    changed = load_experiment(file, ["watch={every=3, objective=true, output='best', report_clients=false}"])
    assert changed.watch.build() == Watch(every=3, objective=True, output="best", report_clients=False)


WRONG = {
    "rounds=0": ["rounds is 0", "greater than 0"],
    "rounds=many": ["rounds is 'many'", "integer"],
    "seeds=[1, 1]": ["seeds [1, 1] repeat"],
    "seeds=[]": ["seeds is []", "at least 1"],
    "seeds=[0, -2]": ["seeds.1 is -2"],
    "dropout=1": ["dropout is 1", "less than 1"],
    "dropout=-0.1": ["dropout is -0.1", "greater than or equal to 0"],
    "name=a/b": ["name is 'a/b'"],
    "engine=lop": ["engine is 'lop'", "'loop', 'stacked'"],
    "population.mix=wieghts": ["population.mix is 'wieghts'", "'outputs', 'predictions', 'weights'"],
    "population.loss=hinge": ["population.loss is 'hinge'", "'logistic'"],
    "population.canonical=3": ["population.canonical is 3", "string, or it should be a list"],
    "watch.output=first": ["watch.output is 'first'", "'last', 'best' or 'random'"],
    "watch.smoothness=[1]": ["watch.smoothness has 1 values, too few"],
    "algorithm.name=pplf": ["algorithm.name is 'pplf'", "did you mean 'ppfl'?", "'fedavg'"],
    "algorithm={lr=1}": ["[algorithm] has no name", "'ppfl'"],
    "algorithm=3": ["[algorithm] has no name (found 3)"],
    "algorithm.membershp_lr=1": ["unknown key 'algorithm.membershp_lr'", "did you mean 'membership_lr'?"],
    "algorithm.lr=-1": ["algorithm.lr is -1", "greater than 0, or it should be 'auto'"],
    "rouns=3": ["unknown key 'rouns' (found 3)", "did you mean 'rounds'?", "watch"],
    "model.name=resnet": ["model.name is 'resnet'", "'cnn'"],
    "model={name='cnn', channels=[6]}": ["6 channels do not split into 4 groups"],
    "data.partition.alpha=3": ["unknown key 'data.partition.alpha'", "keys here are name, groups, clients"],
    "data.partition.clients=none": ["data.partition.clients is 'none'"],
    "data={name='csv', target='client', file='csv'}": ["data.client is missing", "under [data]"],
    "affinity.neighbours=3": ["[affinity] has no name", "'nearest'"],
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_setting_is_one_line_with_key_and_remedy(file, override):
    with pytest.raises(SettingError) as error:
        load_experiment(file, [override])
    line = str(error.value)
    assert line.startswith(f"{file}: ")
    assert "\n" not in line
    for part in WRONG[override]:
        assert part in line


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.local_epochs=2", "algorithm.local_steps=2"], "[algorithm]: local_epochs and local_steps"),
        (["engine=loop", "chunk=3"], "leave chunk out"),
        (["precision=half"], "use one of 'float32', 'bfloat16'"),
        (["rounds.sub=3"], "'rounds' is a value"),
        (["rounds"], "key.sub=value"),
        (["=3"], "key.sub=value"),
        (["a..b=3"], "key.sub=value"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(file, overrides, part):
    with pytest.raises(SettingError) as error:
        load_experiment(file, overrides)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("cut", "parts"),
    [
        ("rounds = 3", ["rounds is missing", "at the top"]),
        ('[model]\nname = "perceptron"\nhidden = 16', ["table [model] is missing", "'linear'"]),
    ],
)
def test_what_is_missing_is_named(file, cut, parts):
    file.write_text(TEXT.replace(cut, ""))
    with pytest.raises(SettingError) as error:
        load_experiment(file)
    for part in parts:
        assert part in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"no file .*nowhere.toml"):
        load_experiment(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    for content in (b"rounds = = 3", b"\xff\xfe"):
        broken.write_bytes(content)
        with pytest.raises(SettingError, match="broken.toml is not TOML"):
            load_experiment(broken)


def test_affinities_are_those_of_the_core():
    federation, method = synthetic_groups(), PPFL()
    counts = torch.nn.functional.normalize(federation.label_counts().float(), dim=1)
    labels = LabelAffinity().build(federation, method)
    torch.testing.assert_close(labels.neighbours(torch.eye(12)), counts @ counts.T)
    assert isinstance(FeatureAffinity().build(federation, method), Dense)
    assert isinstance(UniformAffinity().build(federation, method), Uniform)
    nearest = NearestAffinity(neighbours=2).build(federation, method)
    assert isinstance(nearest, Sparse)
    assert bool((nearest.degree >= 2).all())
    assert NoAffinity().build(federation, method) is None


def test_the_usual_affinity_is_by_labels_where_there_are_labels_and_a_penalty():
    labels, numbers = synthetic_groups(), synthetic_groups(task="regression")
    assert isinstance(AutoAffinity().build(labels, PPFL(penalty=1e-5)), Factored)
    assert AutoAffinity().build(numbers, PPFL(penalty=1e-5)) is None
    assert AutoAffinity().build(labels, PPFL(penalty=0)) is None
    assert AutoAffinity().build(labels, FedAvg()) is None


DEEP = {
    "lists": "x = " + "[" * 20_000,
    "tables": "x = " + "{a=" * 20_000,
    "a key": "a" + ".a" * 20_000 + " = 1",
    "a header": "[a" + ".a" * 20_000 + "]",
    "closed lists": "x = " + "[" * 40 + "]" * 40,
}


@pytest.mark.parametrize("case", DEEP)
def test_settings_nested_too_deep_are_refused(file, case):
    file.write_text(DEEP[case])
    with pytest.raises(SettingError, match="nested deeper than"):
        load_experiment(file)


@pytest.mark.parametrize("override", ["x=" + "[" * 20_000, "x=" + "{a=" * 20_000, "a" + ".a" * 20_000 + "=1"])
def test_overrides_nested_too_deep_are_refused(file, override):
    with pytest.raises(SettingError, match="nested deeper than"):
        load_experiment(file, [override])


def test_integers_of_thousands_of_digits_are_refused(file):
    with pytest.raises(SettingError, match="digits"):
        load_experiment(file, ["rounds=" + "9" * 5000])
    file.write_text(TEXT.replace("rounds = 3", "rounds = " + "9" * 5000))
    with pytest.raises(SettingError, match="digits"):
        load_experiment(file)
    with pytest.raises(SettingError, match="rounds is 9{100,200}[.]{3}; it should be less"):
        load_experiment(write(file, TEXT), ["rounds=" + "9" * 4000])


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.lr=1e300",
        "algorithm.lr=1e-300",
        "algorithm.penalty=1e300",
        "algorithm.membership_lr=inf",
        "algorithm.local_steps=1000000000000",
        "algorithm.batch_size=1000000000000",
        "rounds=1000000000000",
        "seeds=[9223372036854775808]",
        "chunk=1000000000000",
        "population.k=1000000000000",
        "model.hidden=[1000000000000]",
        "data.partition.clients=1000000000000",
        "data.seed=18446744073709551616",
    ],
)
def test_numbers_that_would_overflow_are_refused(file, override):
    key = override.partition("=")[0]
    with pytest.raises(SettingError, match=f"{key}.* is .*should be"):
        load_experiment(file, [override])


@pytest.mark.parametrize("override", ["model.hidden=[1000000000]", "model.hidden=[1000000, 1000000]"])
def test_a_network_that_does_not_fit_into_memory_is_refused(file, override):
    experiment = load_experiment(file, [override])
    with pytest.raises(ModelError, match="this network has .* parameters"):
        experiment.build_population(synthetic_groups(), 0)


def test_an_affinity_that_does_not_fit_into_memory_is_refused():
    federation = synthetic_groups()
    with limited(bytes=500), pytest.raises(AffinityError, match="12 clients take 576 bytes"):
        FeatureAffinity().build(federation, PPFL())


@pytest.mark.parametrize(
    "table",
    [
        [{"name": "digits"}],
        {"data": [{"name": "digits"}]},
        {"data": {"name": ["digits"]}, "algorithm": {"name": {}}},
        {1: 2, None: 3, "data": {1: {}}},
        {"algorithm": [[[]]], "seeds": {"a": object()}},
        {"name": "a", "rounds": 10**5000},
        None,
    ],
)
def test_any_wrong_table_is_explained(table):
    with pytest.raises(ValidationError) as error:
        Experiment.model_validate(table)
    assert explain(error.value, table)


def test_a_file_too_large_to_be_an_experiment_is_refused(file):
    file.write_text("#" * 2_000_000)
    with pytest.raises(SettingError, match="2,000,000 bytes"):
        load_experiment(file)
