"""A tied parameter is one parameter with several names: gradients are those of a plain PyTorch loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.training import assert_same, run
from ppfl.algorithms import PPFL, FedAvg, FedPer
from ppfl.core.backends import Autograd, Batch, make_backend
from ppfl.core.errors import ModelError
from ppfl.core.models import Mixture, OneNetwork
from ppfl.core.population import Population
from ppfl.data import Federation

WORDS = 5
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randint(0, WORDS, (2, 6, 3), generator=GENERATOR)
Y = torch.randint(0, WORDS, (2, 6), generator=GENERATOR)
SHARE = torch.full((2, 6), 1 / 6, dtype=torch.float64)
C = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
BATCH = Batch(X, Y, SHARE, (SHARE > 0).sum(1).to(SHARE), torch.zeros(2, 6, dtype=torch.long), None)


class NextWord(nn.Module):
    """A bag of words through a hidden layer; the output layer has the weight of the embedding."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(WORDS, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, WORDS, bias=bias)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embed(x.long()).mean(1))))


def make_network(bias: bool = True) -> NextWord:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NextWord(bias).double()


def plain_output(net: NextWord, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The network written out, so that nothing depends on how modules are tied."""
    hidden = torch.tanh(F.linear(values["embed.weight"][x].mean(1), values["hidden.weight"], values["hidden.bias"]))
    return F.linear(hidden, values["embed.weight"], values.get("out.bias"))


def plain_loss(net: NextWord, mix: str, canonical, models, c, x, y) -> torch.Tensor:
    each = [{n: v[k] if n in canonical else v for n, v in models.items()} for k in range(len(c))]
    mixed = {n: torch.einsum("k,k...->...", c, v) if n in canonical else v for n, v in models.items()}
    if mix == "predictions":
        chances = sum(w * plain_output(net, values, x).softmax(1) for w, values in zip(c, each, strict=True))
        return -chances[torch.arange(len(y)), y].log().mean()
    if mix == "outputs" and len(canonical) == len(models):  # whole networks
        output = sum(w * plain_output(net, values, x) for w, values in zip(c, each, strict=True))
    else:  # of layers that are affine in their parameters, mixed outputs are those of mixed parameters
        output = plain_output(net, mixed, x)
    return F.cross_entropy(output, y)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mix", ["weights", "outputs", "predictions"])
@pytest.mark.parametrize("canonical", ["all", "out", "embed", ("embed", "out"), "hidden"])
def test_gradients_are_those_of_a_plain_loop(canonical, mix: str, bias: bool) -> None:
    net = make_network(bias)
    backend = make_backend(Population(net, k=3, canonical=canonical, mix=mix), X[0], Y[0], WORDS)
    names = backend.population.canonical_names
    tied = {n for n, _ in net.named_parameters() if not n.startswith("hidden.")}
    assert names == {"hidden": {"hidden.weight", "hidden.bias"}, "all": {*tied, "hidden.weight", "hidden.bias"}}.get(
        canonical if isinstance(canonical, str) else "", tied
    )
    models = backend.population.initial_models(seed=3, distinct=True)
    gradients, losses = backend.model_gradients(models, C, BATCH)
    slopes, _ = backend.membership_gradients(models, C, BATCH)
    _, evaluated = backend.evaluate(Mixture(models, C), X, Y)
    for i in range(2):
        at = {n: v.clone().requires_grad_() for n, v in models.items()}
        c = C[i].clone().requires_grad_()
        loss = plain_loss(net, mix, names, at, c, X[i], Y[i])
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        torch.testing.assert_close(evaluated[i].mean(), loss.detach())
        torch.testing.assert_close(slopes[i], c.grad)
        for name, leaf in at.items():
            torch.testing.assert_close(gradients[name][i], leaf.grad)


def make_words(clients: int) -> Federation:
    x = torch.randint(0, WORDS, (12 * clients, 3), generator=torch.Generator().manual_seed(2))
    ids = [f"client-{i % clients}" for i in range(len(x))]
    return Federation.from_arrays(x, x.sum(1) % WORDS, ids, test_fraction=0.0).to(dtype=torch.float64)


@pytest.mark.parametrize("mix", ["weights", "outputs", "predictions"])
@pytest.mark.parametrize("canonical", ["all", "out"])
def test_engines_agree_and_ppfl_moves_the_tied_parameter(canonical: str, mix: str) -> None:
    federation, found = make_words(clients=4), []
    for engine in ("loop", "stacked"):
        population = Population(make_network(bias=False), k=2, canonical=canonical, mix=mix)
        found.append(run(PPFL(lr=0.1, batch_size=4), population, federation, engine=engine, rounds=3))
    assert_same(found[1].everything(), found[0].everything(), atol=1e-9, rtol=1e-8)
    start, end = (state.server.shared["embed.weight"] for state in (found[0].states[0], found[0].states[-1]))
    assert start.shape == (2, WORDS, 4) and not start.allclose(end)


@pytest.mark.parametrize("method", [FedAvg(lr=0.1, batch_size=4), FedPer(lr=0.1, batch_size=4, personal_part="out")])
def test_other_methods_keep_the_tie(method) -> None:
    federation = make_words(clients=3)
    found = [run(method, Population(make_network(), k=1), federation, engine=e, rounds=2) for e in ("loop", "stacked")]
    assert_same(found[1].everything(), found[0].everything(), atol=1e-9, rtol=1e-8)


def test_a_chain_with_a_tied_weight_is_left_to_autograd() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    net[2].weight = net[0].weight
    x = torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
    backend = make_backend(Population(net, k=2), x, Y[0] % 4, 4)
    assert type(backend) is Autograd
    found = backend.outputs_of(OneNetwork(backend.population.initial_network()), x[None])[0]
    torch.testing.assert_close(found, net(x))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("canonical", ["first", "second"])
def test_a_module_under_two_names_is_canonical_under_both(canonical: str) -> None:
    net = Twice().double()
    x = torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
    backend = make_backend(Population(net, k=3, canonical=canonical, mix="outputs"), x, Y[0] % 3, 3)
    models = backend.population.initial_models(seed=3, distinct=True)
    expected = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in expected.first.named_parameters():
            parameter.copy_(torch.einsum("k,k...->...", C[0], models[f"first.{name}"]))
    found = backend.predict(Mixture(models, C[:1]), x[None])[0]
    torch.testing.assert_close(found, expected(x).softmax(1))


class TiedToItself(NextWord):
    def __init__(self) -> None:
        super().__init__()
        self.table = self.embed.weight


def test_a_tie_to_what_holds_the_canonical_part_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'embed.weight' is tied to 'table' of the network itself.*canonical='all'"):
        Population(TiedToItself(), k=2, canonical="embed")
    assert Population(TiedToItself(), k=2).canonical_modules == ("",)
