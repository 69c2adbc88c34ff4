"""A method of one's own over sites: it is imported where the site allows it, and nowhere else."""

import sys

import pytest

from kit.messages import encode
from kit.own_methods import experiment_beside, forget
from kit.sites import SITES, Sites, Talk, assert_same_run, make_experiment, make_services, models_of, restarted
from ppfl.data import SampleSpec
from ppfl.federation.envelope import ERROR, REPLIES, REQUESTS, Envelope, seal, unseal
from ppfl.federation.site_requests import OpenRun
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import SiteSettings
from ppfl.runs import run
from ppfl.sites import Setup, Train

MODULE = """
from typing import NamedTuple
from ppfl import FedAvg
from ppfl.algorithms import message

@message
class Step(NamedTuple):
    lr: float

class StepwiseAverage(FedAvg):
    def plan(self, *args):
        plan = super().plan(*args)
        return plan._replace(task=Step(plan.task))

    def work(self, *args):
        return super().work(*(arg.lr if isinstance(arg, Step) else arg for arg in args))
"""
NAME = "stepwise_average:StepwiseAverage"


@pytest.fixture
def own(tmp_path):
    """An experiment with the method, whose module the server has."""
    (tmp_path / "stepwise_average.py").write_text(MODULE)
    asked = make_experiment("fedavg", rounds=3).model_dump(mode="json")
    asked["method"] |= {"name": NAME}
    yield experiment_beside(tmp_path, asked)
    forget(NAME, "Step")


def test_sites_that_allow_a_method_train_as_one_process_does(own, tmp_path):
    services = make_services(tmp_path / "sites", SITES, own.data.model_dump(mode="json"), allow=[NAME])
    sites = Sites(own, tmp_path, services)
    there = sites.run()
    (here,) = run(own, tmp_path / "alone", base=tmp_path)
    assert_same_run(here, there, own)
    assert all(models_of(service).personal.ids for service in sites.services.values())


def test_a_site_that_does_not_allow_it_imports_nothing(own, tmp_path):
    (service,) = make_services(tmp_path, ["a"], own.data.model_dump(mode="json")).values()
    requests = [OpenRun(own.model_dump(mode="json", exclude={"data"}), 0)]
    forget(NAME, "Step")
    (service.base / "stepwise_average.py").write_text(MODULE)
    reply = unseal(Talk(service).send(requests))
    assert reply.kind == ERROR and f"names '{NAME}'" in reply.payload.decode() and "`allow`" in reply.payload.decode()
    assert "stepwise_average" not in sys.modules


def test_a_site_that_starts_anew_knows_the_classes_of_a_message(own, tmp_path):
    data = own.data.model_dump(mode="json")
    service = SiteService(SiteSettings(name="a", data=data, allow=[NAME]), tmp_path)
    talk, start = Talk(service), own.build_population(SampleSpec.of(service.federation), 0).initial_network()
    talk.ask(OpenRun(own.model_dump(mode="json", exclude={"data"}), 0))
    talk.ask(Setup("main", own.method, start, 0, float(service.federation.importance.sum())))
    step = sys.modules["stepwise_average"].Step(0.1)
    message = seal(Envelope(REQUESTS, "run", "a", 1, 3, encode([Train("main", 1, 0, 0, None, step, start, {})])))
    service = restarted(service)
    forget(NAME, "Step")
    reply = service.answer(message)
    assert unseal(reply).kind == REPLIES, unseal(reply).payload
