"""`fit` and what it returns: the door for Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .algorithms import PPFL
from .algorithms.contract import Method, Problem, Rows
from .callback_list import OnRound, running
from .core.affinity import Affinity
from .core.backends import Backend
from .core.errors import DataError, SettingError
from .core.models import Mixture, Models
from .core.population import Population
from .core.trees import with_leaves
from .data import Federation
from .data.federation import Split
from .data.inputs import scaled
from .server import (
    Evaluation,
    InProcess,
    Record,
    ServerState,
    Watch,
    begin,
    choose_lr,
    client_states,
    make_problem,
    train_and_measure,
)  # fmt: skip
from .server.evaluation import read_evaluation
from .server.loop import MAIN, setup_sites
from .sites import Engine, Evaluate, Metrics, Restore, Site, as_metrics, engine_by_name

if TYPE_CHECKING:
    from .report.fitted_card import FittedFacts


@dataclass(frozen=True)
class Fitted:
    """A trained population: who the clients are, and a model for each.

    >>> from ppfl.data import digits_federation
    >>> federation = digits_federation()
    >>> fitted = fit(Population(torch.nn.Linear(64, 10), k=4), federation, PPFL(lr=0.1), rounds=3)
    >>> fitted
    <Fitted PPFL(lr=0.1), 3 rounds, 40 clients, accuracy ...%, shares ...>
    >>> fitted.membership("g0-c0").shape
    torch.Size([4])
    >>> fitted.predict("g0-c0", torch.rand(2, 64)).shape  # probabilities of ten classes
    torch.Size([2, 10])
    >>> fitted.evaluate(federation)
    <Evaluation of 40 clients with 360 samples: score ...>
    """

    problem: Problem
    method: Method
    state: ServerState
    clients: Rows = field(repr=False)  # the states of the clients, by id
    backend: Backend = field(repr=False)
    engine: Engine = field(repr=False)
    history: list[Record] = field(repr=False)

    def __repr__(self) -> str:
        return self._facts().line()

    def _repr_html_(self) -> str:
        return self._facts().card().html()

    @property
    def ids(self) -> tuple[str, ...]:
        return self.problem.roster.ids

    @property
    def memberships(self) -> Tensor:
        """(M, K), one row per client, in the order of `ids`."""
        models = self.models(self.ids)
        return models.memberships if isinstance(models, Mixture) else torch.ones(len(self.ids), 1)

    def membership(self, client: str) -> Tensor:
        """(K,) of one client, by name."""
        self._positions([client])
        models = self.models([client])
        return models.memberships[0] if isinstance(models, Mixture) else torch.ones(1)

    def models(self, clients: Sequence[str]) -> Models:
        """The personal models of these clients."""
        at = self._positions(clients)
        shared, own = self.method.send(self.problem, self.state.server, tuple(clients), None)
        rows = {name: leaf[at.to(leaf.device)] for name, leaf in self.clients.values.items()}
        template = self.method.init_clients(self.problem.population, self.problem.seed, clients)
        return self.method.model(self.backend, shared, own, with_leaves(template, rows))

    def predict(self, client: str, x: Tensor, *, hard: bool = False) -> Tensor:
        """Mean predictions (B, ...) of a client's own model on x (B, ...)."""
        models = self.models([client])
        with torch.no_grad():
            return self.backend.predict(models.hardened() if hard else models, scaled(x)[None])[0]

    def evaluate(
        self, federation: Federation, split: Split = "test", *, hard: bool = False, metrics: Metrics = ()
    ) -> Evaluation:
        """Every client's own model on its own data, found by its id; rows in the order of the federation.

        metrics: functions (prediction, target) -> number or objects of torchmetrics, by name or as a list.
        """
        federation.split(split)
        chosen = as_metrics(metrics)
        transport = InProcess(Site(federation, self.problem.population, self.engine, metrics=chosen))
        self._positions(federation.ids)
        setup_sites(self.method, self.problem, transport)
        shared, own = self.method.send(self.problem, self.state.server, federation.ids, None)
        asked = Evaluate(MAIN, (split,), shared, own, hard=hard, metrics=tuple(chosen))
        _, reply = transport.ask([Restore(MAIN, 0, self.clients), asked])
        return read_evaluation(reply, (split,), transport, chosen).splits[split]

    def _facts(self) -> FittedFacts:
        from .report.fitted_card import FittedFacts  # here, as only notebooks and consoles need it

        # one client tells whether clients have canonical models in common; the networks of all would be large
        mixed = isinstance(self.models(self.ids[:1]), Mixture)
        memberships = self.memberships if mixed else None
        method = repr(self.method)
        return FittedFacts(self.method.title, method, self.state.round, len(self.ids), memberships, self.history)

    def _positions(self, clients: Sequence[str]) -> Tensor:
        unknown = [client for client in clients if client not in self.problem.roster.position]
        if unknown:
            raise DataError(
                f"there is no client {unknown[0]!r} among the {len(self.ids)} that were fitted; ids look like "
                f"{self.ids[0]!r}"
            )
        return torch.tensor([self.problem.roster.position[client] for client in clients], dtype=torch.long)


def fit(
    population: Population,
    federation: Federation,
    method: Method | None = None,
    *,
    rounds: int = 100,
    affinity: Affinity | None = None,
    engine: str | Engine = "stacked",
    seed: int = 0,
    watch: Watch | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
) -> Fitted:
    """Train `population` on `federation`, by PPFL unless another method is given.

    on_round: a callback, or several, called with the record of every round; one that returns True ends training there
    (`ppfl.callbacks`). progress: a bar is shown on a terminal and in a notebook (with ipywidgets), and nothing
    elsewhere; False shows nothing, and True prints a few lines where there can be no bar. The logger "ppfl" gets one
    line at the start, and at level DEBUG one per round.

    >>> from ppfl.data import digits_federation
    >>> net = torch.nn.Linear(64, 10)
    >>> fitted = fit(Population(net, k=4), digits_federation(), rounds=3)
    >>> fitted.memberships.shape
    torch.Size([40, 4])
    """
    engine, watch = engine_by_name(engine), watch or Watch()
    method = PPFL() if method is None else method
    if not isinstance(rounds, int) or rounds < 1:
        raise SettingError(f"rounds is {rounds}; train for at least one round")
    site = Site(federation, population, engine, metrics=watch.known_metrics)
    transport = InProcess(site)
    problem = make_problem(population, transport, affinity, rounds=rounds, seed=seed)
    history: list[Record] = []
    with running(on_round, progress, problem, method, watch) as callbacks:
        method = choose_lr(method, problem, transport)
        callbacks.log_start(method)
        for end in train_and_measure(method, problem, transport, watch, begin(method, problem, transport)):
            history.append(end.record)
            if callbacks.end_training(end):
                break
    clients = client_states(transport, end.state, "now" if watch.output == "last" else "kept")
    return Fitted(problem, method, end.kept.state, clients, site.backend, engine, history)
