"""The local steps of a round and nothing else, and its passes over memory and nothing else.

Local steps: the models of a round's clients are side by side, as in ppfl, on one batch that lies ready. Passes over
memory: samples of random clients are gathered, and each client's model is subtracted, measured and added up. What is
left of a round's time is Python: drawing clients, requests, states, checks and the server.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from workloads import Workload

from ppfl import Population
from ppfl.core.backends import Backend, Batch, make_backend
from ppfl.core.simplex import mirror_step, raise_to_floor
from ppfl.core.trees import Params


def steps_alone(
    workload: Workload, lr: float, membership_lr: float, k: int = 1, mix: str = "weights", steps: int = 0
) -> Callable[[], tuple[Params, Tensor]]:
    """One step of every client's models, after so many of its membership; the clients have one batch each."""
    population = Population(workload.net, k=k, mix=mix, loss=workload.loss)
    batch = first_batch(workload)
    backend = make_backend(population, batch.x[0], batch.y[0], workload.federation.n_classes)
    models, even = population.initial_models(0, distinct=True), batch.share.new_full((len(batch.x), k), 1 / k)

    @torch.no_grad()
    def one_round() -> tuple[Params, Tensor]:
        with backend.space.frame():
            c = moved_memberships(backend, models, even, batch, steps, membership_lr)
            if population.collapses:
                values = backend.mixed_weights(models, c)
                velocity = backend.space.empty_like(values)
                backend.add_gradients(values, velocity, 0.0, batch)
            else:
                values = backend.space.copies(models, len(c))
                velocity = backend.space.empty_like(values)
                backend.add_model_gradients(values, velocity, 0.0, c, batch)
            for name, value in values.items():
                value.add_(velocity[name], alpha=-lr)
            return values, c

    return one_round


def passes_alone(workload: Workload) -> Callable[[], Params]:
    """What a round of FedAvg does to its samples and models besides computing with them."""
    population = Population(workload.net, k=1, loss=workload.loss)
    federation, shared = workload.federation, population.initial_network()
    x, clients, size = federation.train.x, *clients_and_samples(workload)
    drawn = torch.randperm(federation.n_clients, generator=torch.Generator().manual_seed(0))[:clients]
    rows = (drawn[:, None] * size + torch.arange(size)).flatten()
    into, share = x.new_empty(len(rows), *x.shape[1:]), x.new_full((1, clients), 1 / clients)
    ends = {name: value.repeat(clients, *[1] * value.dim()) for name, value in shared.items()}

    def one_round() -> Params:
        torch.index_select(x, 0, rows, out=into)
        after = {}
        for name, value in ends.items():
            change = value.sub_(shared[name]).flatten(1)
            torch.linalg.vector_norm(change, dim=1)
            after[name] = shared[name] + (share @ change).view(shared[name].shape)
        return after

    return one_round


def clients_and_samples(workload: Workload) -> tuple[int, int]:
    """How many clients take part in a round, and how many samples each client has."""
    federation = workload.federation
    return max(1, round(workload.participation * federation.n_clients)), len(federation.train.client(0).y)


def first_batch(workload: Workload) -> Batch:
    """All samples of the first clients, as many as take part in a round; all have the same number of samples."""
    federation, (clients, size) = workload.federation, clients_and_samples(workload)
    rows = torch.arange(clients * size).view(clients, size)
    x, y = federation.train.x[rows], federation.train.y[rows]
    return Batch(x, y, x.new_full(rows.shape, 1 / size), x.new_full((clients,), size), rows, None)


def moved_memberships(
    backend: Backend, models: Params, c: Tensor, batch: Batch, steps: int, membership_lr: float
) -> Tensor:
    """Memberships after so many steps; the outputs are kept where that is possible."""
    loss_at = None
    if steps and backend.caches_outputs:
        loss_at = backend.membership_loss(backend.outputs(models, batch.x), batch.y, batch.share)
    for _ in range(steps):
        slopes, _ = backend.membership_gradients(models, c, batch) if loss_at is None else loss_at(c)
        c = raise_to_floor(mirror_step(c, slopes, membership_lr))
    return c
