"""A site: it owns the data of its clients, their states and an engine, and answers requests.

A hospital has many patients, a gateway many meters: a site sends ONE sum for all its clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Method, Rows
from ..algorithms.local.batches import Draws, LocalData
from ..core.backends import Backend
from ..core.draws import uniform
from ..core.ids import Roster
from ..core.population import Mixture, Models, Population
from ..core.trees import named_leaves, tree_map, with_leaves
from ..data import Federation, Samples
from ..errors import CheckpointError, SettingError
from ..networks.sequences import refuse_unknown_tokens
from .engines import Engine
from .evaluation import KeptPredictions, PredictionMetric, score_clients
from .filters import Filter, default_filters, refusals, remember
from .frozen_features import run_frozen_layers
from .messages import (
    Close,
    Describe,
    Evaluate,
    Keep,
    Refusal,
    Reply,
    Request,
    Restore,
    Save,
    SavedStates,
    Setup,
    Snapshot,
    Train,
    UseKept,
)
from .states import ClientStates
from .totals import Spread, UploadTotals, refuse_undeclared_rows


class Session(NamedTuple):
    """A run of a method at a site."""

    method: Method
    seed: int
    dropout: float
    weight: Tensor  # (M,), p_i
    states: ClientStates


class Site:
    """The clients of a federation, with the population's network and an engine to compute with."""

    def __init__(
        self,
        federation: Federation,
        population: Population,
        engine: Engine,
        *,
        name: str = "site",
        importance: Tensor | None = None,
        filters: Sequence[Filter] | None = None,
        metrics: Mapping[str, PredictionMetric] | None = None,
        states_on_disk: bool | None = None,
        fewest: float = 0,
    ) -> None:
        """importance (M,): of the clients, on the scale of all sites; by default their numbers of samples.

        fewest: clients that a sum must be over, also effectively, or it is left out.

        metrics: what it can be asked to compute besides the loss and its score.
        states_on_disk: whether client states are in a file; None: where they would take more than MOST_BYTES.
        """
        self.federation, self.engine, self.name = federation, engine, name
        self.filters = default_filters() if filters is None else tuple(filters)
        self.importance = federation.importance if importance is None else importance
        self.metrics = metrics or {}
        self.states_on_disk, self.fewest = states_on_disk, fewest
        self.roster = Roster(federation.ids)
        self.keys, self.positions = self.roster.keys, self.roster.position
        refuse_unknown_tokens(population.net, federation)
        population, self.computed = run_frozen_layers(population, federation)
        train = self.computed.train
        first, targets = train.first_inputs(2), train.example_targets()
        self.backend: Backend = engine.backend(population, first, targets, federation.n_classes)
        self.sessions: dict[str, Session] = {}
        self._answers: dict[type, Callable[[Any], Reply]] = {
            Describe: self.describe,
            Setup: self.setup,
            Train: self.train,
            Evaluate: self.evaluate,
            Keep: self.keep,
            UseKept: self.use_kept,
            Save: self.save,
            Restore: self.restore,
            Close: self.close,
        }

    @property
    def device(self) -> torch.device:
        """Where its rows are."""
        found: torch.device = self.federation.train.x.device
        return found

    def answer(self, request: Request) -> Reply:
        """Do what a request asks for."""
        return self._answers[type(request)](request)

    # ------------------------------------------------------------------ before the first round

    def describe(self, request: Describe) -> Reply:
        federation = self.federation
        sums = {
            "clients": torch.tensor(float(federation.n_clients), dtype=torch.float64),
            "samples": torch.tensor(float(len(federation.train)), dtype=torch.float64),
            "importance": self.importance.sum(),
        }
        facts = {
            "sample_shape": list(federation.train.x.shape[1:]),
            "sample_dtype": str(federation.train.x.dtype),
            "target_shape": list(federation.train.y.shape[1:]),
            "n_classes": federation.n_classes,
            "splits": sorted(federation.splits),
        }
        return Reply(metrics=sums, rows=Rows(federation.ids, {}), facts=facts)

    def setup(self, request: Setup) -> Reply:
        population, device = self.backend.population, self.federation.train.x.device
        weight = (self.importance / request.importance).float().to(device, population.dtype)
        population.load(request.start)  # another session may have loaded others
        initial = tree_map(lambda leaf: leaf.to(device), request.method.init_client(population))
        states = ClientStates(initial, self.federation.n_clients, self.states_on_disk)
        self.sessions[request.session] = Session(request.method, request.seed, request.dropout, weight, states)
        return Reply()

    def close(self, request: Close) -> Reply:
        self.sessions.pop(request.session, None)
        return Reply()

    # ------------------------------------------------------------------ a round

    def train(self, request: Train) -> Reply:
        session = self._session(request.session)
        asked = torch.arange(self.federation.n_clients)[self.roster.positions(request.who)]
        here = torch.arange(len(asked))
        if session.dropout:  # lost clients got what they were sent, and nothing of theirs comes back
            luck = uniform(session.seed, "dropout", request.round, self.keys[asked])
            here = (luck >= session.dropout).nonzero()[:, 0]
        if request.keep_states:
            session.states.begin(request.round, request.exchange, request.merged, len(here))
        refused: dict[int, str] = {}
        while True:  # again without those whose uploads are refused: work depends on nothing but its keys
            counted = here[[int(at) not in refused for at in here]] if refused else here
            if self._are_few(session, asked[counted]):
                counted = counted[:0]
            totals = self._work(session, request, asked, counted)
            norms = None if totals is None else totals.norms(session.states.filters)
            found = {} if norms is None else refusals(self.filters, norms)
            if not found:
                break
            refused |= {int(counted[at]): reason for at, reason in found.items()}
            if request.keep_states:
                session.states.undo_work()
        if totals is not None and self.fewest:
            totals.leave_out_few(self.fewest, self.backend.population.canonical_names)
        if totals is not None and norms is not None and request.keep_states:
            session.states.filters = session.states.filters | {totals.kind: remember(norms)}
        return self._reply(totals, asked, here, counted, refused)

    def _are_few(self, session: Session, who: Tensor) -> bool:
        """Whether a sum over these clients is over too few of them, also effectively."""
        return bool(self.fewest) and bool(Spread.of(session.weight[who][:, None]).is_few(self.fewest))

    def _work(self, session: Session, request: Train, asked: Tensor, counted: Tensor) -> UploadTotals | None:
        """The work of the clients asked[counted] in an exchange; None where there are none.

        counted (S,): where their rows are in what was sent to each of those who were asked.
        """
        if len(counted) == 0:
            return None
        samples, batch_size, who = self.computed.train, session.method.local.batch_size, asked[counted]
        draws = Draws(session.seed, request.round, masks=bool(self.backend.population.mask_keys))

        def work_on(chunks: Sequence[Tensor]) -> UploadTotals:
            totals = UploadTotals(len(who))
            for chunk in chunks:
                with torch.no_grad(), self.backend.space.frame():  # torch.func has its own tape
                    self._work_on_chunk(session, request, draws, chunk, who[chunk], counted[chunk], totals)
            return totals

        first, *others = self.engine.run(work_on, samples.cpu_sizes[who], batch_size, self.backend, samples)
        for other in others:
            first.join(other)
        return first

    def _work_on_chunk(
        self,
        session: Session,
        request: Train,
        draws: Draws,
        chunk: Tensor,
        who: Tensor,
        rows: Tensor,
        totals: UploadTotals,
    ) -> None:
        """chunk, who, rows (C,): where these clients are in the round, at the site, and in what was sent to each."""
        method, batch_size = session.method, session.method.local.batch_size
        weight = session.weight[who.to(session.weight.device)]
        data = LocalData(self.computed.train, weight, self.keys[who], who, draws, self.backend)
        own = {name: leaf[rows.to(leaf.device)] for name, leaf in request.own.items()}
        work = method.work(request.task, request.shared, own, session.states.rows(who), data)
        refuse_undeclared_rows(method, work.upload)
        if request.keep_states:
            session.states.write(who, work.client)
        if self.fewest and self.backend.population.k > 1:
            models = method.model(self.backend, request.shared, own, work.client)
            if isinstance(models, Mixture):
                totals.add_members(weight[:, None] * models.memberships)
        totals.add(chunk, work, weight, data.sizes if batch_size is None else data.sizes.clamp_max(batch_size))

    def _reply(
        self, totals: UploadTotals | None, asked: Tensor, here: Tensor, counted: Tensor, refused: dict[int, str]
    ) -> Reply:
        ids = self.federation.ids
        counts = {"asked": len(asked), "participants": len(counted), "lost": len(asked) - len(here)}
        counts |= {"refused": len(refused), "bytes_up": 0 if totals is None else totals.bytes_up}
        metrics = {name: torch.tensor(float(count), dtype=torch.float64) for name, count in counts.items()}
        names = tuple(Refusal(ids[int(asked[at])], reason) for at, reason in sorted(refused.items()))
        if totals is None:
            return Reply(metrics=metrics, rows=Rows((), {}), refused=names)
        who = asked[counted]
        # rows without names are those of all clients in the site's order
        came = None if who.equal(torch.arange(len(ids))) else tuple(ids[at] for at in who.tolist())
        values = totals.rows
        rows = Rows(came, values) if values else Rows((), {})
        return Reply(totals.totals, metrics | totals.metrics, rows, refused=names)

    # ------------------------------------------------------------------ scores

    def evaluate(self, request: Evaluate) -> Reply:
        session, everyone = self._session(request.session), torch.arange(self.federation.n_clients)
        who, metrics = self._evaluated(request, session), self._known_metrics(request.metrics)
        names = [self.federation.ids[at] for at in who.tolist()] if metrics else []
        per_client = request.per_client and request.share >= 1 and not request.without
        sums: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}

        def models_of(who: Tensor) -> Models:
            own = {name: leaf[who.to(leaf.device)] for name, leaf in request.own.items()}
            return session.method.model(self.backend, request.shared, own, session.states.rows(who))

        for split in request.splits:
            samples = self.computed.splits[split]

            def clients_at(who: Tensor, samples: Samples = samples) -> tuple[Models, LocalData]:
                weight = session.weight[who.to(session.weight.device)]
                return models_of(who), LocalData(samples, weight, self.keys[who], who, Draws(0, 0), self.backend)

            with torch.no_grad():
                predictions = KeptPredictions(metrics, names)
                scores = score_clients(self.backend, samples, who, clients_at, predictions, request.hard)
            found = scores.sums(self.importance[who], self.backend.loss, self.fewest)
            sums |= {f"{split}.{name}": value for name, value in found.items()}
            rows |= {f"{split}.{name}": values for name, values in scores.values.items()} if per_client else {}
        if per_client and isinstance(models_of(everyone[:1]), Mixture):
            models = models_of(everyone)
            if isinstance(models, Mixture):  # some clients may have a model of their own by now
                rows["membership"] = models.memberships
        return Reply(metrics=sums, rows=Rows(None, rows) if rows else Rows((), {}))

    def _evaluated(self, request: Evaluate, session: Session) -> Tensor:
        """Positions of the clients that are evaluated."""
        counted = torch.ones(self.federation.n_clients, dtype=torch.bool)
        if request.share < 1:
            counted = uniform(session.seed, "evaluated", self.keys) < request.share
        counted[[self.positions[client] for client in request.without if client in self.positions]] = False
        return counted.nonzero()[:, 0]

    def _known_metrics(self, names: Sequence[str]) -> dict[str, PredictionMetric]:
        if unknown := [name for name in names if name not in self.metrics]:
            raise SettingError(f"site {self.name!r} has no metric {unknown[0]!r}; give it to the site by that name")
        return {name: self.metrics[name] for name in names}

    # ------------------------------------------------------------------ states

    def keep(self, request: Keep) -> Reply:
        self._session(request.session).states.keep()
        return Reply()

    def use_kept(self, request: UseKept) -> Reply:
        self._session(request.session).states.use_kept(request.exchange)
        return Reply()

    def save(self, request: Save) -> Reply:
        states = self._session(request.session).states
        states.return_to(request.merged)
        rows, filters = self.saved_states(request.session, request.snapshot)
        return Reply(rows=rows, by_site=filters)

    def saved_states(self, session: str, snapshot: Snapshot = "now") -> SavedStates:
        """The states of a session's clients that were ever written to."""
        at, tree, filters = self._session(session).states.save(kept=snapshot == "kept")
        ids, values = self.federation.ids, named_leaves(tree)
        names = None if len(at) == len(ids) else tuple(ids[position] for position in at.tolist())
        return SavedStates(Rows(names, values), {self.name: filters})

    def restore(self, request: Restore) -> Reply:
        states, (saved, by_site) = self._session(request.session).states, request.saved
        ids, values = self.federation.ids, saved.values
        at = torch.arange(len(ids))
        if saved.ids is not None and saved.ids != ids:
            at = torch.tensor([self.positions.get(client, -1) for client in saved.ids], dtype=torch.long)
            if bool((at < 0).any()):  # clients of other sites
                here = at >= 0
                at, values = at[here], {name: leaf[here.to(leaf.device)] for name, leaf in values.items()}
        rows = with_leaves(states.initial, values)
        states.restore(at, rows, by_site.get(self.name, {}), request.exchange, kept=request.snapshot == "kept")
        return Reply()

    def _session(self, name: str) -> Session:
        if name not in self.sessions:
            raise CheckpointError(f"site {self.name!r} has no session {name!r}; send it a Setup first")
        return self.sessions[name]
