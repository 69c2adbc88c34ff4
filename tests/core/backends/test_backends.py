"""Every kind of network and loss trains as K ordinary networks of torch would, on every engine."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from kit.problems import LINKS, PROBLEMS, make_net, of_net
from kit.refusals import ModelError, assert_refused
from kit.training import assert_same, run
from ppfl import PPFL, FedAvg, Population, fit
from ppfl.core.backends import Autograd, Batch, Chained, make_backend
from ppfl.core.population import Mixture, Networks, OneNetwork

MIXES = ("outputs", "predictions", "weights")
C = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]], dtype=torch.float64)  # a mixture, and one model alone
SHARE = torch.tensor([[1 / 6] * 6, [1 / 4] * 4 + [0.0] * 2], dtype=torch.float64)
REAL = (6, 4)
every_problem = pytest.mark.parametrize("name", PROBLEMS)
# torch loops over clients in its margin loss and in attention, and says so
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def batch_of(problem):
    """Two clients; the last two samples of the second one are padding."""
    train = problem.federation.train
    x, y = (values[:12].reshape(2, 6, *values.shape[1:]) for values in (train.x, train.y))
    return Batch(x, y, SHARE, torch.tensor([6.0, 4.0]).double(), torch.zeros(2, 6, dtype=torch.long), None)


def backends_of(problem, population):
    """The reference, and the one that is chosen if it is another."""
    like = population, problem.federation.train.x, problem.federation.train.y, problem.federation.n_classes
    chosen = make_backend(*like)
    return [chosen] if type(chosen) is Autograd else [Autograd(*like), chosen]


def distinct(population):
    return population.initial_models(seed=3, distinct=True)


def with_values(net, values):
    """The network with other values of what is trained."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values[name])
    return net


def member(models, names, k):
    """One of K models, with the common part."""
    return {name: leaf[k] if name in names else leaf for name, leaf in models.items()}


def gradients_of(net):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters() if p.requires_grad}


def mixed_outputs(c, outputs):
    """Sums of numbers; lengths in packed sequences are the same for all."""
    first = outputs[0]
    if first is None or isinstance(first, Tensor):
        moves = first is not None and first.is_floating_point()
        return torch.einsum("k,k...->...", c, torch.stack(outputs)) if moves else first
    parts = [mixed_outputs(c, list(part)) for part in zip(*outputs, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


class Mixed(nn.Module):
    """K modules in one place, whose outputs are mixed before the next layer."""

    def __init__(self, modules, c):
        super().__init__()
        self.each, self.c = modules, c

    def forward(self, *inputs):
        return mixed_outputs(self.c, [module(*inputs) for module in self.each])


def naive_step(problem, population, models, c, x, y):
    """The output of one client's mixed model, its mean loss, and the gradients of models and membership."""
    names, k = population.canonical_names, len(c)
    if population.mix.name == "weights":
        mixed = {n: torch.einsum("k,k...->...", c, v) if n in names else v for n, v in models.items()}
        net = with_values(problem.net(), mixed)
        output = net(x)
        loss = problem.mean_loss(output, y)
        loss.backward()
        G = gradients_of(net)
        slopes = torch.stack([sum((G[n] * models[n][i]).sum() for n in names) for i in range(k)])
        return output, loss, {n: torch.stack([w * g for w in c]) if n in names else g for n, g in G.items()}, slopes
    c = c.clone().requires_grad_()
    nets = [with_values(problem.net(), member(models, names, i)) for i in range(k)]
    trained = [dict(net.named_parameters()) for net in nets]  # before modules are replaced
    parts = population.canonical_modules
    if population.mix.name == "predictions":
        output = problem.mixed_predictions(torch.stack([net(x) for net in nets]), c)
    elif parts == ("",):
        output = mixed_outputs(c, [net(x) for net in nets])
    else:
        for part in parts:
            nets[0].set_submodule(part, Mixed([net.get_submodule(part) for net in nets], c))
        output = nets[0](x)
    loss = problem.mean_loss(output, y)
    loss.backward()
    each = {n: [torch.zeros_like(net[n]) if net[n].grad is None else net[n].grad for net in trained] for n in models}
    return output, loss, {n: torch.stack(g) if n in names else sum(g) for n, g in each.items()}, c.grad


def assert_steps(backend, models, batch, inverse_link, steps):
    """Losses, predictions and gradients of two clients are those of `naive_step`."""
    mix = backend.population.mix.name
    own = {n: torch.stack([v, v]) for n, v in models.items()}
    slopes, slope_losses = backend.membership_gradients(models, C, batch)
    empty, velocity = ({n: torch.full_like(v, f) for n, v in own.items()} for f in (torch.nan, 1.0))
    losses = backend.add_model_gradients(own, empty, 0.0, C, batch)
    backend.add_model_gradients(own, velocity, 0.5, C, batch)
    assert all(leaf.equal(torch.stack([models[n]] * 2)) for n, leaf in own.items())
    predictions, evaluated = backend.evaluate(Mixture(models, C), batch.x, batch.y)
    torch.testing.assert_close(backend.predict(Mixture(models, C), batch.x), predictions)
    kept = slopes, losses
    if backend.caches_outputs:
        kept = backend.membership_loss(backend.outputs(models, batch.x), batch.y, SHARE)(C)
    for i, (output, loss, expected, slope) in enumerate(steps):
        for found in (losses[i], slope_losses[i], kept[1][i], (evaluated[i] * SHARE[i]).sum()):
            torch.testing.assert_close(found, loss.detach())
        for found in (slopes[i], kept[0][i]):  # with mixed predictions up to a constant, which moves no membership
            constant = (found - slope).mean() if mix == "predictions" else 0.0
            torch.testing.assert_close(found - constant, slope)
        prediction = inverse_link(output.detach())
        torch.testing.assert_close(predictions[i, : REAL[i]].reshape(prediction.shape), prediction)
        for n, gradient in expected.items():
            torch.testing.assert_close(empty[n][i], gradient)
            torch.testing.assert_close(velocity[n][i], 0.5 + gradient)


@every_problem
def test_mixed_models_have_the_gradients_of_k_ordinary_networks(name):
    problem = PROBLEMS[name]()
    batch, inverse_link = batch_of(problem), LINKS[problem.link][0]
    clients = [(C[i], batch.x[i, :size], batch.y[i, :size]) for i, size in enumerate(REAL)]
    for canonical, mix in itertools.product(problem.canonical, MIXES):
        population = problem.population(k=3, mix=mix, canonical=canonical)
        models = distinct(population)
        steps = [naive_step(problem, population, models, *client) for client in clients]
        for backend in backends_of(problem, population):
            assert_steps(backend, models, batch, inverse_link, steps)


def assert_ordinary(problem):
    """Gradients and outputs of one network per client, and of K models whose losses have weights, as in an EM step."""
    batch = batch_of(problem)
    weights = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    population, before = problem.population(k=3, canonical=problem.canonical[-1]), batch.x.clone()
    models, one, names = distinct(population), population.initial_network(), population.canonical_names
    networks = {n: torch.stack([v, v + 0.1]) for n, v in one.items()}
    own = {n: torch.stack([v, v]) for n, v in models.items()}
    for backend in backends_of(problem, population):
        velocity, weighted = ({n: torch.ones_like(v) for n, v in leaves.items()} for leaves in (networks, own))
        losses = backend.add_gradients(networks, velocity, 0.5, batch)
        weighted_losses = backend.add_weighted_gradients(own, weighted, 0.5, weights, batch)
        outputs = [backend.outputs_of(which, batch.x) for which in (OneNetwork(one), Networks(networks))]
        assert batch.x.equal(before)
        for i, size in enumerate(REAL):
            x, y = batch.x[i, :size], batch.y[i, :size]
            net = with_values(problem.net(), {n: v[i] for n, v in networks.items()})
            torch.testing.assert_close(outputs[0][i, :size], problem.net()(x))
            torch.testing.assert_close(outputs[1][i, :size], net(x))
            problem.plain(net, x, y).backward()
            torch.testing.assert_close(losses[i], problem.plain(net, x, y).detach())
            for n, gradient in gradients_of(net).items():
                torch.testing.assert_close(velocity[n][i], 0.5 + gradient)
            each = [with_values(problem.net(), member(models, names, k)) for k in range(3)]
            samples = [(j, batch.x[i, j : j + 1], batch.y[i, j : j + 1]) for j in range(6)]
            total = sum(weights[i, k, j] * problem.plain(each[k], *one) for k in range(3) for j, *one in samples)
            total.backward()
            torch.testing.assert_close(weighted_losses[i], total.detach())
            found = [gradients_of(net) for net in each]
            for n in models:
                expected = torch.stack([g[n] for g in found])
                torch.testing.assert_close(weighted[n][i], 0.5 + (expected if n in names else expected.sum(0)))


@every_problem
def test_networks_that_are_not_mixed_have_the_gradients_of_ordinary_ones(name):
    assert_ordinary(PROBLEMS[name]())


@every_problem
def test_engines_give_one_trajectory(name):
    problem, at = PROBLEMS[name](), list(PROBLEMS).index(name) % 3
    for turn, mix in enumerate(MIXES if len(problem.canonical) > 1 else MIXES[at : at + 1]):
        population = problem.population(k=2, mix=mix, canonical=problem.canonical[turn % len(problem.canonical)])
        one, other = (
            run(PPFL(lr=0.05, batch_size=4), population, problem.federation, engine=engine, rounds=2)
            for engine in ("loop", "threads")
        )
        assert_same(other.everything(), one.everything(), atol=1e-9, rtol=1e-8)
        start, end = one.states[0].server.shared, one.server.shared
        assert all(not torch.allclose(start[n], end[n], rtol=0, atol=1e-9) for n in population.canonical_names)


@every_problem
def test_one_full_step_of_fedavg_is_torchs_own(name):
    problem = PROBLEMS[name]()
    train, net = problem.federation.train, problem.net()
    problem.plain(net, train.x, train.y).backward()
    expected = {n: (p - 0.1 * p.grad).detach() for n, p in net.named_parameters() if p.requires_grad}
    after = problem.plain(with_values(net, expected), train.x, train.y).item()
    method = FedAvg(lr=0.1, momentum=0.0, batch_size=None, local_steps=1, schedule="constant")
    for engine in ("loop", "stacked"):
        fitted = fit(problem.population(), problem.federation, method, rounds=1, engine=engine)
        # weights of clients are in single precision
        torch.testing.assert_close(fitted.models(["c0"]).values, expected, rtol=1e-6, atol=1e-7)
        assert fitted.evaluate(problem.federation, "train").loss.pooled == pytest.approx(after, rel=1e-5)
        assert fitted.problem.population.loss.metric_name == problem.metric


def test_a_tied_parameter_stays_one_parameter():
    for canonical in ("out", "embed", ("embed", "out")):
        population = PROBLEMS["tied"]().population(k=2, canonical=canonical)
        assert population.canonical_names == {"embed.weight", "out.bias"}


@pytest.mark.parametrize("name", ["linear", "chain", "long chain", "one label"])
def test_chains_of_layers_are_differentiated_by_hand(name):
    problem = PROBLEMS[name]()
    assert [type(backend) for backend in backends_of(problem, problem.population())] == [Autograd, Chained]


WAYS = {  # of clients: one by one, or side by side; and of one's images with the channels last
    "images": (True, True),
    "images in one layout": (True, False),
    "lstm": (True, False),
    "packed": (True, False),
    "function": (True, False),
    "attention": (False, False),
    "group norm": (False, False),
}


@pytest.mark.parametrize("name", WAYS)
def test_only_convolutions_and_what_vmap_cannot_run_are_taken_one_client_after_the_other(name):
    problem = PROBLEMS[name]()
    clients = backends_of(problem, problem.population())[0].clients
    assert (clients.one_by_one, clients.channels_last) == WAYS[name]


class Skip(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


NO_CHAINS = [
    lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
    lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3)),
    lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 3)),  # would write into its input
    lambda: nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 3)),
    lambda: Skip(nn.Linear(4, 4)),
]


@pytest.mark.parametrize("make", NO_CHAINS)
def test_what_is_almost_a_chain_of_layers_runs_as_it_is_written(make):
    problem = of_net(make)
    assert [type(backend) for backend in backends_of(problem, problem.population())] == [Autograd]
    assert_ordinary(problem)


class Functional(nn.Linear):
    def __init__(self, f):
        super().__init__(4, 3)
        self.f = f

    def forward(self, x):
        return self.f(super().forward(x))


def run_on(net, n_classes=3):
    train = PROBLEMS["chain"]().federation.train
    make_backend(Population(net.double(), k=2), train.x, train.y, n_classes)


REFUSED = {
    "other samples": (lambda: run_on(nn.Linear(7, 3)), "(4,)"),
    "too few outputs": (lambda: run_on(make_net(), n_classes=5), "5 outputs"),
    "two tensors": (lambda: run_on(Functional(lambda x: (x, x))), "tuple"),
    "no gradient": (lambda: run_on(Functional(lambda x: x.new_tensor(x.tolist()))), "no gradient"),
    "dropout": (lambda: run_on(Functional(nn.functional.dropout)), "nn.Dropout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_does_not_fit_is_refused(case):
    call, *words = REFUSED[case]
    assert_refused(call, ModelError, *words)
