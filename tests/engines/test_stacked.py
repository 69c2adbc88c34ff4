"""The stacked engine: threads, images, and what it does not leave behind."""

import pytest
import torch
from ppfl.engines import Loop, Stacked, begin, evaluate, pose, train
from ppfl.engines.chunks import bytes_of, chunks_of_like_size, even_chunk
from torch import nn

from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.workspace import Workspace
from ppfl.data import Federation
from support import make_federation, make_net


class Viewed(nn.Module):
    """A network that takes images in one layout only."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.convolution(x).relu().view(len(x), -1))


def flattened() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def images(sizes=(6, 9, 3, 4, 8)) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 2, 4, 4, generator=generator)
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
def test_convolutions_in_threads_are_the_loops(name: str, network) -> None:
    method, k, mix, canonical = METHODS[name]
    federation = images()
    torch.manual_seed(0)
    net = network().double()
    ended = []
    for engine in (Loop(), Stacked(threads=2), Stacked(chunk=3, threads=2)):
        module = canonical or ("0" if network is flattened else "convolution")
        population = Population(net, k=k, mix=mix, canonical=module)
        problem = pose(population, federation, None, rounds=3, seed=0)
        *_, (state, _) = train(method, problem, federation, engine, begin(method, problem))
        personal = method.personal(state.server, state.clients)
        ended.append([*personal.shared.leaves(), evaluate(problem, personal, federation, "train").loss])
        for name_, parameter in population.net.named_parameters():  # threads run copies of the network
            assert parameter.equal(dict(net.named_parameters())[name_])
    for other in ended[1:]:
        for a, b in zip(ended[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-8)


def test_a_network_says_whether_it_takes_channels_last() -> None:
    x = torch.randn(2, 2, 4, 4)
    y = torch.tensor([0, 2])
    assert Population(flattened(), k=1).fit_to(x, y, 3).clients.channels_last
    assert not Population(Viewed(), k=1).fit_to(x, y, 3).clients.channels_last


def test_threads_give_back_the_cores_they_found() -> None:
    before = torch.get_num_threads()
    federation = make_federation((7, 12, 20, 5))
    method = FedAvg(lr=0.1, batch_size=4)
    problem = pose(Population(make_net(), k=1), federation, None, rounds=2, seed=0)
    list(train(method, problem, federation, Stacked(chunk=1, threads=3), begin(method, problem)))
    assert torch.get_num_threads() == before


def test_an_error_in_a_thread_is_raised() -> None:
    class Broken(FedAvg):
        def work(self, *arguments):
            raise RuntimeError("no work today")

    federation = make_federation((7, 12, 20, 5))
    problem = pose(Population(make_net(), k=1), federation, None, rounds=1, seed=0)
    with pytest.raises(RuntimeError, match="no work today"):
        list(train(Broken(lr=0.1), problem, federation, Stacked(1, threads=2), begin(Broken(lr=0.1), problem)))


@pytest.mark.parametrize("settings", [{"chunk": 0}, {"threads": 0}])
def test_chunks_and_threads_that_make_no_sense_are_refused(settings: dict) -> None:
    with pytest.raises(SettingError, match=">= 1"):
        Stacked(**settings)


@pytest.mark.parametrize("batch", [1, 8, 1000])
def test_chunks_hold_every_client_once_and_batches_of_like_size(batch: int) -> None:
    sizes = torch.tensor([5, 900, 31, 64, 2, 2, 128, 700, 33])
    chunks = chunks_of_like_size(sizes, batch, most=4)
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


def test_a_tensor_that_leaves_in_two_places_is_counted_once() -> None:
    c = torch.zeros(3, 2)
    assert bytes_of({"a": c, "b": [c, torch.zeros(1, dtype=torch.float64)]}) == 3 * 2 * 4 + 8


def test_a_workspace_keeps_kinds_of_numbers_apart_and_grows() -> None:
    space = Workspace()
    small = space.take("a", (2,), torch.zeros(())).fill_(1)
    space.take("a", (2,), torch.zeros((), dtype=torch.float64)).fill_(2)
    space.take("b", (2,), torch.zeros(())).fill_(3)
    assert small.tolist() == [1, 1]
    assert space.take("a", (4, 5), torch.zeros(())).shape == (4, 5)
