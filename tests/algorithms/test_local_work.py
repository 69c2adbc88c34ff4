"""What a client computes: batches, local SGD, gradients for its membership and the memory they take, catching up."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppfl
from kit.local_work import backend_for, limit_outputs, local_data, slope_and_loss
from kit.problems import make_federation, make_net
from kit.training import losses_of_clients, positions_of, run
from ppfl.algorithms.local.memberships import MembershipSteps
from ppfl.algorithms.local.model_losses import losses_of_models
from ppfl.algorithms.local.sgd import train_networks
from ppfl.algorithms.local.start import gradient_sketch
from ppfl.algorithms.local.stationarity import Stationarity, stationarity_upload

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 1), dtype=torch.float64)
LARGEST_FIRST = [2, 1, 0, 3, 4]
NET = make_net(dtype=torch.float64)

# ---------------------------------------------------------------------- batches


def all_of(batches) -> list:
    """As a list, with copies of the inputs: a batch overwrites those of the one before it."""
    return [batch._replace(x=batch.x.clone()) for batch in batches]


def samples_seen(batches, row: int) -> list[list[tuple]]:
    """Each step's real samples of one client, in order."""
    return [
        [tuple(x.tolist()) for x, w in zip(batch.x[row], batch.share[row], strict=True) if w > 0]
        for batch in batches
        if row < len(batch.x)
    ]


def samples_of(client: int) -> list[tuple]:
    return [tuple(x.tolist()) for x in FEDERATION.train.client(client).x]


@given(st.integers(1, 25), st.integers(1, 3))
def test_every_epoch_visits_every_sample_once_and_steps_are_as_many_for_all(batch_size: int, epochs: int) -> None:
    data = local_data(FEDERATION, LARGEST_FIRST)
    batches = all_of(data.steps(batch_size, epochs=epochs))
    for row, client in enumerate(LARGEST_FIRST):
        own, steps = sorted(samples_of(client)), samples_seen(batches, row)
        per_epoch = -(-len(own) // batch_size)
        assert len(steps) == epochs * per_epoch == int(data.count_steps(batch_size, epochs)[row])
        for epoch in range(epochs):
            assert sorted(itertools.chain(*steps[epoch * per_epoch : (epoch + 1) * per_epoch])) == own
        assert all(len(step) <= batch_size for step in steps)
    steps = list(data.steps(batch_size, steps=epochs))
    assert [len(batch.x) for batch in steps] == [5] * epochs  # so many steps of everyone
    assert data.count_steps(batch_size, None, epochs).tolist() == [epochs] * 5


def test_a_clients_batches_do_not_depend_on_its_chunk_or_on_what_memory_held_before() -> None:
    alone = samples_seen(local_data(FEDERATION, [1]).steps(5, epochs=2), 0)
    for used in (False, True):
        data = local_data(FEDERATION, [2, 1, 4], used_memory=used)
        assert samples_seen(all_of(data.steps(5, epochs=2)), 1) == alone


def test_seed_round_and_purpose_change_the_order_of_samples_and_the_keys_of_masks() -> None:
    def order_and_keys(seed=0, round=0, purpose="theta", clients=(2, 1, 4)):
        data = local_data(FEDERATION, list(clients), seed, round, masks=True)
        batches = all_of(data.steps(4, epochs=2, purpose=purpose))
        return str(samples_seen(batches, 0)), [batch.keys.tolist() for batch in batches]

    others = [order_and_keys(), order_and_keys(seed=1), order_and_keys(round=1), order_and_keys(purpose="memberships")]
    assert len({order for order, _ in others}) == 4
    keys = [key for _, steps in others for step in steps for key in step]
    assert len(set(keys)) == len(keys)  # of every client and step too
    assert [step[0] for step in others[0][1]] == [step[0] for step in order_and_keys(clients=(2,))[1]]
    data = local_data(FEDERATION, [2], masks=True)
    assert all(batch.keys is None for batch in data.everything(block=2048))  # dropout is off
    assert all(batch.keys is None for batch in local_data(FEDERATION, [2]).steps(4, epochs=1))


@pytest.mark.parametrize("block", [1, 3, 100])
def test_everything_is_everything_once_and_rows_say_where_samples_stand(block: int) -> None:
    data = local_data(FEDERATION, [2, 0, 4])
    blocks = all_of(data.everything(block))
    for row, client in enumerate([2, 0, 4]):
        assert list(itertools.chain(*samples_seen(blocks, row))) == samples_of(client)
    for batch in itertools.chain(data.steps(4, epochs=2), data.steps(None, epochs=2), data.everything(block)):
        assert FEDERATION.train.x[batch.rows].equal(batch.x)
        assert FEDERATION.train.y[batch.rows].equal(batch.y)
    (whole,) = data.steps(None, epochs=1)
    assert whole.real.tolist() == FEDERATION.train.sizes[[2, 0, 4]].tolist()
    torch.testing.assert_close(whole.share.sum(1), torch.ones(3, dtype=torch.float64))


def test_samples_that_lie_side_by_side_are_not_copied() -> None:
    federation = make_federation(sizes=(6, 6, 6))
    data = local_data(federation, [1, 2])
    for batch in (next(iter(data.steps(None, epochs=1))), next(iter(data.everything(block=2048)))):
        assert batch.x.data_ptr() == federation.train.x[6:].data_ptr()
        assert batch.x.equal(federation.train.x[6:].reshape(2, 6, -1))


# ---------------------------------------------------------------------- local SGD

SETTINGS = ppfl.FedAvg(lr=0.2, momentum=0.9, weight_decay=0.05, batch_size=4, local_epochs=2)


def copies_of_network() -> dict[str, torch.Tensor]:
    return {name: p.detach().repeat(5, *(1 for _ in p.shape)) for name, p in NET.named_parameters()}


@pytest.mark.parametrize("kind", ["autograd", "fastest"])
def test_every_client_takes_the_steps_of_torch_optim(kind: str) -> None:
    networks, data = copies_of_network(), local_data(FEDERATION, LARGEST_FIRST, seed=3)
    loss = train_networks(backend_for(FEDERATION, ppfl.Population(NET, k=1), kind), networks, data, SETTINGS, lr=0.2)
    for row in range(5):
        twin, seen = copy.deepcopy(NET), []
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.2, momentum=0.9, weight_decay=0.05)
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


# ---------------------------------------------------------------------- gradients for memberships


@pytest.mark.parametrize(
    ("kind", "mix", "canonical", "block", "kept"),  # bytes of a block of outputs, and of all that are kept
    [
        ("autograd", "outputs", "all", 2**30, 2**30),
        ("fastest", "outputs", "all", 600, 2**30),
        ("fastest", "outputs", "all", 600, 1500),
        ("autograd", "outputs", "0", 600, 1500),
        ("fastest", "outputs", "0", 600, 0),
        ("autograd", "predictions", "2", 600, 0),
        ("fastest", "predictions", "2", 600, 1500),
        ("fastest", "predictions", "2", 600, 2**30),
        ("autograd", "weights", "all", 600, 1500),
        ("fastest", "weights", "all", 2**30, 2**30),
    ],
)
def test_full_gradients_are_those_of_all_data_of_clients_of_any_size(
    kind, mix, canonical, block, kept, monkeypatch
) -> None:
    limit_outputs(monkeypatch, block=block, kept=kept)
    population = ppfl.Population(NET, k=3, mix=mix, canonical=canonical)
    backend, models = backend_for(FEDERATION, population, kind), population.initial_models(1, distinct=True)
    c = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    c = c / c.sum(1, keepdim=True)
    data = local_data(FEDERATION, LARGEST_FIRST)
    for gradient in MembershipSteps(backend, models, data, batch_size=None).steps(2):
        slopes, losses = gradient(c)
        for row, client in enumerate(LARGEST_FIRST):
            expected = slope_and_loss(backend, models, c[row], FEDERATION.train.client(client))
            torch.testing.assert_close((slopes[row], losses[row]), expected)
        c = c.flip(0)  # the same outputs serve other memberships


def test_gradients_on_batches_are_those_of_other_batches_than_the_models_see() -> None:
    population, data = ppfl.Population(NET, k=3, mix="predictions"), local_data(FEDERATION, LARGEST_FIRST)
    backend, models = backend_for(FEDERATION, population), population.initial_models(1, distinct=True)
    c = torch.full((5, 3), 1 / 3, dtype=torch.float64)
    batches = [batch.rows.clone() for batch in data.steps(4, steps=2, purpose="memberships")]
    found = [g(c) for g in MembershipSteps(backend, models, data, batch_size=4).steps(2)]
    for rows, (slopes, losses) in zip(batches, found, strict=True):
        own = FEDERATION.train.where(torch.isin(torch.arange(45), rows[0]))
        torch.testing.assert_close((slopes[0], losses[0]), slope_and_loss(backend, models, c[0], own))
    of_models = next(iter(data.steps(4, steps=2))).rows[0]
    assert sorted(of_models.tolist()) != sorted(batches[0][0].tolist())


K, WORDS, SAMPLES = 3, 200, 300
SMALL_BLOCK, SMALL_KEPT = 2**16, 2**20  # bytes; a client's outputs of K models are 1.4 MB


class LargestTensor(TorchDispatchMode):
    """Watches what operations give."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


def of_two_clients(mix: str, *shape: int):
    """A backend, models, memberships, and data of two clients with many outputs: a target has so many words, or one."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(2 * SAMPLES, *shape, 4, generator=drawn, dtype=torch.float64)
    y = torch.randint(WORDS, (2 * SAMPLES, *shape), generator=drawn)
    if shape:
        y[:, -1] = torch.where(x[:, 0, 0] > 0, y[:, -1], -100)
    clients = ["a"] * SAMPLES + ["b"] * SAMPLES
    federation = ppfl.Federation.from_arrays(x, y, clients, test_fraction=0).to(dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        population = ppfl.Population(nn.Linear(4, WORDS).double(), k=K, mix=mix)
    c = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], dtype=torch.float64)
    models = population.initial_models(1, distinct=True)
    return backend_for(federation, population), models, c, local_data(federation, [0, 1])


def full_steps(backend, models, c, data) -> None:
    for gradient in MembershipSteps(backend, models, data, batch_size=None).steps(2):
        gradient(c)


PASSES: dict[str, Callable[..., object]] = {
    "steps": full_steps,
    "best": lambda backend, models, c, data: MembershipSteps(backend, models, data, None).best(c, 2),
    "losses of models": lambda backend, models, c, data: list(losses_of_models(backend, models, data)),
    "sketch": lambda backend, models, c, data: gradient_sketch(backend, models, data, 0),
    "stationarity": lambda backend, models, c, data: stationarity_upload(
        backend, Stationarity(0.1), models, {}, c, data, 0.0
    ),
}


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("name", PASSES)
def test_passes_over_all_data_never_hold_more_outputs_than_a_block_has(name: str, mix: str, monkeypatch) -> None:
    limit_outputs(monkeypatch, block=SMALL_BLOCK, kept=0)
    setting = of_two_clients(mix)
    with torch.no_grad(), LargestTensor() as seen:
        PASSES[name](*setting)
    assert SMALL_BLOCK // 4 < seen.bytes <= SMALL_BLOCK


def test_no_more_outputs_are_kept_than_the_budget_allows(monkeypatch) -> None:
    limit_outputs(monkeypatch, block=SMALL_BLOCK, kept=SMALL_KEPT)
    backend, models, c, data = of_two_clients("outputs")
    made: list[int] = []

    def outputs(models, x):
        found = type(backend).outputs(backend, models, x)
        made.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(backend, "outputs", outputs)
    everything = 2 * SAMPLES * K * WORDS * 8
    first, second = MembershipSteps(backend, models, data, None).steps(2)
    kept = sum(made)
    assert SMALL_KEPT - SMALL_BLOCK <= kept <= SMALL_KEPT
    for gradient in (first, second):
        made.clear()
        gradient(c)
        assert sum(made) == everything - kept  # the rest runs again


@pytest.mark.parametrize("shape", [(), (3,)], ids=["one word", "several words"])
def test_mixed_predictions_of_labels_keep_likelihoods_alone(shape: tuple[int, ...], monkeypatch) -> None:
    limit_outputs(monkeypatch, block=2**25, kept=0)
    backend, models, c, data = of_two_clients("predictions", *shape)
    gradient, _ = MembershipSteps(backend, models, data, None).steps(2)
    monkeypatch.setattr(backend, "outputs", None)  # what was kept is enough
    slopes, losses = gradient(c)
    for i in range(2):
        expected = slope_and_loss(backend, models, c[i], data.samples.client(i))
        torch.testing.assert_close((slopes[i], losses[i]), expected)


# ---------------------------------------------------------------------- memberships of clients that sat out rounds

SIX = make_federation((7, 12, 20, 5, 3, 9), dtype=torch.float64)
ROUNDS, MIXES = 8, ["outputs", "weights"]
# from K draws and even memberships, with a step that is too short to change a model
STILL = {"lr": 1e-12, "momentum": 0.0, "start": "uniform", "warmup": 0, "membership_steps": 1, "membership_lr": 0.3}


def caught_up(mix: str, rounds: int = ROUNDS, until: int | None = None, **settings):
    method, population = ppfl.PPFL(**STILL | settings), ppfl.Population(NET, k=2, mix=mix)
    return run(method, population, SIX, rounds=rounds, until=until, seed=2)


def visits(found) -> list[list[int]]:
    """Who takes part, round by round."""
    return [positions_of(found.problem, found.method, t) for t in range(ROUNDS)]


def comebacks(found) -> list[tuple[int, int]]:
    """Round and client of every visit that follows missed rounds; nobody can miss the first one."""
    last, found_back = dict.fromkeys(range(6), 0), []
    for t, who in enumerate(visits(found)):
        found_back += [(t, client) for client in who if t > last[client] + 1]
        last |= dict.fromkeys(who, t)
    assert len(found_back) > 3
    return found_back


@pytest.mark.parametrize("mix", MIXES)
def test_more_steps_make_up_for_every_missed_round(mix: str) -> None:
    """Where models stand still, a client that comes back is where it would be had it never been away."""
    some, never_away, left_behind = (
        caught_up(mix, participation=share, catch_up=rule)
        for share, rule in ((0.4, "steps"), (1.0, "none"), (0.4, "none"))
    )
    for t, client in comebacks(some):
        steps = t + (client in visits(some)[0])  # the first round counts as missed for nobody
        expected = never_away.models(steps).memberships[client]
        torch.testing.assert_close(some.models(t + 1).memberships[client], expected, atol=1e-8, rtol=1e-7)
        assert not torch.allclose(left_behind.models(t + 1).memberships[client], expected, atol=1e-4)


@pytest.mark.parametrize("mix", MIXES)
def test_longer_steps_are_as_many_times_as_long(mix: str) -> None:
    """log c_1 - log c_0 moves along the gradient: at the first visit, from even memberships, 1 + m times as far."""
    longer, usual = (caught_up(mix, participation=0.4, catch_up=rule) for rule in ("step_size", "none"))
    seen: set[int] = set()
    for t, who in enumerate(visits(usual)):
        for client in set(who) - seen:
            moved = [float(one.models(t + 1).memberships[client].log().diff()) for one in (longer, usual)]
            assert moved[0] == pytest.approx(max(1, t) * moved[1], rel=1e-6)
        seen |= set(who)
    assert len(seen) == 6


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("order", ["alternating", "random"])
def test_a_solved_membership_fits_as_well_as_the_best_of_a_grid(mix: str, order: str) -> None:
    found = caught_up(mix, participation=0.4, catch_up="solve", order=order, block_probability=0.99)
    grid = torch.linspace(0, 1, 51, dtype=torch.float64)
    best = torch.stack([losses_with(found, torch.stack([share, 1 - share])) for share in grid]).amin(0)
    for t, client in comebacks(found):
        loss = losses_with(found, found.models(t + 1).memberships[client])[client]
        assert loss <= best[client] + 1e-3 * (1 + best[client].abs())


def losses_with(found, c: torch.Tensor) -> torch.Tensor:
    """f_i (M,) at the end of a run, where all clients had this membership (K,)."""
    rows = c.expand(6, -1)
    values = {**found.clients[-1].values, "membership": rows, "rounds": torch.ones(len(rows), dtype=rows.dtype)}
    return losses_of_clients(found._replace(clients=[found.clients[-1]._replace(values=values)]))


@pytest.mark.parametrize("rule", ["none", "step_size", "steps", "solve"])
def test_frozen_memberships_and_those_in_the_warm_up_do_not_move(rule: str) -> None:
    for settings in ({"membership_steps": 0}, {"warmup": 100, "membership_steps": 5}):
        found = caught_up("outputs", 60, 5, participation=0.4, catch_up=rule, **settings)
        assert bool((found.memberships == 0.5).all())
