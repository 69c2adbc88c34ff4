"""Engines: threads, images, chunks, and what they do not leave behind."""

import copy

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import run
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core.backends import Batch
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.trees import bytes_of
from ppfl.core.workspace import Workspace
from ppfl.data import Federation
from ppfl.server import evaluate
from ppfl.sites import Loop, Stacked, engines
from ppfl.sites.engines import balanced, chunks_of_similar_size, even_chunk


class Viewed(nn.Module):
    """A network that takes images in one memory layout only."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(channels, 4, 3, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.convolution(x).relu().view(len(x), -1))


def flattened(channels: int = 2) -> nn.Module:
    convolution = nn.Conv2d(channels, 4, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def images(sizes=(6, 9, 3, 4, 8), channels: int = 2) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), channels, 4, 4, generator=generator)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    clients = [f"c{i}" for i, size in enumerate(sizes) for _ in range(size)]
    return Federation.from_arrays(x, y, clients, test_fraction=0).to(dtype=torch.float64)


METHODS = {
    "fedavg": (FedAvg(lr=0.1, batch_size=4), 1, "outputs", "all"),
    "local": (Local(lr=0.1, batch_size=4), 1, "outputs", "all"),
    "outputs": (PPFL(lr=0.1, batch_size=4), 2, "outputs", "all"),
    "predictions": (PPFL(lr=0.1, batch_size=4), 2, "predictions", "all"),
    "weights": (PPFL(lr=0.1, batch_size=4, weight_decay=0.01), 2, "weights", "all"),
    "one module": (PPFL(lr=0.1, batch_size=4), 2, "outputs", None),
}


@pytest.mark.parametrize("network", [flattened, Viewed])
@pytest.mark.parametrize("name", METHODS)
def test_convolutions_in_threads_give_the_same_as_the_loop(name: str, network) -> None:
    method, k, mix, canonical = METHODS[name]
    federation = images()
    torch.manual_seed(0)
    net = network().double()
    found = []
    for engine in (Loop(), Stacked(threads=2), Stacked(chunk=3, threads=2)):
        module = canonical or ("0" if network is flattened else "convolution")
        population = Population(net, k=k, mix=mix, canonical=module)
        ended = run(method, population, federation, engine=engine, rounds=3, seed=0)
        scores = evaluate(method, ended.problem, ended.transport, ended.server, ("train",)).splits["train"]
        found.append([leaf for one in ended.personal().values() for leaf in one] + [scores.loss])
        for name_, parameter in population.net.named_parameters():  # threads run copies of the network
            assert parameter.equal(dict(net.named_parameters())[name_])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize(("network", "takes_them"), [(flattened, True), (Viewed, False)])
def test_it_is_found_out_whether_a_network_takes_channels_last(network, takes_them: bool) -> None:
    federation = images().to(dtype=torch.float32)
    backend = Stacked().backend(Population(network(), k=1), federation.train, 3)
    assert backend.clients.channels_last == takes_them


def test_images_of_one_channel_have_the_gradients_of_a_plain_network() -> None:
    samples, net = images(channels=1).train, flattened(1).double()
    backend = Stacked().backend(Population(net, k=1), samples, 3)
    own = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in net.named_parameters()}
    velocity = {name: torch.empty_like(leaf) for name, leaf in own.items()}
    x, y, share = samples.x[:10].view(2, 5, 1, 4, 4), samples.y[:10].view(2, 5), torch.full((2, 5), 0.2).double()
    batch = Batch(x, y, share, torch.full((2,), 5.0), torch.zeros(2, 5, dtype=torch.long), None)
    losses = backend.add_gradients(own, velocity, 0.0, batch)
    for i in range(2):
        plain = copy.deepcopy(net)
        plain.load_state_dict({name: leaf[i] for name, leaf in own.items()})
        loss = nn.functional.cross_entropy(plain(x[i]), y[i])
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        for name, p in plain.named_parameters():
            torch.testing.assert_close(velocity[name][i], p.grad)


def test_threads_leave_the_number_of_cores_as_it_was() -> None:
    before = torch.get_num_threads()
    run(FedAvg(lr=0.1, batch_size=4), Population(make_net(), k=1), make_federation(), engine=Stacked(1, threads=3))
    assert torch.get_num_threads() == before


class Broken(FedAvg):
    def work(self, *arguments):
        raise RuntimeError("no work today")


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_a_thread_is_raised(threads: int) -> None:
    with pytest.raises(RuntimeError, match="no work today"):
        run(Broken(lr=0.1), Population(make_net(), k=1), make_federation(), engine=Stacked(1, threads=threads))


@pytest.mark.parametrize("settings", [{"chunk": 0}, {"threads": 0}])
def test_chunks_and_threads_that_make_no_sense_are_refused(settings: dict) -> None:
    with pytest.raises(SettingError, match=">= 1"):
        Stacked(**settings)


@pytest.mark.parametrize("batch", [1, 8, 1000])
def test_chunks_hold_every_client_once_and_batches_of_similar_size(batch: int) -> None:
    sizes = torch.tensor([5, 900, 31, 64, 2, 2, 128, 700, 33])
    chunks = chunks_of_similar_size(sizes, batch, most=4)
    assert sorted(torch.cat(chunks).tolist()) == list(range(len(sizes)))
    for chunk in chunks:
        widths = sizes[chunk].clamp_max(batch)
        assert len(chunk) <= 4 and 2 * int(widths.min()) >= int(widths.max())
        assert bool((sizes[chunk].diff() <= 0).all())


@pytest.mark.parametrize(("clients", "threads", "most"), [(100, 2, 27), (7, 4, 100), (1, 2, 5), (1000, 3, 8)])
def test_even_chunks_are_small_enough_and_as_many_for_every_thread(clients: int, threads: int, most: int) -> None:
    size = even_chunk(clients, threads, most)
    assert 1 <= size <= most
    assert -(-clients // size) <= threads * -(-clients // (threads * most))


def test_shares_of_the_work_are_balanced_and_complete() -> None:
    work = [7, 1, 9, 4, 4, 2, 8, 1]
    shares = balanced(work, 3)
    assert sorted(at for share in shares for at in share) == list(range(len(work)))
    loads = [sum(work[at] for at in share) for share in shares]
    assert max(loads) - min(loads) <= max(work)


@pytest.mark.parametrize(("most", "parts"), [(1, 2), (100, 1)])
def test_a_round_that_fits_into_one_chunk_is_not_divided_among_threads(monkeypatch, most: int, parts: int) -> None:
    monkeypatch.setattr(engines, "SMALL_MODEL", 0)
    monkeypatch.setattr(engines, "fitting_chunk", lambda *_: most)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    federation, engine = make_federation(), Stacked()
    backend = engine.backend(Population(make_net(), k=1), federation.train, federation.n_classes)
    worked = engine.run(list, federation.train.sizes, None, backend, federation.train)
    assert len(worked) == parts
    everyone = torch.cat([chunk for chunks in worked for chunk in chunks])
    assert sorted(everyone.tolist()) == list(range(federation.n_clients))


def test_a_tensor_that_leaves_in_two_places_is_counted_once() -> None:
    c = torch.zeros(3, 2)
    assert bytes_of({"a": c, "b": [c, torch.zeros(1, dtype=torch.float64)]}) == 3 * 2 * 4 + 8


def test_buffers_in_use_at_the_same_time_never_share_memory_and_are_used_again_after_their_frame() -> None:
    space, single, double = Workspace(), torch.zeros(()), torch.zeros((), dtype=torch.float64)
    with space.frame():
        a = space.empty((2,), single).fill_(1)
        with space.frame():
            space.empty((2,), double).fill_(2)
            inner = space.empty((4, 5), single).fill_(3)
        again = space.empty((2, 2), single).fill_(4)
        assert again.data_ptr() == inner.data_ptr()
        assert space.empty((100,), single).fill_(5).shape == (100,)
    assert a.tolist() == [1, 1] and again.tolist() == [[4, 4], [4, 4]]


@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_chunks_are_smaller_where_outputs_are_large(mix: str) -> None:
    sizes, vocabulary, k = (300,) * 40, 20_000, 5
    x, clients = torch.randn(sum(sizes), 4), [f"c{i}" for i, size in enumerate(sizes) for _ in range(size)]
    federation = Federation.from_arrays(x, torch.arange(len(x)) % vocabulary, clients, test_fraction=0)
    population = Population(nn.Linear(4, vocabulary), k=k, mix=mix)
    seen: list[int] = []
    backend = Stacked().backend(population, federation.train, vocabulary)
    Stacked(threads=1).run(
        lambda chunks: seen.extend(map(len, chunks)), federation.train.sizes, 8, backend, federation.train
    )
    per_sample = 4 * vocabulary * (k if mix == "outputs" else 1)
    assert sum(seen) == len(sizes)
    assert max(seen) * 8 * per_sample <= engines.WORKING_SET
    assert mix == "weights" or max(seen) == 1 or max(seen) * 300 * per_sample <= engines.KEPT_OUTPUTS
