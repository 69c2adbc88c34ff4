"""What every method is: settings, a server's half and a client's half.

The server's half never sees client state, and the client's half never sees server state: a method is the only thing
that both have in common, and `self` holds its settings alone. What comes back from a client is an `Upload`, and its
type says who can see it: sums, of which only the total over clients is ever seen, and rows, which are seen client by
client. Tensors of clients have a leading dimension C: engines call `work` on a chunk of clients, a chunk of one being
the plain loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..core.affinity import Affinity
from ..core.backends import Backend
from ..core.ids import ClientIds, Roster
from ..core.population import Models, OneNetwork, Population
from ..core.registry import ByName, Registry
from ..core.settings import Settings
from ..core.trees import Params, Tree, tree_map
from ..errors import SettingError
from ..io.codec import message
from .local.batches import LocalData

if TYPE_CHECKING:
    from .local.sgd import LocalTraining

__all__ = [
    "METHODS", "NEWCOMER_ROUNDS", "Method", "MethodByName", "Plan", "Problem", "Roster", "Rows", "Sum", "Total",
    "Upload", "Who", "Work", "common_network", "participants",
]  # fmt: skip

NEWCOMER_ROUNDS = 5  # rounds of their own that newcomers take: memberships that start evenly need a few
Who = tuple[str, ...] | None  # names; None: everyone


class Problem(NamedTuple):
    """What the server knows before the first round."""

    population: Population
    roster: Roster
    affinity: Affinity
    rounds: int
    seed: int
    importance: float = 1.0  # of all clients together: a client's p_i is its own importance over this
    splits: tuple[str, ...] = ("train",)  # of the clients' data
    device: torch.device = torch.device("cpu")  # where the server computes

    @property
    def n_clients(self) -> int:
        return len(self.roster)


class Plan(NamedTuple):
    """One exchange with the clients."""

    who: Who
    task: Any  # a number or a message: which block, which steps
    ends_round: bool = True  # False: another exchange of the same round follows


@message
class Sum(NamedTuple):
    """sum_i p_i weight_i ⊗ value_i: with r weights per client, one value gives r sums. Clients know their p_i."""

    weight: Tensor | None  # (C, r); None: 1, so that r = 1
    value: Tree  # leaves (C, ...)


@message
class Total(NamedTuple):
    """A `Sum` over all clients that took part."""

    weight: Tensor  # (r,): sum_i p_i weight_i
    value: Tree  # leaves (r, ...)


class Upload(NamedTuple):
    """Everything that leaves a client in a round. A tensor that stands in several places leaves once."""

    sums: dict[str, Sum] = {}
    rows: dict[str, Tensor] = {}  # leaves (C, ...)
    metrics: dict[str, Tensor] = {}  # (C,): plain sums over clients, such as the training loss


class Work(NamedTuple):
    client: Tree  # new state, stays with the client
    upload: Upload


@message
class Rows(NamedTuple):
    """Values seen client by client, with the ids they belong to."""

    ids: ClientIds | None  # None: all clients of the site, or of the server's roster, in its order
    values: dict[str, Tensor]  # leaves (len(ids), ...)

    @property
    def n_clients(self) -> int:
        """How many clients these are."""
        return len(next(iter(self.values.values()))) if self.values else len(self.ids or ())


class Method(Settings):
    """The contract of a method. One with local training derives from `LocalTraining`, and one that adds a mean change
    to its models from `Averaging`; it then writes `work`, `model`, and what it does not want as it is there.

    A complete method: FedAvg, whose clients use the average of all models that they have trained.

    >>> import torch
    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.algorithms import Averaging, Sum, Upload, Work, descend
    >>> from ppfl.core.population import Networks
    >>> from ppfl.core.trees import map_params, subtract_
    >>> from ppfl.data import digits_federation
    >>> class SlowModels(Averaging):
    ...     pace: float = 0.3
    ...
    ...     def init_client(self, population):
    ...         return population.initial_network()
    ...
    ...     def work(self, task, shared, own, state, data):
    ...         ends = data.copies(shared)
    ...         loss = descend(data.backend.add_gradients, ends, data, self.sgd(task))
    ...         mine = map_params(lambda x, end: torch.lerp(x, end, self.pace), state, ends)
    ...         return Work(mine, Upload({"change": Sum(None, subtract_(ends, shared))}, metrics=loss.metrics()))
    ...
    ...     def model(self, backend, shared, own, state):
    ...         return Networks(state)
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), SlowModels(lr=0.1, pace=0.5), rounds=2)
    <Fitted SlowModels(lr=0.1, pace=0.5), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str]  # in experiment files; by default the class's name in lower case
    title: ClassVar[str]  # for people; by default the class's name
    search: ClassVar[dict[str, tuple[Any, ...]]] = {}  # settings worth tuning, and values worth trying
    several_models: ClassVar[bool] = False  # whether it trains a population of k > 1 canonical models

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name, cls.title = vars(cls).get("name", cls.__name__.lower()), vars(cls).get("title", cls.__name__)

    # ------------------------------------------------------------------ the server's half

    def init_server(self, problem: Problem) -> Any:
        """The server state before the first round, on the CPU."""
        raise NotImplementedError

    def plan(self, problem: Problem, server: Any, round: int) -> Plan:
        """Who works on which task in this round (from 0)."""
        raise NotImplementedError

    def send(
        self, problem: Problem, server: Any, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[Tree, dict[str, Tensor]]:
        """What is sent to all of these clients, and to each of them, leaves (len(ids), ...); ids None: all known.

        Clients that the server has never seen get defaults. `task` is the plan's, or None for prediction.
        """
        return server.shared, {}

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        """The next server state, from those who came back, at least one. Rows carry their ids."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the client's half

    def init_client(self, population: Population) -> Any:
        """The state that every client begins with, leaves (...) of one client, on the CPU."""
        return {}

    def work(self, task: Any, shared: Any, own: dict[str, Tensor], state: Any, data: LocalData) -> Work:
        """One exchange of a chunk of clients. The state that comes in is not written to."""
        raise NotImplementedError

    def model(self, backend: Backend, shared: Any, own: dict[str, Tensor], state: Any) -> Models:
        """The personal models of a chunk of clients, from what they were sent and what they keep."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what few methods change

    @property
    def shows(self) -> tuple[str, ...]:
        """What of a client reaches the server as rows: the names that its rows begin with. A site refuses others."""
        return ()

    @property
    def uses_affinity(self) -> bool:
        """Whether clients that resemble each other pull at each other."""
        return False

    @property
    def local(self) -> LocalTraining:
        """The method whose lr is searched for, and whose batch size the chunks of engines follow."""
        raise NotImplementedError

    def with_local(self, **changes: Any) -> Self:
        """The same method with other settings of its local training, such as lr or participation."""
        raise NotImplementedError

    def check(self, problem: Problem) -> None:
        """Raise SettingError where the method cannot run on this problem."""
        k = problem.population.k
        if k != 1 and not self.several_models:
            raise SettingError(f"{self.name} trains one model, the population has k = {k}; set k = 1")

    def possible_tasks(self, round: int, rounds: int, seed: int) -> tuple[Any, ...]:
        """The tasks that a server which runs this method may send in a round (from 0) of so many.

        A site that does not trust its server refuses any other. It knows nothing of the server's state.
        """
        raise SettingError(
            f"{self.name} does not say which tasks a server may send; write its `possible_tasks`, or let it derive "
            f"from LocalTraining, whose tasks are step sizes"
        )

    def newcomer_plans(self, problem: Problem, server: Any) -> list[Plan]:
        """The exchanges in which clients that come after training find their place, by default a few rounds like the
        last ones of training. Nothing of theirs is merged."""
        rounds = range(problem.rounds - NEWCOMER_ROUNDS, problem.rounds)
        return [self.plan(problem, server, max(round, 1)) for round in rounds]

    def move_server(self, server: Any, before: Roster, after: Roster) -> Any:
        """The server state for other clients: what it has of each is found by id, and newcomers get defaults."""
        return server

    def penalty_value(self, problem: Problem, server: Any) -> float:
        """What the objective F has besides the clients' losses."""
        return 0.0

    def stationarity_task(self, problem: Problem) -> Any:
        """A task whose totals say how far the method is from a stationary point; None where it has none."""
        return None

    def stationarity(self, totals: dict[str, Total], metrics: dict[str, float]) -> float:
        """The measure that a `stationarity_task` brought."""
        raise NotImplementedError


def participants(problem: Problem, fraction: float, round: int, at_least: int = 1) -> Who:
    """The clients of a round, drawn without replacement by (seed, round, client id), at least so many."""
    count = max(at_least, int(fraction * problem.n_clients + 0.5))
    return problem.roster.draw(problem.seed, round, count)


def common_network(method: Method, problem: Problem, server: Any) -> Params | None:
    """The one network that all clients use; None where clients have models of their own."""
    if method.local.several_models:
        return None
    shared, own = method.send(problem, server, (), None)  # asked for the models of no clients, which takes no computing
    states = tree_map(lambda leaf: leaf.new_empty(0, *leaf.shape), method.init_client(problem.population))
    no_backend: Any = None
    models = method.model(no_backend, shared, own, states)
    return models.values if isinstance(models, OneNetwork) else None


def _checked_method(name: str, found: Any) -> type[Method]:
    """The class of a method, which from now on may be written and read."""
    if not (isinstance(found, type) and issubclass(found, Method)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise SettingError(f"{name!r} is {what}, not a method; name a class that is a ppfl.algorithms.Method")
    try:
        return message(found)
    except TypeError as error:
        raise SettingError(f"{name!r} cannot be used: {error}") from None


METHODS: Registry[type[Method]] = Registry("method", _checked_method)  # and a user's own by "module:Class"
MethodByName = partial(ByName, METHODS)  # a field with a table whose `name` is a method's, and other keys its settings
