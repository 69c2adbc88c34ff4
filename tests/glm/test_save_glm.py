"""A saved model predicts and onboards as before, is small, and a damaged or foreign file is refused."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import save_file
from torch import arange, zeros

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.core.errors import CheckpointError, SettingError
from ppfl.glm import NEW, load
from ppfl.glm.inference.compact_weights import compress, expand
from ppfl.glm.inference.data_trees import TreeReader

TABLE = make_client_table()
MODELS = {
    "gaussian": (regressor(), TABLE.y),
    "heteroscedastic": (regressor(family="heteroscedastic gaussian"), TABLE.y),
    "poisson": (regressor(family="poisson", shared=["x1"]), TABLE.counts),
    "gamma": (regressor(family="gamma", mix="predictions"), TABLE.amounts),
    "classes": (classifier(), np.array(["no", "yes"])[TABLE.labels]),
    "three classes": (classifier(), TABLE.counts.clip(max=2)),
    "profile": (regressor(solver="profile"), TABLE.y),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_saved_one(name, tmp_path):
    estimator, y = MODELS[name]
    old = TABLE.clients < 10
    names = np.array([f"shop {i}" for i in TABLE.clients])
    model = estimator.fit(TABLE.x[old], y[old], clients=names[old])
    again = load(model.save(tmp_path / "model.safetensors"))
    assert again.get_params() == model.get_params()
    predict = "predict" if hasattr(model, "family") else "predict_proba"
    for each in (names, NEW):
        before, after = (getattr(m, predict)(TABLE.x, each) for m in (model, again))
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)
    pd.testing.assert_frame_equal(again.memberships_, model.memberships_, atol=1e-7)
    assert str(again.summary()) == str(model.summary())
    assert again.score(TABLE.x, y, names) == pytest.approx(model.score(TABLE.x, y, names))
    for each in (model, again):
        each.onboard(TABLE.x[~old], y[~old], names[~old])
    np.testing.assert_allclose(again.memberships_, model.memberships_, atol=1e-6)
    if hasattr(model, "_target_scale"):
        np.testing.assert_allclose(again.client_dispersion_, model.client_dispersion_, rtol=1e-5)
    third = load(again.save(tmp_path / "again.safetensors"))
    np.testing.assert_allclose(third.memberships_, model.memberships_, atol=1e-6)


def test_intervals_survive(tmp_path):
    model = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    again = load(model.save(tmp_path / "model.safetensors"))
    pd.testing.assert_frame_equal(again.conf_int(), model.conf_int())
    np.testing.assert_allclose(again.membership_intervals(), model.membership_intervals(), atol=0.01)
    frames = [m.predict(TABLE.x, TABLE.clients, interval=0.9) for m in (model, again)]
    np.testing.assert_allclose(*frames, atol=0.05)


def test_choices_are_saved_too(tmp_path):
    table = make_choice_table()
    model = choice().fit(table.x, table.y, table.situations, table.clients)
    again = load(model.save(tmp_path / "model"))
    expected = model.predict_proba(table.x, table.situations, table.clients)
    np.testing.assert_allclose(again.predict_proba(table.x, table.situations, table.clients), expected, atol=1e-6)


def test_names_of_columns_and_constant_columns_are_kept(tmp_path):
    frame = pd.DataFrame({"price": TABLE.x[:, 0], "size": TABLE.x[:, 1], "one": 1.0})
    model = regressor().fit(frame, TABLE.y, clients=TABLE.clients)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_allclose(again.predict(frame, TABLE.clients), model.predict(frame, TABLE.clients))
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame.rename(columns={"price": "cost"}), TABLE.clients)


def test_weights_take_less_than_three_bytes_and_keep_their_moments():
    """Against weights that cover many orders of magnitude, as those of clients with many rows do."""
    table = make_client_table(clients=40, rows=5)
    memberships = regressor(k=3).fit(table.x, table.y, clients=table.clients)._result.memberships
    compact = compress(memberships)
    found = expand(compact, memberships)
    assert compact.content.numel() < 3 * found.numel()
    large = memberships.weights > 1e-6
    np.testing.assert_allclose(found[large], memberships.weights[large], rtol=1e-4)
    points = memberships.points(arange(40)).mT
    for power in (1, 2):
        before, after = ((points**power * each[:, None]).sum(2) for each in (memberships.weights, found))
        np.testing.assert_allclose(after, before, atol=1e-12)


def test_pickles_hold_no_rows_of_the_fit():
    small, large = (
        len(pickle.dumps(regressor().fit(t.x, t.y, clients=t.clients)))
        for t in (make_client_table(rows=10), make_client_table(rows=400))
    )
    assert large < small + 20_000
    again = pickle.loads(pickle.dumps(regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)))
    with pytest.raises(SettingError, match="need the rows of the fit.*save"):
        again.conf_int()


def test_settings_that_a_file_cannot_hold_are_named(tmp_path):
    affinity = pd.DataFrame(np.ones((12, 12)))
    model = regressor(solver="profile", penalty=0.01, affinity=affinity, random_state=np.random.RandomState(0))
    model.fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    with pytest.warns(UserWarning, match="random_state is a RandomState, which the file does not hold"):
        again = load(model.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(again.affinity, affinity)
    assert again.random_state is None


# ---------------------------------------------------------------------- files that are not to be trusted


def test_a_damaged_file_is_refused(tmp_path):
    path = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients).save(tmp_path / "model")
    content = bytearray(path.read_bytes())
    for at in (len(content) // 2, len(content) - 1):
        changed = content.copy()
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"model .*damaged"):
            load(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


def test_foreign_files_are_refused(tmp_path):
    model = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    with pytest.raises(CheckpointError, match="there is no file"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no folder"):
        model.save(tmp_path / "nowhere" / "model")
    with pytest.raises(CheckpointError, match="is a folder"):
        model.save(tmp_path)
    pickled = tmp_path / "pickle"
    pickled.write_bytes(pickle.dumps(model))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(pickled)
    other = tmp_path / "other"
    save_file({"x": zeros(2)}, other, {"ppfl": f"00000000 {json.dumps({'format': 'ppfl fitted population'})}"})
    with pytest.raises(CheckpointError, match="'ppfl fitted population' and no population GLM"):
        load(other)


def test_a_file_cannot_name_other_classes(tmp_path):
    for name in ("os.system", "inference.data_trees.sys", "estimator.BaseEstimator"):
        with pytest.raises(KeyError):
            TreeReader({}).read({"class": name, "fields": {}})
