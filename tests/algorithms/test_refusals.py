"""Settings that no method can follow are refused, at once or where the problem is known."""

import pytest
from pydantic import ValidationError

import ppfl
from kit.problems import make_federation, make_net
from kit.refusals import SettingError, assert_refused
from kit.training import run
from ppfl.algorithms import METHODS

FEDERATION = make_federation()  # of four clients
NEIGHBOURS = ppfl.affinity.uniform(FEDERATION.ids)
SEVERAL_MODELS = {"ppfl", "ifca", "cfl", "fedem", "finetune"}
PRIVATE = ppfl.PPFL(lr=0.1, penalty=0.1, share_memberships=False)


def trained(method, k: int = 1, mix: str = "outputs", rounds: int = 3, affinity=None):
    return run(method, ppfl.Population(make_net(), k=k, mix=mix), FEDERATION, rounds=rounds, affinity=affinity)


REFUSED = {  # the call, and words of the answer: what was found, and the remedy
    **{
        f"{name} with two models": (lambda name=name: trained(METHODS[name](lr=0.1), 2), "k = 1")
        for name in sorted(METHODS.keys() - SEVERAL_MODELS)
    },
    "ppfl with more models than clients": (lambda: trained(ppfl.PPFL(lr=0.1, start="uniform"), 5), "k <= 4"),
    "ifca with more clusters than clients": (lambda: trained(ppfl.IFCA(lr=0.1), 5), "k <= 4"),
    "fedem of outputs": (lambda: trained(ppfl.FedEM(lr=0.1), 3), 'mix = "predictions"'),
    "fedem of weights": (lambda: trained(ppfl.FedEM(lr=0.1), 3, "weights"), 'mix = "predictions"'),
    "finetune of several networks": (lambda: trained(ppfl.FineTune(method=ppfl.PPFL(lr=0.1)), 3), "mix = 'weights'"),
    "finetune of fedavg with three models": (lambda: trained(ppfl.FineTune(), 3, "weights"), "k = 1"),
    "finetune without a round to train": (lambda: trained(ppfl.FineTune(), rounds=1), "rounds >= 2"),
    "an unknown part to tune": (lambda: trained(ppfl.FineTune(part="head")), "part names 'head'"),
    "an unknown personal part": (
        lambda: trained(ppfl.FedSim(personal_part="head")), "personal_part names 'head'", "'input', 'output', '0', '2'",
    ),
    "an unknown shared part": (lambda: trained(ppfl.LGFedAvg(shared_part="1")), "shared_part names '1'"),
    "a penalty without memberships": (
        lambda: trained(PRIVATE, 2, affinity=NEIGHBOURS), "penalty = 0", "share_memberships = true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_problem_does_not_allow_is_refused_with_the_remedy(name: str) -> None:
    call, *words = REFUSED[name]
    assert_refused(call, SettingError, *words)


def test_a_penalty_between_no_neighbours_needs_no_memberships() -> None:
    trained(PRIVATE, 2, rounds=1)


@pytest.mark.parametrize(
    ("method", "settings", "word"),
    [
        (ppfl.Centralized, {"local_steps": 2}, "local_steps"),
        (ppfl.Centralized, {"local_epochs": 1}, "local_epochs"),
        (ppfl.Scaffold, {"momentum": 0.9}, "momentum"),
        (ppfl.PFedMe, {"mu": 30, "outer_lr": 0.1}, "below 2"),
        (ppfl.FedAlt, {"personal_epochs": 1, "personal_steps": 1}, "keep one"),
        (ppfl.FineTune, {"epochs": 1, "steps": 1}, "keep one"),
        (ppfl.FineTune, {"method": ppfl.FineTune()}, "finetune"),
    ],
)
def test_settings_that_contradict_a_method_are_refused_at_once(method, settings: dict, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        method(**settings)
