"""Training with frozen layers: they are never trained, sent or kept by clients, and it is as if they came with the
data."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import Recording, assert_same, run
from ppfl.algorithms import METHODS, PPFL, Ditto, FedAvg, FedPer, FineTune, LGFedAvg
from ppfl.core.population import Population
from ppfl.core.trees import named_leaves
from ppfl.sites import Setup, Train

FEDERATION = make_federation((7, 12, 20, 5), dtype=torch.float64)
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
FROZEN = {"0.weight", "0.bias", "1.scale"}


class Shrink(nn.Module):
    """A layer with a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.scale * x)


def net_with_frozen_layers() -> nn.Module:
    """The layers 0 and 1 are constants, 2 and 4 are trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(4, 6).requires_grad_(False), Shrink(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
        return nn.Sequential(*layers).double()


def names_in(tree) -> set[str]:
    """The last two parts of the names of all leaves: a layer and a parameter."""
    return {".".join(name.split(".")[-2:]) for name in named_leaves(tree)}


@pytest.mark.parametrize("name", METHODS)
def test_constants_are_neither_sent_nor_kept_nor_changed(name: str) -> None:
    method = FineTune(method=FedAvg(**SMALL)) if name == "finetune" else METHODS[name](**{**SMALL, "lr": 0.05})
    several = name in ("ppfl", "ifca", "cfl", "fedem")
    net = net_with_frozen_layers()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    population = Population(net, k=2 if several else 1, mix="predictions" if several else "outputs")
    found = run(method, population, FEDERATION, rounds=2, kind=Recording, engine="stacked")
    everything = [found.server, found.clients[-1].values]
    for request, reply in found.transport.log:
        everything += [request.start] if isinstance(request, Setup) else []
        everything += (
            [request.shared, request.own, reply.totals, reply.rows.values] if isinstance(request, Train) else []
        )
    seen = set().union(*map(names_in, everything))
    assert not seen & FROZEN
    assert seen >= {"2.weight", "4.weight"}  # the names are looked at in the right place
    for key in FROZEN:
        assert net.state_dict()[key].equal(before[key]) and population.net.state_dict()[key].equal(before[key])
    sizes = {leaf.numel() for tree in everything for leaf in named_leaves(tree).values() if torch.is_tensor(leaf)}
    assert not {24, 4 * 24, 2 * 24} & sizes  # nor does the frozen weight go under another name


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedAvg(**SMALL), {"k": 1}),
        (LGFedAvg(**SMALL), {"k": 1}),
        (FedPer(**SMALL, participation=0.5), {"k": 1}),
        (Ditto(**SMALL), {"k": 1}),
        (PPFL(**SMALL), {"k": 2, "mix": "outputs"}),
        (PPFL(**SMALL), {"k": 2, "mix": "predictions", "canonical": "4"}),
        (PPFL(**SMALL, share_memberships=False), {"k": 2, "mix": "weights", "canonical": "2"}),
    ],
    ids=["fedavg", "lg-fedavg", "fedper", "ditto", "ppfl-outputs", "ppfl-predictions", "ppfl-weights"],
)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_frozen_first_layers_are_as_good_as_their_outputs_as_data(method, settings: dict, engine: str) -> None:
    net = net_with_frozen_layers()
    with torch.no_grad():
        hidden = net[:2](FEDERATION.train.x)
    featurised = replace(FEDERATION, train=replace(FEDERATION.train, x=hidden))
    rest = nn.Sequential(nn.Identity(), nn.Identity(), *net[2:])
    whole = run(method, Population(net, **settings), FEDERATION, engine=engine)
    after = run(method, Population(rest, **settings), featurised, engine=engine)
    assert_same(whole.everything(), after.everything(), atol=1e-10, rtol=1e-9)
    assert whole.reports[-1].bytes_up == after.reports[-1].bytes_up


def test_freezing_everything_but_the_head_trains_a_linear_model() -> None:
    """On the outputs of the rest; then mixed outputs are mixed weights, and one model is uploaded."""
    net = make_net(dtype=torch.float64)
    net[0].requires_grad_(False)
    found = run(PPFL(**SMALL), Population(net, k=3, canonical="2"), FEDERATION, engine="stacked")
    mixed = run(PPFL(**SMALL, membership_steps=20), Population(net, k=3, canonical="2", mix="weights"), FEDERATION)
    assert_same(found.server, mixed.server, atol=1e-9, rtol=1e-8)
