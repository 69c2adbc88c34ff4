"""Run a method and collect the states: server, clients, and everyone's personal model."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch

from ppfl.algorithms.contract import Method, Problem, Rows, participants
from ppfl.core.draws import name_keys, uniform
from ppfl.core.population import Mixture, Networks
from ppfl.core.trees import named_leaves, tree_leaves, tree_map, with_leaves
from ppfl.io.codec import TYPES, size_of
from ppfl.server import InProcess, RoundReport, ServerState, begin, client_states, make_problem, train
from ppfl.server.loop import MAIN
from ppfl.sites import Engine, Loop, Restore, SavedStates, Site, Stacked, Train
from ppfl.sites.messages import decode, encode
from ppfl.sites.states import states_of

ENGINES = {"loop": Loop(), "stacked": Stacked(), "chunks-of-2": Stacked(2), "threads": Stacked(2, threads=2)}


class BytesTransport(InProcess):
    """Every message becomes bytes and comes back from bytes, so that nothing passes by reference."""

    carried = 0  # bytes of tensors, counted here; bytes_carried is what the package says

    def deliver(self, site, requests):
        sent = decode(encode(list(requests)))
        received = decode(encode(super().deliver(site, sent)))
        self.carried += size_of(sent) + size_of(received)
        return received


class Trained(NamedTuple):
    """A run so far."""

    method: Method
    problem: Problem
    transport: InProcess
    states: list[ServerState]  # before the first round, and after every round
    clients: list[Rows]  # the same of all clients
    reports: list[RoundReport]
    saved: SavedStates  # what the sites have saved of the clients after the last round

    @property
    def state(self) -> ServerState:
        return self.states[-1]

    @property
    def server(self):
        return self.state.server

    def client_tree(self, at: int = -1):
        """Client states as the method's own tree, leaves (M, ...)."""
        return with_leaves(self.method.init_client(self.problem.population), self.clients[at].values)

    def models(self, at: int = -1):
        """The personal models of all clients."""
        shared, own = self.method.send(self.problem, self.states[at].server, None, None)
        return self.method.model(self.transport.sites[0].backend, shared, own, self.client_tree(at))

    @property
    def memberships(self):
        return self.models().memberships

    def personal(self) -> dict[str, list[torch.Tensor]]:
        """Every client's personal model and membership, by name."""
        models = self.models()
        return {client: tensors(of_client(models, i)) for i, client in enumerate(self.problem.roster.ids)}

    def everything(self):
        """All tensors there are after the last round."""
        return self.server, self.clients[-1].values

    def by_client(self) -> dict[str, list[torch.Tensor]]:
        """Every client's personal model and all that its site keeps of it, by name."""
        ids, kept = self.clients[-1].ids, self.clients[-1].values.values()
        rows = {client: [leaf[at] for leaf in kept] for at, client in enumerate(ids)}
        return {client: [*personal, *rows[client]] for client, personal in self.personal().items()}


def connect(federation, population, engine: Engine | str = "loop", kind=InProcess, sites=1, **settings) -> InProcess:
    """A transport to the federation's clients, spread over so many sites. settings: of every site."""
    engine = ENGINES[engine] if isinstance(engine, str) else engine
    if sites == 1:
        return kind(Site(federation, population, engine, **settings))
    parts = [federation.select(federation.ids[at::sites]) for at in range(sites)]
    return kind(
        *(Site(part, population, engine, name=f"site-{at}", **settings) for at, part in enumerate(parts)),
        order=federation.ids,
    )


def run(
    method, population, federation, *, engine="loop", rounds=4, seed=1, affinity=None, dropout=0.0, until=None,
    resume: Trained | None = None, kind=InProcess, sites=1, on_disk=None, filters=None,
) -> Trained:  # fmt: skip
    """From the start, or from where another run is, to the last round or `until`."""
    transport = connect(federation, population, engine, kind, sites, states_on_disk=on_disk, filters=filters)
    problem = make_problem(population, transport, affinity, rounds=rounds, seed=seed)
    state = begin(method, problem, transport, dropout=dropout)
    if resume is not None:
        state = resume.state
        transport.ask([Restore(MAIN, state.exchange, resume.saved)])
    saved = client_states(transport, state)
    states, clients, reports = [state], [of_all_clients(method, problem, saved)], []
    rounds_left = None if until is None else until - state.round
    for state, report in islice(train(method, problem, transport, state), rounds_left):
        saved = client_states(transport, state)
        states.append(state)
        clients.append(of_all_clients(method, problem, saved))
        reports.append(report)
    return Trained(method, problem, transport, states, clients, reports, saved)


def of_client(models, i: int):
    """The models of one client alone."""
    if isinstance(models, Mixture):
        return models._replace(memberships=models.memberships[i : i + 1])
    return tree_map(lambda leaf: leaf[i : i + 1], models) if isinstance(models, Networks) else models


def of_all_clients(method: Method, problem: Problem, saved: SavedStates) -> Rows:
    """The states of all clients, leaves (M, ...), also of those that were never written to."""
    ids = problem.roster.ids
    return Rows(ids, named_leaves(states_of(method.init_client(problem.population), saved.rows, ids)))


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def assert_same(a, b, **tolerance):
    for one, other in zip(tensors(a), tensors(b), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


class Recording(InProcess):
    """A transport that remembers every request and its reply."""

    def __init__(self, *sites, order=None):
        self.log = []
        super().__init__(*sites, order=order)

    def deliver(self, site, requests):
        replies = super().deliver(site, requests)
        self.log += zip(requests, replies, strict=True)
        return replies

    def exchanges(self, round=None) -> list:
        """What clients were asked to work on, in a round or in all of them, with the replies."""
        asked = [(request, reply) for request, reply in self.log if isinstance(request, Train)]
        return [exchange for exchange in asked if round is None or exchange[0].round == round]


def kinds_of_messages(*packages: str) -> list[type]:
    """All that these packages may send between server and sites, by name."""
    return [kind for _, kind in sorted(TYPES.items()) if kind.__module__.startswith(packages)]


def at_start(method, population, federation, *, models=None, memberships=None, **settings) -> Trained:
    """A run before its first round, to be resumed, with these models and memberships instead of the method's own."""
    start = run(method, population, federation, until=0, **settings)
    state, (clients,) = start.state, start.clients
    if models is not None:
        state = state._replace(server=state.server._replace(shared=models))
    if memberships is not None:
        state = state._replace(server=state.server._replace(memberships=memberships))
        known = {"membership": memberships, "placed": torch.ones_like(memberships[:, 0])}
        clients = clients._replace(values={**clients.values, **known})
    return start._replace(states=[state], clients=[clients], saved=SavedStates(clients))


def luck(seed: int, purpose: str, ids: Sequence[str], *keys: int) -> torch.Tensor:
    """The numbers in [0, 1) that clients draw for a purpose ("dropout", "participants"), (M,); keys: the round."""
    return uniform(seed, purpose, *keys, name_keys(ids))


def positions_of(problem, method, round) -> list[int]:
    """Where the clients of a round stand, as a method without plans of its own draws them."""
    who = participants(problem, method.participation, round)
    everyone = problem.roster.ids if who is None else who
    return [problem.roster.position[client] for client in everyone]


def networks_of_clients(trained: Trained) -> list[dict[str, torch.Tensor]]:
    """Every client's personal network, parameters by name."""
    models = trained.models()
    assert not isinstance(models, Mixture)
    own, clients = isinstance(models, Networks), range(trained.problem.n_clients)
    return [{name: leaf[i] if own else leaf for name, leaf in models.values.items()} for i in clients]


def losses_of_clients(trained: Trained, at: int = -1) -> torch.Tensor:
    """Mean loss of every client's personal model on its own training data, (M,)."""
    models, (site,) = trained.models(at), trained.transport.sites
    found = []
    for i in range(trained.problem.n_clients):
        samples = site.federation.train.client(i)
        found.append(site.backend.evaluate(of_client(models, i), samples.x[None], samples.y[None])[1].mean())
    return torch.stack(found)
