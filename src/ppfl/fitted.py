"""What `fit` returns: who the clients are, a model for each, and all that can be done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from .algorithms.contract import Method
from .core.adapters import adapted_layers
from .core.ids import positions_of
from .core.losses import Loss
from .core.population import Models, Population
from .core.settings import usable_device
from .data import Federation
from .data.federation import Split
from .errors import DataError, ModelError
from .networks.peft_files import save_adapter
from .runs import RunRecord, metric_name
from .runs.provenance import describe_environment
from .runs.saved_fit import load_finished_run, load_fit, save_fit
from .server import Evaluation, Trained, adapt_clients, connect
from .server.evaluation import read_evaluation
from .server.loop import MAIN, setup_sites
from .server.newcomers import refuse_other_data, replace_rows
from .sites import Evaluate, Metrics, Restore, SavedStates, as_metrics
from .sites.client_model import client_model
from .sites.personal_models import PersonalModels

if TYPE_CHECKING:
    import pandas as pd

    from .report import Comparison
    from .report.card import FittedFacts
    from .report.charts import Chart

ClientId = str | int


@dataclass(frozen=True)
class Fitted(Trained):
    """A trained population: who the clients are, and a model for each. `fit` and `load` return it.

    Clients are named by text: 7 and "7" are the same client. It does not change: `onboard` and `update` return another.

    Attributes:
        ids: All known clients.
        memberships: (M, K), one row per client, in the order of `ids`.
        history: One record per round, a dict.
        population, method, problem, state: What was trained, how, and where training ended.

    Example:
        >>> from ppfl import PPFL, fit
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
        >>> fitted.model("g0-c0")
        Linear(in_features=64, out_features=10, bias=True)
    """

    # (M, K) after the rounds that were evaluated; a fit from a file has none
    memberships_by_round: Mapping[int, Tensor] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return self._facts().line()

    def _repr_html_(self) -> str:
        return self._facts().html()

    @cached_property
    def personal(self) -> PersonalModels:
        """The models of all clients, as files and sites use them."""
        return PersonalModels(
            self.population, self.method, self.engine, self.spec, self.ids,
            lambda ids: self.method.send(self.problem, self.state.server, ids, None), self.clients.rows,
            self.problem.device,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """All but what is made again: backends have buffers for each thread."""
        return {name: value for name, value in vars(self).items() if name != "personal"}

    @property
    def population(self) -> Population:
        return self.problem.population

    @property
    def memberships(self) -> Tensor:
        """(M, K), one row per client, in the order of `ids`."""
        return self.personal.memberships(self.ids)

    def membership(self, client: ClientId) -> Tensor:
        """(K,) of one client, by name."""
        return self.personal.memberships(self._known([client]))[0]

    def models(self, clients: Sequence[ClientId]) -> Models:
        """The personal models of these clients, as engines run them; `model` gives a plain network."""
        return self.personal.models(self._known(clients))

    @overload
    def predict(self, client: ClientId, x: Tensor, *, hard: bool = False) -> Tensor: ...
    @overload
    def predict(self, client: ClientId, x: ArrayLike, *, hard: bool = False) -> NDArray[Any]: ...
    def predict(self, client: ClientId, x: Any, *, hard: bool = False) -> Any:
        """Predicts with a client's own model.

        Args:
            client: Its id.
            x: Samples (B, ...) like those of the training data: a tensor, an array, nested lists, or a table with the
                columns by name. Bytes stay bytes, and numbers of a prepared table are in their own units.
            hard: Whether the client is put wholly into its largest membership.

        Returns:
            Mean predictions (B, ...), such as probabilities of classes: a tensor for a tensor, otherwise an array.

        Raises:
            DataError: If the client is unknown, or x has another shape than the training data.
        """
        (name,) = self._known([client])
        found = self.personal.predict(name, x, hard=hard)
        return found if isinstance(x, Tensor) else found.cpu().numpy()

    def evaluate(
        self, federation: Federation, split: Split = "test", *, hard: bool = False, metrics: Metrics = ()
    ) -> Evaluation:
        """Scores every client's own model on its own data. Clients are found by their ids.

        Args:
            federation: Known clients, with samples like those of the training data.
            split: "train", "test" or "validation".
            hard: Whether every client is put wholly into its largest membership.
            metrics: Functions (prediction, target) -> number or objects of torchmetrics, by name or as a list.

        Returns:
            An Evaluation: `pooled` is the score over all samples; `score`, `loss` and `metrics[name]` have `mean`,
            `worst_tenth` and `values`, one per client in the order of the federation.

        Raises:
            DataError: If a client is unknown, or the samples are of another kind than the training data.
        """
        if not isinstance(federation, Federation):
            raise DataError(
                f"federation is a {type(federation).__name__}; give a Federation, such as "
                f"Federation.from_arrays(x, y, clients)"
            )
        federation.split(split)
        refuse_other_data(self.spec, federation)
        chosen = as_metrics(metrics)
        self._refuse_unknown(federation.ids)
        transport = connect(federation, self.population, self.engine, metrics=chosen)
        setup_sites(self.method, self.problem, transport)
        ids = None if federation.ids == self.problem.roster.ids else tuple(federation.ids)
        shared, own = self.method.send(self.problem, self.state.server, ids, None)
        asked = Evaluate(MAIN, (split,), shared, own, hard=hard, metrics=tuple(chosen))
        _, reply = transport.ask([Restore(MAIN, 0, self.clients), asked])
        return read_evaluation(reply, (split,), transport, self.population.loss, chosen).splits[split]

    def _facts(self) -> FittedFacts:
        from .report.card import FittedFacts  # here, as only notebooks and consoles need it

        memberships = self.memberships if self.personal.are_mixtures else None
        method = repr(self.method)
        return FittedFacts(self.method.title, method, self.state.round, len(self.ids), memberships, self.history)

    # ------------------------------------------------------------------ to look at

    def membership_frame(self) -> pd.DataFrame:
        """Memberships as a DataFrame: one row per client, by its id, and one column per canonical model.

        Models are named as in charts: A has the largest share of the population, then B, C, ...
        """
        import pandas as pd

        from .report.theme import model_names

        c = self.memberships
        c = c[:, c.double().mean(0).argsort(descending=True, stable=True)]
        return pd.DataFrame(c.numpy(), index=pd.Index(self.ids, name="client"), columns=model_names(c.shape[1]))

    def history_frame(self) -> pd.DataFrame:
        """The history as a DataFrame: one row per round."""
        import pandas as pd

        rows = [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in self.history]
        return pd.DataFrame(rows).set_index("round")

    def score_frame(self) -> pd.DataFrame:
        """Memberships and the last test score of every client, as in the report: models are A, B, ... by share."""
        return self._comparison().clients.set_index("client")

    def plot_memberships(self) -> Chart:
        """A chart of who the clients are: one bar each, one colour per canonical model."""
        return self._comparison().plot_memberships()

    def plot_simplex(self) -> Chart:
        """A chart of where the clients are between the canonical models."""
        return self._comparison().plot_simplex()

    def plot_history(self, of: str | None = None) -> Chart:
        """A chart of a value by round: by default the score on test data, else "loss" or another of the history."""
        return self._comparison().plot_history(of)

    def plot_clients(self) -> Chart:
        """A chart of the test score of every client."""
        return self._comparison().plot_clients()

    def report(self, folder: str | Path = "report", title: str | None = None) -> Path:
        """Writes one page with all charts and tables, which needs no network, and returns its path."""
        return self._comparison().report(folder, title or f"Population fitted by {self.method.title}")

    def _comparison(self) -> Comparison:
        from .report import Comparison  # here, as scripts that draw nothing need none of it

        return Comparison({self.method.title: [self.record()]})

    def record(self, truth: Tensor | None = None) -> RunRecord:
        """The same as a run of an experiment leaves behind, for reports and comparisons."""
        population = {"k": self.population.k, "mix": self.population.mix.name}
        method = {**self.method.model_dump(mode="json"), "name": self.method.name}
        experiment = {"name": self.method.title, "method": method, "population": population, "data": {"name": "data"},
                      "rounds": self.state.round, "seeds": [self.problem.seed]}  # fmt: skip
        new = [None] * (len(self.ids) - len(self.problem.roster.ids))  # came later, and have no score in the history
        history = [
            {**row, "per_client": [*row["per_client"], *new]} if row.get("per_client") else row for row in self.history
        ]
        measured = (row for row in reversed(history) if metric_name(row) and row["round"] <= self.state.round)
        return RunRecord(
            folder=Path(), experiment=experiment, versions=describe_environment(), ids=tuple(self.ids), truth=truth,
            metrics=history, memberships=self.memberships if self.personal.are_mixtures else None,
            memberships_by_round=dict(self.memberships_by_round), scores=next(measured, {}), finished=True,
        )  # fmt: skip

    # ------------------------------------------------------------------ one client's model, to take away

    def model(self, client: ClientId, *, predictions: bool = False, hard: bool = False) -> nn.Module:
        """A client's own model as a plain nn.Module in evaluation mode, which needs nothing of ppfl's engines.

        Low-rank adapters are merged into the layers they belong to.

        Args:
            client: Its id.
            predictions: Whether the module returns predictions, as `predict` does. By default it returns what the
                network returns: outputs before the link, such as logits; with mix="predictions" always predictions.
            hard: Whether the client is put wholly into its largest membership.
        """
        (name,) = self._known([client])
        return self.personal.module(name, predictions=predictions, hard=hard)

    def export_onnx(self, client: ClientId, path: str | Path, *, predictions: bool = True) -> Path:
        """Writes a client's own model as ONNX, for batches of any size. Needs pip install 'ppfl[export]'."""
        (name,) = self._known([client])
        return self.personal.export_onnx(name, path, predictions=predictions)

    def save_adapter(self, client: ClientId, folder: str | Path) -> Path:
        """Writes a client's own low-rank adapter to a folder that `peft` reads, for use with the network as it was."""
        net = client_model(self.population, self.models([client]), predictions=False, merge=False)
        if adapted_layers(net).keys() != adapted_layers(self.population.architecture).keys():
            raise ModelError(
                f"client {client!r} mixes what {self.population.k} adapters give, and a file holds one; fit with "
                f"canonical='adapters.up', or save the model: fitted.model(client).state_dict()"
            )
        return save_adapter(net, folder)

    # ------------------------------------------------------------------ keeping it, and going on

    def save(self, path: str | Path) -> Path:
        """Writes everything to one file (safetensors, with its SHA-256), which `ppfl.load` reads. Nothing is pickled.

        Returns:
            The path.

        Raises:
            CheckpointError: If it is the path of a folder, or in a folder that does not exist.
        """
        save_fit(Path(path), self)
        return Path(path)

    def onboard(self, federation: Federation) -> Fitted:
        """Lets new clients in: each finds its place among the models, which stay as they are.

        With PPFL that is its membership and nothing else, fitted to its training samples until it no longer improves.
        With another method a client does what clients do in its last rounds, and what it would upload is thrown away.

        Args:
            federation: The new clients.

        Returns:
            A Fitted that knows these clients too. Known clients are in it as they were.

        Raises:
            DataError: If a client is known already, or the samples are of another kind than the training data.
        """
        if old := [client for client in federation.ids if client in self.known]:
            raise DataError(
                f"client {old[0]!r} is already known ({len(old)} of {federation.n_clients} are); onboard new clients "
                f"only, and use update(federation) for new data of known ones"
            )
        return replace(self, ids=(*self.ids, *federation.ids), clients=self._with_adapted(federation, None))

    def update(self, federation: Federation) -> Fitted:
        """Fits known clients to new data of theirs; the models stay as they are.

        Args:
            federation: Known clients, with the data to fit them to.

        Returns:
            A Fitted with these clients as they are now.

        Raises:
            DataError: If a client is not known, or the samples are of another kind than the training data.
        """
        if new := [client for client in federation.ids if client not in self.known]:
            raise DataError(
                f"there is no client {new[0]!r} among the {len(self.ids)} that are known; update known clients only, "
                f"and use onboard(federation) for new ones"
            )
        return replace(self, clients=self._with_adapted(federation, self.clients))

    def _with_adapted(self, federation: Federation, states: SavedStates | None) -> SavedStates:
        """The states of all clients, after those of `federation` have found their place, from `states` if given."""
        refuse_other_data(self.spec, federation)
        transport = connect(federation.to(self.problem.device), self.population, self.engine)
        rows = adapt_clients(self.method, self.problem, self.state.server, transport, states)
        return self.clients._replace(rows=replace_rows(self.clients.rows, federation.ids, rows))

    @cached_property
    def known(self) -> Mapping[str, int]:
        """Where every known client stands in `ids`."""
        return positions_of(self.ids)

    def _known(self, clients: Sequence[ClientId]) -> tuple[str, ...]:
        """Clients by their names, which are text."""
        if odd := [client for client in clients if hasattr(client, "__len__") and not isinstance(client, str)]:
            raise DataError(f"client is a {type(odd[0]).__name__}; give the id of one client first, and then x")
        ids = tuple(map(str, clients))
        self._refuse_unknown(ids)
        return ids

    def _refuse_unknown(self, clients: Sequence[str]) -> None:
        unknown = [client for client in clients if client not in self.known]
        if unknown:
            raise DataError(
                f"there is no client {unknown[0]!r} among the {len(self.ids)} that were fitted; ids look like "
                f"{self.ids[0]!r}; new clients come in with fitted.onboard(federation)"
            )


def load(
    path: str | Path,
    *,
    net: nn.Module | None = None,
    loss: Loss | None = None,
    method: Method | type[Method] | None = None,
    device: torch.device | str = "cpu",
) -> Fitted:
    """Reads a fitted population. A file holds no code, so parts of a class of your own are passed again.

    Args:
        path: The file that `fitted.save` wrote, or the folder of a finished run.
        net: The network, if it is of a class of your own; its values come from the file. Chains (nn.Sequential) of
            layers of torch.nn, and networks of experiment files, need none.
        loss: The loss, if it is your own.
        method: The method or its class, if it is your own.
        device: Where it computes.

    Returns:
        The Fitted that was saved. It predicts the same bits.

    Raises:
        CheckpointError: If there is no such file, or it is damaged or of another kind.
        ModelError: If the network or the loss is needed, or does not fit the file.

    Example:
        >>> import tempfile
        >>> from ppfl import PPFL, fit
        >>> from ppfl.data import digits_federation
        >>> fitted = fit(Population(torch.nn.Linear(64, 10), k=2), digits_federation(), PPFL(lr=0.1), rounds=2)
        >>> x = torch.rand(3, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load(fitted.save(Path(folder) / "digits.safetensors"))
        >>> torch.equal(again.predict("g0-c0", x), fitted.predict("g0-c0", x))
        True
    """
    path, place = Path(path), usable_device(device)
    found = load_finished_run(path, place) if path.is_dir() else load_fit(path, net, loss, method, place)
    return Fitted(**vars(found))
