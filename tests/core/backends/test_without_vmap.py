"""Networks that vmap cannot run give what a plain PyTorch loop over clients and models gives."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.problems import NETWORKS, Recurrent, make_net, make_network
from ppfl.core.backends import Autograd, Batch, make_backend
from ppfl.core.errors import ModelError
from ppfl.core.models import Mixture, Networks, OneNetwork
from ppfl.core.params import Params, map_params
from ppfl.core.population import Population

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(2, 6, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (2, 6), generator=GENERATOR)
SHARE = torch.tensor([[1 / 6] * 6, [0.25] * 4 + [0.0] * 2], dtype=torch.float64)
C = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
BATCH = Batch(X, Y, SHARE, (SHARE > 0).sum(1).to(SHARE), torch.zeros(2, 6, dtype=torch.long), None)
PARTS = ["all", "out", "cells"]


def make_one(name: str, **settings) -> Autograd:
    backend = make_backend(Population(make_network(name), **{"k": 3, **settings}), X[0], Y[0], 3)
    assert backend.clients.one_by_one
    return backend


def distinct(backend: Autograd) -> Params:
    return backend.population.initial_models(seed=3, distinct=True)


def with_values(net: nn.Module, values: Params) -> nn.Module:
    """A copy of a network with other values, which can be differentiated."""
    one = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.copy_(values[name])
    return one


def plain_loss(net: nn.Module, mix: str, models: Params, c: torch.Tensor, x, y, share, canonical: str) -> torch.Tensor:
    """One client's loss from the definition, by ordinary modules; `models` and c may be on the tape."""
    inside = [name for name, _ in net.named_parameters() if canonical == "all" or name.startswith(canonical + ".")]

    def run(network: Params) -> torch.Tensor:
        return torch.func.functional_call(net, network, (x,))

    if mix == "weights":
        mixed = {n: torch.einsum("k,k...->...", c, v) if n in inside else v for n, v in models.items()}
        losses = F.cross_entropy(run(mixed), y, reduction="none")
    else:
        outputs = [run({n: v[k] if n in inside else v for n, v in models.items()}) for k in range(len(c))]
        if mix == "outputs":
            losses = F.cross_entropy(sum(w * out for w, out in zip(c, outputs, strict=True)), y, reduction="none")
        else:
            chances = sum(w * out.softmax(1) for w, out in zip(c, outputs, strict=True))
            losses = -chances[torch.arange(len(y)), y].log()
    return (losses * share).sum()


CASES = [
    (mix, part)
    for mix in ("weights", "outputs", "predictions")
    for part in PARTS
    if (mix, part) != ("outputs", "cells")
]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("mix", "part"), CASES)
def test_gradients_and_predictions_are_those_of_a_plain_loop(name: str, mix: str, part: str) -> None:
    backend, net = make_one(name, mix=mix, canonical=part), make_network(name)
    models = distinct(backend)
    gradients, losses = backend.model_gradients(models, C, BATCH)
    slopes, slope_losses = backend.membership_gradients(models, C, BATCH)
    velocity = {n: torch.ones(2, *v.shape, dtype=v.dtype) for n, v in models.items()}
    own = {n: v.expand(2, *v.shape) for n, v in models.items()}
    scale = torch.tensor([2.0, 0.5], dtype=torch.float64)
    backend.add_model_gradients(own, velocity, 0.5, C, BATCH, scale)
    predictions, evaluated = backend.evaluate(Mixture(models, C), X, Y)
    torch.testing.assert_close(backend.predict(Mixture(models, C), X), predictions)
    for i in range(2):
        at = {n: v.clone().requires_grad_() for n, v in models.items()}
        c = C[i].clone().requires_grad_()
        loss = plain_loss(net, mix, at, c, X[i], Y[i], SHARE[i], part)
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        torch.testing.assert_close(slope_losses[i], loss.detach())
        torch.testing.assert_close((evaluated[i] * SHARE[i]).sum(), loss.detach())
        torch.testing.assert_close(slopes[i], c.grad)
        for n, leaf in at.items():
            torch.testing.assert_close(gradients[n][i], leaf.grad)
            factor = scale[i] if n in backend.population.canonical_names else 1.0
            torch.testing.assert_close(velocity[n][i], 0.5 + factor * leaf.grad)
        chance = predictions[i, torch.arange(6), Y[i]]
        torch.testing.assert_close(-chance.log(), evaluated[i])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_clients_and_models_that_are_not_mixed_are_a_plain_loop_too(name: str) -> None:
    backend, net = make_one(name, canonical="out"), make_network(name)
    models, one = distinct(backend), backend.population.initial_network()
    networks = {n: torch.stack([v, v + 0.1]) for n, v in one.items()}
    velocity = map_params(torch.empty_like, networks)
    losses = backend.add_gradients(networks, velocity, 0.0, BATCH)
    outputs = [backend.outputs_of(which, X) for which in (OneNetwork(one), Networks(networks))]
    weights = torch.rand(2, 3, 6, generator=GENERATOR, dtype=torch.float64)
    weighted = {n: torch.empty(2, *v.shape, dtype=v.dtype) for n, v in models.items()}
    together = {n: v.expand(2, *v.shape) for n, v in models.items()}
    weighted_losses = backend.add_weighted_gradients(together, weighted, 0.0, weights, BATCH)
    kept = backend.outputs(models, X)
    for i in range(2):
        alone = with_values(net, {n: v[i] for n, v in networks.items()})
        torch.testing.assert_close(outputs[0][i], net(X[i]))
        torch.testing.assert_close(outputs[1][i], alone(X[i]))
        loss = (F.cross_entropy(alone(X[i]), Y[i], reduction="none") * SHARE[i]).sum()
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        for n, parameter in alone.named_parameters():
            torch.testing.assert_close(velocity[n][i], parameter.grad)
        each = [with_values(net, {n: v[k] if n.startswith("out.") else v for n, v in models.items()}) for k in range(3)]
        all_ = [F.cross_entropy(model(X[i]), Y[i], reduction="none") for model in each]
        total = (torch.stack(all_) * weights[i]).sum()
        total.backward()
        torch.testing.assert_close(weighted_losses[i], total.detach())
        for k, model in enumerate(each):
            torch.testing.assert_close(kept[i, k].T, model(X[i]))
            torch.testing.assert_close(weighted["out.weight"][i, k], model.out.weight.grad)
        common = [n for n in models if n.startswith("cells.")]
        for n in common:
            torch.testing.assert_close(weighted[n][i], sum(dict(m.named_parameters())[n].grad for m in each))


class Stacked(nn.Module):
    """A recurrent layer that is canonical, with a layer after it: its outputs and its states are mixed."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.first, self.cells, self.out, self.packed = nn.Linear(1, 2), nn.LSTM(2, 5), nn.Linear(15, 3), packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.first(x.T[:, :, None])
        if not self.packed:
            found, (h, c) = self.cells(steps)
            return self.out(torch.cat([found.mean(0), h[0], c[0]], dim=1))
        lengths = 1 + (x[:, 1:] > -0.5).sum(1)
        packed, (h, c) = self.cells(nn.utils.rnn.pack_padded_sequence(steps, lengths, enforce_sorted=False))
        padded, _ = nn.utils.rnn.pad_packed_sequence(packed)
        return self.out(torch.cat([padded.mean(0), h[0], c[0]], dim=1))


@pytest.mark.parametrize("packed", [False, True])
def test_the_outputs_and_states_of_a_canonical_recurrent_layer_are_mixed_where_it_stands(packed: bool) -> None:
    net = Stacked(packed).double()
    backend = make_backend(Population(net, k=3, canonical="cells", mix="outputs"), X[0], Y[0], 3)
    models = distinct(backend)
    each = [
        with_values(net.cells, {n[6:]: v[k] for n, v in models.items() if n.startswith("cells.")}) for k in range(3)
    ]

    class Mixed(nn.Module):
        def forward(self, steps):
            ran = [one(steps) for one in each]
            parts = [
                sum(w * part for w, part in zip(C[0], p, strict=True)) for p in zip(*(r[1] for r in ran), strict=True)
            ]
            if packed:
                mixed = sum(w * r[0].data for w, r in zip(C[0], ran, strict=True))
                return ran[0][0]._replace(data=mixed), parts
            return sum(w * r[0] for w, r in zip(C[0], ran, strict=True)), parts

    expected = copy.deepcopy(net)
    expected.cells = Mixed()
    torch.testing.assert_close(backend.predict(Mixture(models, C), X)[0], expected(X[0]).softmax(1))


@pytest.mark.parametrize("part", ["out", "cells"])
def test_gradients_of_some_parameters_are_those_among_all_and_the_rest_is_left_alone(part: str) -> None:
    backend = make_one("lstm", canonical=part)
    networks = {n: torch.stack([v, v + 0.1]) for n, v in backend.population.initial_network().items()}
    every, some = (map_params(torch.ones_like, networks) for _ in range(2))
    only = backend.population.canonical_names
    losses = [backend.add_gradients(networks, every, 0.5, BATCH)]
    losses.append(backend.add_gradients(networks, some, 0.5, BATCH, only=only))
    torch.testing.assert_close(*losses)
    for name, velocity in some.items():
        torch.testing.assert_close(velocity, every[name] if name in only else torch.ones_like(velocity))


def test_dropout_masks_are_the_same_in_a_chunk_and_alone() -> None:
    torch.manual_seed(0)
    backend = make_backend(Population(Recurrent(dropout=0.5).double(), k=3), X[0], Y[0], 3)
    models, keyed = distinct(backend), BATCH._replace(keys=torch.tensor([5, 9]))
    together, losses = backend.model_gradients(models, C, keyed)
    for i in range(2):
        alone = Batch(*(leaf[i : i + 1] for leaf in keyed))
        gradients, loss = backend.model_gradients(models, C[i : i + 1], alone)
        torch.testing.assert_close(loss[0], losses[i])
        for name, leaf in gradients.items():
            torch.testing.assert_close(leaf[0], together[name][i])
    assert not backend.model_gradients(models, C, BATCH)[1].equal(losses)


def test_networks_that_vmap_runs_stay_side_by_side() -> None:
    attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    for net in (make_net(), nn.Sequential(nn.Unflatten(1, (1, 4)), attention, nn.Flatten(), nn.Linear(4, 3))):
        population = Population(net.double(), k=2)
        assert not make_backend(population, X[0], Y[0], 3).clients.one_by_one


class Functional(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.inner, self.f = nn.Linear(4, 3), f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self.inner(x))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("canonical", ["all", "inner"])
def test_functional_dropout_is_refused_with_what_to_do(k: int, canonical: str) -> None:
    population = Population(Functional(F.dropout).double(), k=k, canonical=canonical)
    with pytest.raises(ModelError, match="use nn.Dropout instead of F.dropout"):
        make_backend(population, X[0], Y[0], 3)


def test_a_network_without_a_gradient_is_refused() -> None:
    with pytest.raises(ModelError, match="has no gradient.*expected a forward pass"):
        make_backend(Population(Functional(lambda x: x.new_tensor(x.tolist())).double(), k=2), X[0], Y[0], 3)
