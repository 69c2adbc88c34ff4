"""A site's own store has the models of its clients: those of the same run in one process."""

import csv

import pytest
import torch
from safetensors.torch import load_file

from federation.test_federated_run import SITES, make_experiment, run_over_sites
from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl.core.errors import CheckpointError, DataError, SettingError
from ppfl.federation.site_models import load_site_models
from ppfl.federation.site_predictions import export_models, predict_table
from ppfl.fitted import load
from ppfl.runs import run

X = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))


def over_sites(experiment, folder, **options):
    clock = FakeClock()
    services = make_services(folder / "sites", SITES, experiment.model_dump(mode="json")["data"])
    run_over_sites(experiment, folder, carrier=FakeCarrier(services, clock), clock=clock, **options)
    return services


def models_of(service, run=None):
    return load_site_models(service.settings, service.base, run)


CASES = {
    "private memberships": ("ppfl-weights", {}),
    "shown memberships": ("ppfl-outputs", {"watch": {"every": 2}}),
    "networks of their own, best round": ("ditto", {"watch": {"output": "best"}}),
    "drawn round": ("ppfl-weights", {"watch": {"output": "random"}, "seeds": [3]}),
}


@pytest.mark.parametrize("case", CASES)
def test_models_are_those_of_the_run_in_one_process(case, tmp_path):
    method, changes = CASES[case]
    experiment = make_experiment(method, rounds=3, **changes)
    services = over_sites(experiment, tmp_path / "federated")
    (alone,) = run(experiment, tmp_path / "alone")
    fitted = load(alone.folder)
    for service in services.values():
        models = models_of(service)
        assert models.ids == service.federation.ids
        for client in models.ids:
            torch.testing.assert_close(models.predict(client, X), fitted.predict(client, X), rtol=0, atol=1e-5)
            if (c := models.membership(client)) is not None:
                torch.testing.assert_close(c, fitted.membership(client), rtol=0, atol=1e-5)


def test_between_two_evaluations_the_models_are_those_of_the_last_one(tmp_path):
    experiment = make_experiment("ditto", rounds=5, watch={"every": 2})
    clock = FakeClock()
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])
    found = {}

    def look(seed, end):
        if end.state.round >= 2:
            models = models_of(services["a"])
            found[end.state.round] = models.predict(models.ids[0], X)

    run_over_sites(experiment, tmp_path, carrier=FakeCarrier(services, clock), clock=clock, on_round_end=look)
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[2], found[4])
    assert not torch.equal(found[4], found[5])


def test_rows_are_prepared_as_all_sites_agreed_and_predictions_are_on_the_scale_of_the_data(tmp_path):
    pandas = pytest.importorskip("pandas")
    at = range(48)
    kinds = ["red", "green", "blue"]
    table = {
        "who": [f"p{i % 4}" for i in at],
        "kind": [kinds[i % 3] for i in at],
        "age": [30.0 + i * 7 % 40 for i in at],
        "held": [i % 5 == 0 for i in at],  # what is held out by chance depends on a client's name
    }
    tables = {}
    for number, name in enumerate(SITES):
        rows = pandas.DataFrame(table).assign(y=[100.0 + number + i % 5 + 3 * (i % 3) for i in at])
        (tmp_path / "sites" / name).mkdir(parents=True)
        rows.to_csv(tmp_path / "sites" / name / "t.csv", index=False)
        tables[name] = rows.assign(who=name + "/" + rows["who"])
    pandas.concat(tables.values()).to_csv(tmp_path / "t.csv", index=False)
    data = {"name": "csv", "file": "t.csv", "client": "who", "target": "y", "task": "regression", "is_test": "held"}
    preparation = {"standardise_target": True}
    experiment = make_experiment("ppfl-weights", rounds=3, data=data, preparation=preparation)
    services = make_services(tmp_path / "sites", SITES, data, part=None)
    clock = FakeClock()
    run_over_sites(experiment, tmp_path, carrier=FakeCarrier(services, clock), clock=clock)
    (alone,) = run(experiment, tmp_path / "alone", base=tmp_path)
    fitted = load(alone.folder)
    new = pandas.DataFrame({"who": ["p1", "p0"], "age": [40.0, 50.0], "kind": ["blue", "red"]})
    new.to_csv(tmp_path / "new.csv", index=False)
    predict_table(models_of(services["b"]), tmp_path / "new.csv", "who", tmp_path / "out.csv")
    _, *rows = read_rows(tmp_path / "out.csv")
    for row, one in zip(rows, range(2), strict=True):
        expected = fitted.predict(f"b/{row[0]}", new.iloc[[one]])
        assert float(row[1]) == pytest.approx(float(expected.reshape(-1)[0]), abs=1e-3)
        assert 90 < float(row[1]) < 120  # the targets, before they are standardised
        assert 90 < float(row[1]) < 125


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return over_sites(make_experiment("ppfl-weights", rounds=2), folder)["a"]


def write_rows(file, clients):
    names = [f"pixel {at}" for at in range(64)]
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["who", *names], *([c, *x] for c, x in zip(clients, X.tolist(), strict=False))])
    return file


def read_rows(file):
    with file.open(newline="") as opened:
        return list(csv.reader(opened))


def test_a_row_is_predicted_with_the_model_of_its_client_and_stays_in_its_place(site, tmp_path):
    models = models_of(site)
    clients = [models.ids[1], models.ids[0], models.ids[1], models.ids[2]]
    file, out = write_rows(tmp_path / "new.csv", clients), tmp_path / "predictions.csv"
    assert predict_table(models, file, "who", out) == 4
    heading, *rows = read_rows(out)
    assert heading[:2] == ["who", "prediction"] and len(heading) == 2 + 10
    for row, client, x in zip(rows, clients, X, strict=True):
        expected = models.predict(client, x[None])[0]
        assert row[0] == client and row[1] == models.kind.classes[int(expected.argmax())]
        torch.testing.assert_close(torch.tensor([float(p) for p in row[2:]]), expected, rtol=0, atol=1e-6)
    with pytest.raises(SettingError, match="exists"):
        predict_table(models, file, "who", out)


@pytest.mark.parametrize(
    ("clients", "column", "said"),
    [
        (["nobody"], "who", "no client 'nobody'; it has 'g0-c0'"),
        (["g0-c0"], "patient", "no column 'patient'"),
    ],
)
def test_rows_that_nobody_has_a_model_for_leave_no_file(clients, column, said, site, tmp_path):
    file, out = write_rows(tmp_path / "new.csv", clients), tmp_path / "predictions.csv"
    with pytest.raises(DataError, match=said):
        predict_table(models_of(site), file, column, out)
    assert not out.exists()


def test_rows_with_other_columns_or_gaps_are_refused(site, tmp_path):
    models = models_of(site)
    (tmp_path / "few.csv").write_text(f"who,a,b\n{models.ids[0]},1,2\n")
    with pytest.raises(DataError, match=r"expected a batch of samples of shape \(64,\)"):
        predict_table(models, tmp_path / "few.csv", "who", tmp_path / "out.csv")
    gap = ",".join(["", *["1"] * 63])
    (tmp_path / "gap.csv").write_text(f"who,{','.join(f'p{i}' for i in range(64))}\n{models.ids[0]},{gap}\n")
    with pytest.raises(DataError, match="missing or infinite values in its row 1"):
        predict_table(models, tmp_path / "gap.csv", "who", tmp_path / "out.csv")


def test_exported_models_predict_the_same_and_memberships_are_beside_them(site, tmp_path):
    models, out = models_of(site), tmp_path / "models"
    chosen = models.ids[:2]
    assert export_models(models, out, chosen) == list(chosen)
    for client in chosen:
        net = models.module(client)
        saved = load_file(out / f"{client}.safetensors")
        assert saved.keys() == net.state_dict().keys()
        net.load_state_dict(saved)
        torch.testing.assert_close(net(X).softmax(1), models.predict(client, X), rtol=0, atol=1e-6)
    _, *rows = read_rows(out / "memberships.csv")
    assert [row[0] for row in rows] == list(chosen)
    for row in rows:
        expected = models.membership(row[0])
        torch.testing.assert_close(torch.tensor([float(c) for c in row[1:]]), expected, rtol=0, atol=1e-6)
    with pytest.raises(SettingError, match="has other files"):
        export_models(models, out)


def test_a_run_that_the_store_does_not_have_is_named(site, tmp_path):
    with pytest.raises(CheckpointError, match="has no run 'other' with models.*seed-0"):
        models_of(site, "other")
    (fresh,) = make_services(tmp_path, ["z"], site.settings.data.model_dump(mode="json")).values()
    with pytest.raises(CheckpointError, match="no run with models"):
        models_of(fresh)


def test_the_latest_run_is_taken_unless_one_is_named(tmp_path):
    experiment, clock = make_experiment("ppfl-weights", rounds=2, seeds=[0, 1]), FakeClock()
    services = make_services(tmp_path / "sites", SITES, experiment.model_dump(mode="json")["data"])
    run_over_sites(experiment, tmp_path, carrier=FakeCarrier(services, clock), clock=clock)
    first, second = services["a"].store.runs()
    assert models_of(services["a"]).run == second
    assert models_of(services["a"], first).run == first
    client = services["a"].federation.ids[0]
    assert not torch.equal(*(models_of(services["a"], one).predict(client, X) for one in (first, second)))
