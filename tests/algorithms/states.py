"""First states with chosen values, and what tests read from the states of a run."""

import torch

from ppfl.algorithms.contract import Share, participants
from ppfl.core.models import Mixture, Networks
from ppfl.server import InProcess, begin, client_states, make_problem
from ppfl.sites import Train
from training import Trained, connect, copied


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


def at_start(
    method, population, federation, *, rounds, seed=1, affinity=None, models=None, memberships=None
) -> Trained:
    """A run before its first round, to be resumed, with these models and memberships instead of the method's own."""
    transport = connect(federation, population)
    problem = make_problem(population, transport, affinity, rounds=rounds, seed=seed)
    state = begin(method, problem, transport)
    clients = copied(client_states(transport, state))
    if models is not None:
        state = state._replace(server=state.server._replace(shared=models))
    if memberships is not None:
        state = state._replace(server=state.server._replace(memberships=memberships))
        known = {"membership": memberships, "rounds": torch.ones_like(memberships[:, 0])}
        clients = clients._replace(values={**clients.values, **known})
    return Trained(method, problem, transport, [state], [clients], [])


def positions_of(problem, method, round) -> list[int]:
    """Where the clients of a round stand, as a method without plans of its own draws them."""
    who = participants(problem, method.participation, round)
    everyone = problem.roster.ids if isinstance(who, Share) else who
    return [problem.roster.position[client] for client in everyone]


def networks_of_clients(trained: Trained, at: int = -1) -> list[dict[str, torch.Tensor]]:
    """Every client's personal network, parameters by name."""
    models = trained.models(at)
    assert not isinstance(models, Mixture)
    own = isinstance(models, Networks)
    return [{name: leaf[i] if own else leaf for name, leaf in models.values.items()} for i in _clients(trained)]


def losses_of_clients(trained: Trained, at: int = -1) -> torch.Tensor:
    """Mean loss of every client's personal model on its own training data, (M,)."""
    models, (site,) = trained.models(at), trained.transport.sites
    found = []
    for i in _clients(trained):
        one = models
        if isinstance(models, Networks):
            one = Networks({name: leaf[i : i + 1] for name, leaf in models.values.items()})
        if isinstance(models, Mixture):
            one = Mixture(models.models, models.memberships[i : i + 1])
        samples = site.federation.train.client(i)
        found.append(site.backend.evaluate(one, samples.x[None], samples.y[None])[1].mean())
    return torch.stack(found)


def _clients(trained: Trained) -> range:
    return range(trained.problem.n_clients)
