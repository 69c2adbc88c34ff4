"""The models of clients, made of what these were sent and what they keep: a fit and a site use the same class."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.contract import Method, Rows
from ..core.backends import Backend
from ..core.ids import ClientIds, positions_of
from ..core.population import Mixture, Models, Population
from ..core.trees import Tree, tree_map
from ..data.sample_spec import SampleSpec
from ..errors import DataError, ModelError, SettingError, WriteError
from .client_model import client_model
from .engines import Engine
from .states import states_of

Send = Callable[[tuple[str, ...]], tuple[Tree, dict[str, Tensor]]]  # what all clients are sent, and each of these


@dataclass(frozen=True, eq=False)
class PersonalModels:
    """A model for each of some clients; the data that they were trained on are not needed."""

    population: Population
    method: Method
    engine: Engine
    spec: SampleSpec
    ids: ClientIds
    send: Send
    states: Rows  # what clients keep
    device: torch.device

    @cached_property
    def backend(self) -> Backend:
        """How models run."""
        x, y = self.spec.batch(self.spec.example(self.device)), self.spec.example_targets(self.device)
        return self.engine.backend(self.population, x, y, self.spec.n_classes)

    def models(self, clients: Sequence[str], *, hard: bool = False) -> Models:
        """The models of these clients. hard: every client is wholly in its largest membership."""
        ids = tuple(clients)
        self.refuse_unknown(ids)
        shared, own = self.send(ids)
        states = states_of(self.method.init_client(self.population), self.states, ids)
        placed = tree_map(lambda leaf: leaf.to(self.device), states)
        models = self.method.model(self.backend, shared, own, placed)
        return models.hardened() if hard else models

    def refuse_unknown(self, clients: Sequence[str]) -> None:
        """Raise a DataError where one of these clients has no model."""
        if unknown := [client for client in clients if client not in self._known]:
            raise DataError(
                f"there is no client {unknown[0]!r} among the {len(self.ids)} that have models; ids look like "
                f"{self.ids[0]!r}"
            )

    @cached_property
    def _known(self) -> Mapping[str, int]:
        return positions_of(self.ids)

    @cached_property
    def are_mixtures(self) -> bool:
        """Whether clients have canonical models in common. One client tells, and the networks of all would be large."""
        return isinstance(self.models(self.ids[:1]), Mixture)

    def memberships(self, clients: Sequence[str]) -> Tensor:
        """(M, K), one row for each of these clients; ones (M, 1) where clients are no mixtures."""
        models = self.models(clients) if self.are_mixtures else None
        return models.memberships if isinstance(models, Mixture) else torch.ones(len(clients), 1)

    def predict(self, client: str, x: Any, *, hard: bool = False) -> Tensor:
        """Mean predictions (B, ...) of a client's own model on raw rows x (B, ...), in the units of the target."""
        batch = self.spec.batch(x).to(self.device)
        with torch.no_grad():
            return self.spec.restore(self.backend.predict(self.models([client], hard=hard), batch[None])[0])

    def module(self, client: str, *, predictions: bool = False, hard: bool = False) -> nn.Module:
        """A client's own model as a plain nn.Module, which takes raw rows and predicts in the units of the target."""
        net = client_model(self.population, self.models([client], hard=hard), predictions=predictions)
        return self.spec.wrap(net).to(self.device)

    def export_onnx(self, client: str, path: str | Path, *, predictions: bool = True) -> Path:
        """Write a client's own model as ONNX, for batches of raw rows of any size."""
        return export_onnx(self.module(client, predictions=predictions), path, self.spec.example(self.device))


def export_onnx(module: nn.Module, path: str | Path, example: Tensor) -> Path:
    """Write `module` to `path` as ONNX, for batches of any size; `example` is a batch (B, ...) of its input.

    The input is called "x", the output "output". Needs the packages onnx and onnxscript: pip install 'ppfl[export]'.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(nn.Linear(4, 2), Path(folder) / "model.onnx", torch.rand(3, 4)).name
    'model.onnx'
    """
    path = Path(path)
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise SettingError(f"export to ONNX needs the package {missing[0]}; install it: pip install 'ppfl[export]'")
    if not path.parent.is_dir():
        raise WriteError(f"there is no folder {path.parent}; make it first, or choose another place")
    was_training, log = module.training, logging.getLogger("torch.onnx")
    level = log.level
    batch = example if len(example) > 1 else example.repeat(2, *(1 for _ in example.shape[1:]))  # 1 is never dynamic
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of the exporter's own parts
            log.setLevel(logging.ERROR)  # it warns where torchvision is missing, which no network here needs
            program = torch.onnx.export(
                module.eval(), (batch,), dynamo=True, input_names=["x"], output_names=["output"], verbose=False,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
    except Exception as error:  # the exporter has many
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"the network cannot be written as ONNX ({reason}); save its state_dict() instead") from error
    finally:
        module.train(was_training)
        log.setLevel(level)
    assert program is not None
    partial = path.with_name(f"{path.name}.partial")
    try:
        program.save(str(partial), external_data=False)  # everything in one file
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WriteError(f"{path} cannot be written ({error.strerror}); choose another place") from error
    return path
