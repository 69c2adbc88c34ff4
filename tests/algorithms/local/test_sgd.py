"""Local SGD of a chunk of clients is torch.optim.SGD for each, on every backend."""

import copy

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl.algorithms import FedAvg
from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.algorithms.local.sgd import descend, part_of_start_left, proximal, train_networks
from ppfl.core.backends import Autograd, make_backend
from ppfl.core.draws import name_keys
from ppfl.core.population import Population
from ppfl.core.workspace import Workspace

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
LARGEST_FIRST = torch.tensor([2, 1, 0, 3])
SETTINGS = FedAvg(lr=0.2, momentum=0.9, weight_decay=0.05, batch_size=4, local_epochs=2)


def local_data() -> LocalData:
    keys, weights = name_keys(FEDERATION.ids)[LARGEST_FIRST], FEDERATION.weights.double()[LARGEST_FIRST]
    return LocalData(FEDERATION.train, weights, keys, LARGEST_FIRST, Draws(3, 0), Workspace())


@pytest.fixture(params=["autograd", "chained"])
def backend(request):
    make = Autograd if request.param == "autograd" else make_backend
    return make(Population(NET, k=1), FEDERATION.train.x[:2], FEDERATION.train.y, 3)


def copies_of_network() -> dict[str, torch.Tensor]:
    return {name: p.detach().repeat(4, *(1 for _ in p.shape)) for name, p in NET.named_parameters()}


def test_every_client_takes_the_steps_of_torch_optim(backend) -> None:
    networks, data = copies_of_network(), local_data()
    loss = train_networks(backend, networks, data, SETTINGS, lr=0.2)
    for row in range(4):
        twin = copy.deepcopy(NET)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.2, momentum=0.9, weight_decay=0.05)
        seen = []
        for batch in SETTINGS.batches(data):
            if row < len(batch.x):
                real = batch.share[row] > 0
                losses = nn.functional.cross_entropy(twin(batch.x[row][real]), batch.y[row][real], reduction="none")
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
                seen += losses.tolist()
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(networks[name][row], expected.detach())
        assert len(seen) == int(loss.samples[row]) == 2 * int(data.sizes[row])
        assert sum(seen) / len(seen) == pytest.approx(float(loss.loss[row]))


def test_parameters_that_are_not_named_keep_their_bits(backend) -> None:
    networks, start = copies_of_network(), copies_of_network()
    train_networks(backend, networks, local_data(), SETTINGS, lr=0.2, only={"2.weight"})
    assert {name for name, value in networks.items() if not value.equal(start[name])} == {"2.weight"}


def test_a_proximal_term_adds_its_gradient_and_leaves_the_losses_alone(backend) -> None:
    networks, anchor = copies_of_network(), {name: v + 1 for name, v in copies_of_network().items()}
    plain, near = ({name: torch.ones_like(v) for name, v in networks.items()} for _ in range(2))
    batch = next(iter(SETTINGS.batches(local_data())))
    losses = backend.add_gradients(networks, plain, 0.5, batch)
    assert proximal(backend.add_gradients, anchor, 3.0)(networks, near, 0.5, batch).equal(losses)
    for name, v in plain.items():
        torch.testing.assert_close(near[name], v + 3 * (networks[name] - anchor[name]))


def test_what_weight_decay_leaves_of_a_start_is_what_steps_without_gradients_lead_to() -> None:
    data, values = local_data(), copies_of_network()

    def no_gradients(at, velocity, momentum, batch):
        for v in velocity.values():
            v.mul_(momentum) if momentum else v.zero_()
        return torch.zeros_like(data.weight[: len(batch.x)])

    start = copies_of_network()
    descend(no_gradients, values, data, SETTINGS, lr=0.2)
    left = part_of_start_left(data, SETTINGS, lr=0.2)
    assert len(left.unique()) > 1  # clients take different numbers of steps
    for name, value in values.items():
        torch.testing.assert_close(value, start[name] * left.reshape(-1, *(1 for _ in value.shape[1:])))
    assert part_of_start_left(data, SETTINGS.model_copy(update={"weight_decay": 0.0}), lr=0.2) is None
