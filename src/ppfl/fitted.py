"""What `fit` returns: who the clients are, a model for each, and all that can be done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from .insight import onboarding
from .networks.peft_files import save_adapter
from .runs.saved_fit import load_fit, save_fit
from .runs.saved_run import load_finished_run
from .server import Evaluation, Trained, connect
from .server.evaluation import read_evaluation
from .server.loop import MAIN, setup_sites
from .sites import Evaluate, Metrics, Restore, as_metrics
from .sites.client_model import client_model
from .sites.personal_models import PersonalModels

if TYPE_CHECKING:
    from .report.fitted_card import FittedFacts

ClientId = str | int


@dataclass(frozen=True)
class Fitted(Trained):
    """A trained population: who the clients are, and a model for each.

    Clients are named by text: 7 and "7" are the same client. x may be a tensor, an array, nested lists, or a table with
    the columns by name; bytes stay bytes, and numbers of a prepared table are in their own units.

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

    def __repr__(self) -> str:
        return self._facts().line()

    def _repr_html_(self) -> str:
        return self._facts().html()

    @cached_property
    def _personal(self) -> PersonalModels:
        return PersonalModels(
            self.population, self.method, self.engine, self.spec, self.ids,
            lambda ids: self.method.send(self.problem, self.state.server, ids, None), self.clients.rows,
            self.problem.device,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """All but what is made again: backends have buffers for each thread."""
        return {name: value for name, value in vars(self).items() if name != "_personal"}

    @property
    def population(self) -> Population:
        return self.problem.population

    @property
    def memberships(self) -> Tensor:
        """(M, K), one row per client, in the order of `ids`."""
        return self._personal.memberships(self.ids)

    def membership(self, client: ClientId) -> Tensor:
        """(K,) of one client, by name."""
        return self._personal.memberships(self._known([client]))[0]

    def models(self, clients: Sequence[ClientId]) -> Models:
        """The personal models of these clients."""
        return self._personal.models(self._known(clients))

    @overload
    def predict(self, client: ClientId, x: Tensor, *, hard: bool = False) -> Tensor: ...
    @overload
    def predict(self, client: ClientId, x: ArrayLike, *, hard: bool = False) -> NDArray[Any]: ...
    def predict(self, client: ClientId, x: Any, *, hard: bool = False) -> Any:
        """Mean predictions (B, ...) of a client's own model on x (B, ...): a tensor for a tensor, else an array.

        hard: by the max rule, every client wholly in its largest membership.
        """
        (name,) = self._known([client])
        found = self._personal.predict(name, x, hard=hard)
        return found if isinstance(x, Tensor) else found.cpu().numpy()

    def evaluate(
        self, federation: Federation, split: Split = "test", *, hard: bool = False, metrics: Metrics = ()
    ) -> Evaluation:
        """Every client's own model on its own data, found by its id; rows in the order of the federation.

        metrics: functions (prediction, target) -> number or objects of torchmetrics, by name or as a list.
        """
        federation.split(split)
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
        from .report.fitted_card import FittedFacts  # here, as only notebooks and consoles need it

        memberships = self.memberships if self._personal.are_mixtures else None
        method = repr(self.method)
        return FittedFacts(self.method.title, method, self.state.round, len(self.ids), memberships, self.history)

    # ------------------------------------------------------------------ one client's model, to take away

    def model(self, client: ClientId, *, predictions: bool = False, hard: bool = False) -> nn.Module:
        """A client's own model as a plain nn.Module in evaluation mode, which needs nothing of ppfl's engines.

        It returns what the network returns: outputs before the link, such as logits. Low-rank adapters are merged into
        the layers they belong to. With mix="predictions", or with
        `predictions`, it returns predictions, as `predict` does.
        """
        (name,) = self._known([client])
        return self._personal.module(name, predictions=predictions, hard=hard)

    def export_onnx(self, client: ClientId, path: str | Path, *, predictions: bool = True) -> Path:
        """Write a client's own model as ONNX, for batches of any size. Needs pip install 'ppfl[export]'."""
        (name,) = self._known([client])
        return self._personal.export_onnx(name, path, predictions=predictions)

    def save_adapter(self, client: ClientId, folder: str | Path) -> Path:
        """Write a client's own low-rank adapter to a folder that `peft` reads, for use with the network as it was."""
        net = client_model(self.population, self.models([client]), predictions=False, merge=False)
        if adapted_layers(net).keys() != adapted_layers(self.population.architecture).keys():
            raise ModelError(
                f"client {client!r} mixes what {self.population.k} adapters give, and a file holds one; fit with "
                f"canonical='adapters.up', or save the model: fitted.model(client).state_dict()"
            )
        return save_adapter(net, folder)

    # ------------------------------------------------------------------ keeping it, and going on

    def save(self, path: str | Path) -> Path:
        """Write everything to one file (safetensors, with its SHA-256), which `ppfl.load` reads. Nothing is pickled."""
        save_fit(Path(path), self)
        return Path(path)

    def onboard(self, federation: Federation) -> Fitted:
        """With the clients of `federation`, which are new: each finds its place among the models as they are.

        With PPFL that is its membership, fitted to its training samples. Known clients stay as they are.
        """
        clients = onboarding.onboard(self, federation)
        return replace(self, ids=(*self.ids, *federation.ids), clients=clients)

    def update(self, federation: Federation) -> Fitted:
        """With known clients fitted to the data that `federation` has of them, the models as they are."""
        return replace(self, clients=onboarding.update(self, federation))

    @cached_property
    def known(self) -> Mapping[str, int]:
        """Where every known client stands in `ids`."""
        return positions_of(self.ids)

    def _known(self, clients: Sequence[ClientId]) -> tuple[str, ...]:
        """Clients by their names, which are text."""
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
    """A fitted population from the file that `fitted.save` wrote, or from the folder of a finished run.

    net: needed where the network is of a class of your own, for no code is kept in a file. Build it again; its values
    come from the file. Chains (nn.Sequential) of layers of torch.nn, and networks of experiment files, need none.
    loss, method: needed where these are of a class of your own; for the method the class is enough.

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
