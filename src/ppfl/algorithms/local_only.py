"""Local: every client alone, no collaboration.

theta_i <- local SGD on f_i. What leaves a client: nothing but its training loss, in a sum.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..core.backends import Backend
from ..core.population import Models, Networks, Population
from ..core.trees import Params, map_params
from .contract import MethodDefaults, Problem, Rows, Total, Upload, Work
from .fedavg import one_model_only
from .local.batches import LocalData
from .local.sgd import LocalTraining, train_networks


class Local(MethodDefaults, LocalTraining):
    """A model of its own for every client, from common start values.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), Local(lr=0.1), rounds=2)
    <Fitted Local(lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init_server(self, problem: Problem) -> dict[str, Tensor]:
        return {}

    def send(
        self, problem: Problem, server: Any, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, {}

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        return server

    def init_client(self, population: Population) -> Params:
        return population.initial_network()

    def work(self, backend: Backend, task: float, shared: Any, own: Any, client: Params, data: LocalData) -> Work:
        mine = map_params(Tensor.clone, client)
        loss = train_networks(backend, mine, data, self, lr=task)
        return Work(mine, Upload(metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Any, own: Any, client: Params) -> Models:
        return Networks(client)
