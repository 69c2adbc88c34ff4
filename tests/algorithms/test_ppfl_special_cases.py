"""What PPFL becomes at the edges of its settings (Section O3.1): decoupled clients, and partial personalization."""

import copy

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import assert_same, at_start, run
from ppfl.algorithms import PPFL, FedAlt, FedPer, LGFedAvg, Local
from ppfl.core import affinity
from ppfl.core.population import Population
from ppfl.server import evaluate

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
TIGHT = {"atol": 1e-9, "rtol": 1e-9}
MIXES = ["outputs", "predictions", "weights"]


# ------------------------------------------------------------------ lambda = 0 decouples clients

ONLY_MEMBERSHIPS = {"order": "random", "block_probability": 1e-9, "start": "uniform", "lr": 0.1}


def memberships_after(rounds: int, federation, mix: str, **settings) -> dict[str, torch.Tensor]:
    """Each client's membership by name, theta never moved."""
    likeness = affinity.from_labels(federation.label_counts().double(), federation.ids)
    method, population = PPFL(**ONLY_MEMBERSHIPS, **settings), Population(NET, k=2, mix=mix)
    found = run(method, population, federation, rounds=rounds, affinity=likeness, engine="stacked")
    assert_same(found.server.shared, found.states[0].server.shared, atol=0, rtol=0)
    return dict(zip(federation.ids, found.memberships, strict=True))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("batch", [None, 3])
def test_without_penalty_a_membership_is_the_same_whoever_else_is_there(mix: str, batch: int | None) -> None:
    everyone = memberships_after(3, FEDERATION, mix, penalty=0.0, membership_batch=batch)
    some = memberships_after(3, FEDERATION.select(FEDERATION.ids[1:3]), mix, penalty=0.0, membership_batch=batch)
    for client, membership in some.items():
        torch.testing.assert_close(membership, everyone[client], **TIGHT)
        assert not torch.allclose(membership, torch.full((2,), 0.5).double(), atol=1e-3)


def test_with_penalty_it_is_not() -> None:
    everyone = memberships_after(3, FEDERATION, "outputs", penalty=0.1)
    some = memberships_after(3, FEDERATION.select(FEDERATION.ids[1:3]), "outputs", penalty=0.1)
    assert any(not torch.allclose(membership, everyone[client], atol=1e-4) for client, membership in some.items())


@pytest.mark.parametrize("mix", MIXES)
def test_by_the_max_rule_a_clients_loss_is_that_of_its_first_choice_alone(mix: str) -> None:
    """As in clustered learning, whichever way canonical models were mixed before."""
    found = run(PPFL(**SMALL), Population(NET, k=2, mix=mix), FEDERATION, rounds=3, engine="stacked")
    shared, best = found.server.shared, found.memberships.argmax(1)
    hard = evaluate(found.method, found.problem, found.transport, found.server, ("train",), hard=True)
    for i, loss in enumerate(hard.splits["train"].loss):
        own, net = FEDERATION.train.client(i), copy.deepcopy(NET)
        net.load_state_dict({name: theta[best[i]] for name, theta in shared.items()})
        torch.testing.assert_close(loss, nn.functional.cross_entropy(net(own.x), own.y).detach(), **TIGHT)


# ------------------------------------------------------------------ the membership as the personal part


class MixtureOfNetworks(nn.Module):
    """K networks and the logits of a membership, all as ordinary parameters."""

    def __init__(self, models, k: int, mix: str) -> None:
        super().__init__()
        self.mix, self.models = mix, nn.ModuleList(copy.deepcopy(NET) for _ in range(k))
        for i, model in enumerate(self.models):
            model.load_state_dict({name: theta[i] for name, theta in models.items()})
        self.membership = nn.ParameterDict({"logits": torch.zeros(k, dtype=torch.float64)})

    def forward(self, x):
        c = self.membership["logits"].softmax(0)
        outputs = torch.stack([model(x) for model in self.models])
        if self.mix == "outputs":
            return torch.tensordot(c, outputs, dims=1)
        return torch.tensordot(c, outputs.softmax(-1), dims=1).log()


@pytest.mark.parametrize(("mix", "k"), [("outputs", 2), ("predictions", 3)])
def test_without_penalty_ppfl_is_partial_personalization_with_the_membership_personal(mix: str, k: int) -> None:
    """A mirror step with eta from 1/K is a gradient step with K eta on logits, so the first round of both is one."""
    training = {"lr": 0.3, "batch_size": None, "momentum": 0.9, "schedule": "constant", "local_steps": 3}
    population = Population(NET, k=k, mix=mix)
    ours = PPFL(**training, membership_lr=training["lr"] / k, membership_steps=1, start="uniform", averaging="everyone")
    found = run(ours, population, FEDERATION, rounds=1)
    theirs = FedAlt(**training, personal_steps=1, personal_part="membership")
    net = MixtureOfNetworks(found.states[0].server.shared, k, mix)
    expected = run(theirs, Population(net, k=1), FEDERATION, rounds=1)
    logits = expected.client_tree()["membership.logits"]
    assert float((found.memberships - 1 / k).abs().amin(0).max()) > 1e-4
    torch.testing.assert_close(found.memberships, logits.softmax(1), **TIGHT)
    for name, theta in found.server.shared.items():
        for i in range(k):
            torch.testing.assert_close(theta[i], expected.server.shared[f"models.{i}.{name}"], **TIGHT)


# ------------------------------------------------------------------ a canonical model for every client


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("canonical", "method"), [("2", FedPer), ("0", LGFedAvg), ("all", Local)], ids=["fedper", "lg-fedavg", "local"]
)
def test_a_canonical_model_of_its_own_for_every_client_is_partial_personalization(mix, canonical, method) -> None:
    """Memberships frozen at the unit vectors: the canonical part is each client's own, theta_com is shared."""
    rounds, clients = 3, FEDERATION.n_clients
    theirs = run(method(**SMALL), Population(NET, k=1), FEDERATION, rounds=rounds, engine="stacked").models().values
    ours = PPFL(**SMALL, membership_steps=0, start="uniform", averaging="members")
    population = Population(NET, k=clients, mix=mix, canonical=canonical)
    start = at_start(
        ours, population, FEDERATION, rounds=rounds, models=population.initial_models(0),
        memberships=torch.eye(clients, dtype=torch.float64),
    )  # fmt: skip
    found = run(ours, population, FEDERATION, rounds=rounds, engine="stacked", resume=start)
    for name, value in found.server.shared.items():
        torch.testing.assert_close(value.expand_as(theirs[name]), theirs[name], **TIGHT)
