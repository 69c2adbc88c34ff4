"""An experiment over sites gives what it gives in one process, and ledgers say what left the sites."""

import re
import sys
import types

import pytest
import torch

from kit.messages import payload_of
from kit.refusals import SettingError, assert_refused
from kit.sites import METHODS, SITES, Sites, assert_same_run, make_experiment, models_of, sent_fields
from ppfl import load
from ppfl.federation.federated_run import run_federated
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_processes import require_flower
from ppfl.runs import run

ROUNDS = 4
CASES = {name: (name, {}) for name in METHODS} | {
    "best round": ("ditto", {"watch": {"output": "best"}}),
    "drawn round": ("ppfl-weights", {"watch": {"output": "random"}, "seeds": [3]}),
    "some evaluations": ("ppfl-outputs", {"watch": {"every": 2}}),
}
X = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_three_sites_train_as_one_process_does(case, tmp_path):
    method, changes = CASES[case]
    experiment = make_experiment(method, ROUNDS, **changes)
    sites = Sites(experiment, tmp_path / "sites")
    there = sites.run()
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    assert there.scores["round"] == here.scores["round"]
    assert case != "drawn round" or there.scores["round"] < ROUNDS, "choose a seed that draws an earlier round"
    fitted = load(here.folder)
    for service in sites.services.values():  # what never left a site is in its store
        models = models_of(service).personal
        assert models.ids == service.federation.ids
        for client in models.ids:
            torch.testing.assert_close(models.predict(client, X), fitted.predict(client, X), rtol=0, atol=1e-5)
            (membership,) = models.memberships([client])
            torch.testing.assert_close(membership, fitted.membership(client), rtol=0, atol=1e-5)

    server = sent_fields(sites.folder / "out" / "seed-{}.federation".format(*experiment.seeds))
    sent = [field for name in SITES for field in sent_fields(sites.folder / "sites" / name)]
    assert sent and sorted(server, key=str) == sorted(sent, key=str)
    about_clients = re.findall("member|label|feature|[.]x", " ".join(name for _, _, name, _ in sent))
    assert bool(about_clients) == bool(experiment.method.shows)
    for site in () if changes else SITES:  # a round is one message, with the scores of the round before
        messages = [payload_of(message) for to, message in sites.pushed if to == site]
        kinds = [[type(request).__name__ for request in requests] for requests in messages]
        assert kinds[-ROUNDS:] == [["Evaluate", "Train"]] * (ROUNDS - 1) + [["Evaluate"]]


@pytest.mark.parametrize("method", ["ppfl-outputs", "ditto"])
def test_a_run_that_starts_from_another_run_is_the_one_in_one_process(method, tmp_path):
    run(make_experiment("fedavg", rounds=2), tmp_path / "first")
    experiment = make_experiment(method, rounds=2, start={"run": str(tmp_path / "first")})
    there = Sites(experiment, tmp_path / "sites").run()
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    (fresh,) = run(make_experiment(method, rounds=1), tmp_path / "fresh")
    assert abs(there.metrics[0]["loss"] - fresh.metrics[0]["loss"]) > 1e-3


def test_what_is_not_possible_is_said_before_anything_is_sent(tmp_path, monkeypatch):
    for changes in ({"newcomers": 0.2}, {"start": {"run": "elsewhere", "frozen": ["body"]}}):
        experiment = make_experiment("fedavg", **changes)
        assert_refused(lambda: run_federated(experiment, tmp_path, None), SettingError, "federation")
    for module in ("flwr", "cryptography"):
        monkeypatch.setitem(sys.modules, module, None)
        assert_refused(require_flower, FederationError, module, "pip install 'ppfl[flower]'")
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
