"""Which parameters `personal_part` and `shared_part` name, and what is said where they name none."""

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_linear, make_net
from kit.training import run
from ppfl.algorithms import FedAlt, FedSim, LGFedAvg
from ppfl.algorithms.partial import parameters_of
from ppfl.core.errors import SettingError
from ppfl.core.population import Population


def deep_net() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, 3))


def half_frozen() -> nn.Module:
    """Of which one weight is trained, and nothing else."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)).requires_grad_(False)
    net[1].weight.requires_grad_(True)
    return net


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(self.middle(self.encoder(x)))


class WithOwnParameter(nn.Sequential):
    """Has a parameter of its own beside its layers, which makes it no layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.shift = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("net", "part", "expected"),
    [
        (deep_net(), "input", {"0.0.weight", "0.0.bias"}),
        (deep_net(), "output", {"1.weight", "1.bias"}),
        (deep_net(), "0", {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}),
        (deep_net(), ("0.2", "output"), {"0.2.weight", "0.2.bias", "1.weight", "1.bias"}),
        (make_linear(), "input", {"weight", "bias"}),
        (
            nn.ModuleDict({"output": nn.Linear(1, 1), "then": nn.Linear(1, 1)}),
            "output",
            {"output.weight", "output.bias"},
        ),
        (Tied(), "output", {"encoder.weight", "decoder.bias"}),
        (half_frozen(), "input", {"1.weight"}),
        (half_frozen(), "output", {"1.weight"}),
        (WithOwnParameter(), "input", {"0.weight", "0.bias"}),
    ],
    ids=[
        "first",
        "last",
        "module",
        "several",
        "one-layer",
        "a-module-of-that-name",
        "tied",
        "frozen-layers",
        "frozen-bias",
        "own-parameter",
    ],
)
def test_parts_are_named_as_the_network_names_them(net, part, expected) -> None:
    assert parameters_of(net, part, "personal_part") == expected


@pytest.mark.parametrize(
    ("method", "setting"), [(FedSim(personal_part="head"), "personal_part"), (LGFedAvg(shared_part="1"), "shared_part")]
)
def test_an_unknown_part_is_answered_with_the_known_ones(method, setting: str) -> None:
    with pytest.raises(SettingError, match=rf"{setting} names '(head|1)'.*'input', 'output', '0', '2'"):
        run(method, Population(make_net(), k=1), make_federation(), rounds=1)


def test_two_measures_of_personal_work_are_refused() -> None:
    with pytest.raises(ValueError, match="keep one of them"):
        FedAlt(personal_epochs=1, personal_steps=1)
