"""Methods train networks that vmap cannot run, and every engine gives the same trajectory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.problems import Recurrent, make_federation, make_network
from kit.training import assert_same, run
from ppfl.algorithms import IFCA, PPFL, Centralized, Ditto, FedAvg, FedEM, FedPer, FineTune, PFedMe, Scaffold
from ppfl.core.errors import ModelError
from ppfl.core.population import Population
from ppfl.fitting import fit

SIZES = (7, 12, 5, 1)
SMALL = {"lr": 0.05, "batch_size": 4}
METHODS = {
    "fedavg": (FedAvg(**SMALL), {"k": 1}),
    "scaffold": (Scaffold(**SMALL), {"k": 1}),
    "ditto": (Ditto(**SMALL), {"k": 1}),
    "pfedme": (PFedMe(**SMALL, mu=1.0, outer_lr=0.2), {"k": 1}),
    "fedper": (FedPer(**SMALL, personal_part="out"), {"k": 1}),
    "centralized": (Centralized(**SMALL), {"k": 1}),
    "finetune": (FineTune(method=FedAvg(**SMALL), steps=2), {"k": 1}),
    "ifca": (IFCA(**SMALL), {"k": 2}),
    "fedem": (FedEM(**SMALL), {"k": 2, "mix": "predictions"}),
    "ppfl-weights": (PPFL(**SMALL), {"k": 3, "mix": "weights"}),
    "ppfl-outputs": (PPFL(**SMALL), {"k": 3, "mix": "outputs"}),
    "ppfl-predictions": (PPFL(**SMALL), {"k": 3, "mix": "predictions"}),
    "ppfl-head": (PPFL(**SMALL, weight_decay=0.01), {"k": 3, "canonical": "out", "mix": "weights"}),
    "ppfl-cells": (PPFL(**SMALL, collapse=False), {"k": 2, "canonical": "cells", "mix": "weights"}),
    "ppfl-private": (PPFL(**SMALL, share_memberships=False), {"k": 2, "mix": "predictions", "canonical": "out"}),
}


@pytest.mark.parametrize("network", ["lstm", "packed", "function"])
@pytest.mark.parametrize("name", METHODS)
def test_engines_give_the_same_trajectory(name: str, network: str) -> None:
    method, settings = METHODS[name]
    federation, net = make_federation(SIZES, dtype=torch.float64), make_network(network)
    reference = run(method, Population(net, **settings), federation, rounds=3)
    found = run(method, Population(net, **settings), federation, engine="threads", rounds=3)
    assert_same(found.everything(), reference.everything(), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("network", ["gru", "function"])
def test_one_round_of_fedavg_is_a_plain_loop_of_sgd(network: str) -> None:
    federation, net = make_federation(SIZES, dtype=torch.float64), make_network(network)
    method = FedAvg(lr=0.2, batch_size=None, local_steps=3, schedule="constant")
    found = run(method, Population(net, k=1), federation, engine="stacked", rounds=1).server.shared
    expected = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for client, weight in zip(federation.ids, federation.weights / federation.weights.sum(), strict=True):
        own, (data,) = copy.deepcopy(net), [federation.select([client]).train]
        optimiser = torch.optim.SGD(own.parameters(), lr=0.2, momentum=0.9)
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(own(data.x), data.y).backward()
            optimiser.step()
        for name, parameter in own.named_parameters():
            expected[name] += weight * parameter.detach()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_dropout_beside_a_recurrent_layer_is_the_same_on_every_engine() -> None:
    federation, net = make_federation(SIZES, dtype=torch.float64), Recurrent(dropout=0.5).double()
    method = PPFL(**SMALL)
    runs = [run(method, Population(net, k=2), federation, engine=engine) for engine in ("loop", "chunks-of-2")]
    assert_same(runs[1].everything(), runs[0].everything(), atol=1e-10, rtol=1e-9)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.inner(x), 0.5, self.training)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_functional_dropout_is_refused_before_a_round(engine: str) -> None:
    with pytest.raises(ModelError, match="use nn.Dropout instead of F.dropout"):
        fit(Population(FunctionalDropout(), k=2), make_federation(), rounds=1, engine=engine)
