"""Settings that no method can follow are refused, at once or where the problem is known."""

import pytest

import ppfl
from kit.problems import make_federation, make_net
from kit.refusals import SettingError, assert_refused
from kit.training import run
from ppfl.algorithms import METHODS

FEDERATION = make_federation()  # of four clients
PRIVATE = ppfl.PPFL(lr=0.1, penalty=0.1, share_memberships=False)
NEIGHBOURS = ppfl.affinity.uniform(FEDERATION.ids)


def trained(method, k=1, affinity=None, rounds=2):
    return run(method, ppfl.Population(make_net(), k=k), FEDERATION, rounds=rounds, affinity=affinity)


REFUSED = {  # the call, and words of the answer: what was found, and the remedy
    **{
        f"{name} with two models": (lambda name=name: trained(METHODS[name](lr=0.1), 2), "k = 1")
        for name in sorted(METHODS.keys() - {"ppfl", "ifca", "cfl", "fedem", "finetune"})
    },
    "more models than clients": (lambda: trained(ppfl.PPFL(lr=0.1, start="uniform"), 5), "k <= 4"),
    "more clusters than clients": (lambda: trained(ppfl.IFCA(lr=0.1), 5), "k <= 4"),
    "fedem of outputs": (lambda: trained(ppfl.FedEM(lr=0.1), 3), 'mix = "predictions"'),
    "finetune of several networks": (lambda: trained(ppfl.FineTune(method=ppfl.PPFL(lr=0.1)), 3), "mix = 'weights'"),
    "finetune without a round to train": (lambda: trained(ppfl.FineTune(), rounds=1), "rounds >= 2"),
    "an unknown part": (lambda: trained(ppfl.FedSim(personal_part="head")), "names 'head'", "'input', 'output'"),
    "a penalty on private memberships": (lambda: trained(PRIVATE, 2, NEIGHBOURS), "share_memberships = true"),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_does_by_default_is_what_it_accepts(name):
    method = METHODS[name]()
    assert METHODS[name].model_validate(method.model_dump()) == method


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_problem_does_not_allow_is_refused_with_the_remedy(name):
    call, *words = REFUSED[name]
    assert_refused(call, SettingError, *words)


@pytest.mark.parametrize(
    ("method", "settings", "word"),
    [
        (ppfl.Scaffold, {"momentum": 0.9}, "momentum"),
        (ppfl.PFedMe, {"mu": 30, "outer_lr": 0.1}, "below 2"),
        (ppfl.FedAlt, {"personal_epochs": 1, "personal_steps": 1}, "keep one"),
        (ppfl.PPFL, {"lr": 10**5000}, "type int"),
        (ppfl.FineTune, {"epochs": 1, "steps": 2}, "keep one"),
        (ppfl.FineTune, {"method": ppfl.FineTune()}, "finetune"),
    ],
)
def test_settings_that_contradict_a_method_are_refused_at_once(method, settings, word):
    assert_refused(lambda: method(**settings), SettingError, word)
