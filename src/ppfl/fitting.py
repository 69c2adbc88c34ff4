"""`fit`: the door for Python."""

from __future__ import annotations

from .algorithms import METHODS, PPFL
from .algorithms.contract import Method
from .callback_list import OnRound, running, show_frozen_layers
from .core.affinity import Affinity
from .core.population import Population
from .core.registry import Imports
from .data import Federation
from .data.sample_spec import SampleSpec
from .errors import SettingError
from .fitted import Fitted
from .insight import onboarding
from .server import Training, Watch, connect, warn_if_diverged
from .sites import Engine, engine_by_name


def fit(
    population: Population,
    federation: Federation,
    method: Method | type[Method] | str | None = None,
    *,
    rounds: int = 100,
    affinity: Affinity | None = None,
    engine: str | Engine = "stacked",
    seed: int = 0,
    watch: Watch | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
    start: Fitted | None = None,
) -> Fitted:
    """Train `population` on `federation`, by PPFL unless another method is given: an object, a class or a name.

    start: go on from there for so many more rounds. Its clients keep their states, and new ones are onboarded first.
    With another method than the one that trained it, which must have one network for all clients, such as FedAvg: begin
    with that network, as all canonical models and as each client's own.

    on_round: a callback, or several, called with the record of every round; one that returns True ends training there
    (`ppfl.callbacks`). progress: a bar is shown on a terminal and in a notebook (with ipywidgets), and nothing
    elsewhere; False shows nothing, and True prints a few lines where there can be no bar. The logger "ppfl" gets one
    line at the start, and at level DEBUG one per round.

    >>> from torch import nn
    >>> from ppfl.data import digits_federation
    >>> fitted = fit(Population(nn.Linear(64, 10), k=4), digits_federation(), rounds=3)
    >>> fitted.memberships.shape
    torch.Size([40, 4])
    """
    engine, watch = engine_by_name(engine), watch or Watch()
    asked = method_of(method)
    if not isinstance(rounds, int) or rounds < 1:
        raise SettingError(f"rounds is {rounds}; train for at least one round")
    if start is not None and asked is not None and type(asked) is not type(start.method):
        population.start_from(onboarding.network_to_start_from(start, asked))
        start = None
    if start is not None:
        method = onboarding.method_to_continue(start.method, asked)
        onboarding.refuse_other_start(start, population, federation, method, affinity, watch)
        population = start.population
    else:
        method = PPFL() if asked is None else asked
    with show_frozen_layers(progress):
        transport = connect(federation, population, engine, metrics=watch.known_metrics)
    training = Training(transport, population, method, rounds=rounds, seed=seed, affinity=affinity, watch=watch)
    if start is not None:
        if new := [client for client in federation.ids if client not in start.known]:
            start = start.onboard(federation.select(new))
        training.go_on(start)
    with running(on_round, progress, training.problem, method, watch) as callbacks:
        if start is None:
            training.begin()
        callbacks.log_start(training.method)
        for end in training.rounds():
            if callbacks.end_training(end):
                break
    warn_if_diverged([record["loss"] for record in training.history], training.method.local.step_size(0, 1))
    return Fitted(**vars(training.trained(SampleSpec.of(federation), engine)))


def method_of(method: Method | type[Method] | str | None) -> Method | None:
    """The method that an object, a class or a name stands for, with default settings for the last two."""
    if isinstance(method, str):
        method = METHODS.find(method, Imports())
    if isinstance(method, type):
        method = method()
    if method is not None and not (hasattr(method, "work") and hasattr(method, "merge")):
        raise SettingError(f"method is {method!r}; give a method such as PPFL(), its class or its name 'ppfl'")
    return method
