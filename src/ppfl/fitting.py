"""`fit`: the door for Python."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .algorithms import METHODS, PPFL
from .algorithms.contract import Method, common_network
from .callbacks import FitSetting, OnRound, running, show_frozen_layers
from .core.affinity import Affinity
from .core.population import Population
from .core.registry import Imports
from .core.settings import shown
from .core.trees import Params
from .data import Federation
from .data.sample_spec import SampleSpec
from .errors import AffinityError, DataError, ModelError, PPFLError, SettingError
from .fitted import Fitted
from .networks import refuse_text_as_numbers
from .runs import RunRecord
from .server import Training, Watch, connect, warn_if_diverged
from .server.newcomers import refuse_other_data
from .sites import Engine, engine_by_name

if TYPE_CHECKING:
    from .report import Comparison

KEPT_MEMBERSHIPS = 10_000_000  # numbers


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
    """Trains a population on the data of its clients.

    The logger "ppfl" gets one line at the start, and at level DEBUG one per round.

    Args:
        population: The network, how it is split into common and canonical parts, and how these are mixed. It is not
            changed.
        federation: The clients' training and test data.
        method: The training method: an object such as `PPFL(lr=0.1)`, a class, or a name. PPFL by default.
        rounds: Number of communication rounds; with `start`, of further ones.
        affinity: Which clients resemble each other. Only methods with a Laplacian penalty use it.
        engine: "stacked" trains many clients in one tensor operation; "loop" trains one at a time and is the reference.
        seed: Seeds start values, batches and draws of clients. The same seed gives the same result.
        watch: What is measured on the way, and which state is returned; by default test scores after every round, and
            the last state.
        on_round: A callback, or several, called with the record of every round; one that returns True ends training
            there. See `ppfl.callbacks`.
        progress: By default a bar is shown on a terminal and in a notebook, and nothing elsewhere. False shows nothing;
            True prints a few lines where there can be no bar.
        start: A fit to go on from. Known clients keep their states; new clients are onboarded first. With another
            method than the one that trained it, which must have one network for all clients, such as FedAvg: training
            begins with that network, as all canonical models and as each client's own.

    Returns:
        A Fitted: memberships, personal models, history, and methods to predict, evaluate, save and export.

    Raises:
        PPFLError: If something cannot be used, in one line with what was found, what was expected and what to do; such
            as a SettingError for FedAvg with k > 1, or a ModelError for a network that cannot run on the data.

    Example:
        >>> from torch import Tensor, nn
        >>> from ppfl.data import digits_federation
        >>> fitted = fit(Population(nn.Linear(64, 10), k=4), digits_federation(), rounds=3)
        >>> fitted.memberships.shape
        torch.Size([40, 4])
    """
    watch = Watch() if watch is None else watch
    _check_arguments(population, federation, rounds, affinity, seed, watch, start)
    engine, watch, asked = engine_by_name(engine), watch.with_functions(), method_of(method)
    if start is not None and asked is not None and type(asked) is not type(start.method):
        population = copy.deepcopy(population)  # the caller keeps the start values that it has
        population.start_from(_network_to_start_from(start, asked))
        start = None
    if start is not None:
        method = _method_to_continue(start.method, asked)
        _refuse_other_start(start, population, federation, watch)
        population = start.population
    else:
        method = PPFL() if asked is None else asked
    _refuse_penalty_without_affinity(method, affinity)
    with show_frozen_layers(progress):
        transport = connect(federation, population, engine, metrics=watch.metrics)
    training = Training(transport, population, method, rounds=rounds, seed=seed, affinity=affinity, watch=watch)
    if start is not None:
        if new := [client for client in federation.ids if client not in start.known]:
            start = start.onboard(federation.select(new))
        training.go_on(start)
    kept: dict[int, Tensor] = {}
    with running(on_round, progress, FitSetting(training.problem, method, watch)) as callbacks:
        if start is None:
            training.begin()
        callbacks.log_start(training.method)
        for end in training.rounds():
            if end.measured is not None and end.measured.memberships is not None:
                _keep(kept, end.state.round, end.measured.memberships)
            if callbacks.end_round(end):
                break
    warn_if_diverged([record["loss"] for record in training.history], training.method.local.step_size(0, 1))
    return Fitted(**vars(training.trained(SampleSpec.of(federation), engine)), memberships_by_round=kept)


def compare(
    population: Population,
    federation: Federation,
    methods: Mapping[str, Method | type[Method] | str] | Sequence[Method | type[Method] | str],
    *,
    rounds: int = 100,
    seeds: Sequence[int] = (0,),
    **settings: Any,
) -> Comparison:
    """Trains a network by several methods on the same data, with the same start values and rounds.

    Args:
        population: What PPFL and other methods with several models train. Methods with one model for all, such as
            FedAvg, train its network.
        federation: The clients' training and test data.
        methods: Methods by the names they get in tables and charts, or a list of them.
        rounds: Number of communication rounds.
        seeds: One fit of every method for each; tables show means and standard deviations.
        settings: What `fit` takes too, such as `watch`, `affinity` and `engine`.

    Returns:
        A Comparison: it prints as a table, `frame` and `clients` are DataFrames, `plot_history()`, `plot_clients()` and
        `plot_memberships()` are charts, and `report(folder)` writes one page with everything.

    Example:
        >>> from torch import nn
        >>> from ppfl.data import digits_federation
        >>> found = compare(Population(nn.Linear(64, 10), k=4), digits_federation(), ["fedavg", "ppfl"], rounds=3)
        >>> sorted(found.frame["method"]), found.clients.shape
        (['FedAvg', 'PPFL'], (40, 8))
    """
    from .report import Comparison  # here, as a fit alone needs none of it

    asked = {label: method_of(method) for label, method in methods.items()} if isinstance(methods, Mapping) else {
        method.title: method for method in map(method_of, methods) if method is not None
    }  # fmt: skip
    if not asked or (not isinstance(methods, Mapping) and len(asked) < len(methods)):
        raise SettingError('methods share a title; name each: compare(..., {"PPFL, lr 0.1": PPFL(lr=0.1), ...})')
    one = Population(population.architecture, k=1, loss=population.loss)
    truth = None if federation.truth is None else federation.truth.memberships
    runs: dict[str, list[RunRecord]] = {}
    for label, method in asked.items():
        trained = population if method is None or method.several_models else one
        fits = (fit(trained, federation, method, rounds=rounds, seed=seed, **settings) for seed in seeds)
        runs[label] = [fitted.record(truth) for fitted in fits]
    return Comparison(runs)


def _keep(by_round: dict[int, Tensor], round: int, memberships: Tensor) -> None:
    """Keep memberships for charts; where they are many, those of every second round are dropped."""
    by_round[round] = memberships.clone()
    while len(by_round) > 2 and len(by_round) * memberships.numel() > KEPT_MEMBERSHIPS:
        for past in list(by_round)[1:-1:2]:
            del by_round[past]


def method_of(method: Method | type[Method] | str | None) -> Method | None:
    """The method that an object, a class or a name stands for, with default settings for the last two."""
    if isinstance(method, str):
        method = METHODS.find(method, Imports())
    if isinstance(method, type):
        method = method()
    if method is not None and not (hasattr(method, "work") and hasattr(method, "merge")):
        sgd = "; every client makes its own SGD, set by PPFL(lr=0.1, momentum=0.9)" if hasattr(method, "step") else ""
        raise SettingError(
            f"method is {shown(method)}; give a method such as PPFL(), its class or its name 'ppfl'{sgd}"
        )
    return method


# ---------------------------------------------------------------------- what cannot be

_EXPECTED: dict[str, tuple[type, type[PPFLError], str]] = {
    "population": (Population, ModelError, "give a Population, such as Population(net, k=4)"),
    "federation": (Federation, DataError, "give a Federation, such as Federation.from_arrays(x, y, clients)"),
    "affinity": (Affinity, AffinityError, "give ppfl.affinity.from_matrix(W, federation.ids)"),
    "watch": (Watch, SettingError, "give a Watch, such as Watch(every=5)"),
    "start": (Fitted, SettingError, "give what fit or ppfl.load(path) returned"),
}


def _check_arguments(
    population: Population,
    federation: Federation,
    rounds: int,
    affinity: Affinity | None,
    seed: int,
    watch: Watch,
    start: Fitted | None,
) -> None:
    if isinstance(population, Federation) and isinstance(federation, Population):
        raise SettingError("the population and the federation are swapped; call fit(population, federation)")
    given: dict[str, Any] = {"affinity": affinity, "start": start}
    given = {"population": population, "federation": federation, "watch": watch} | {
        name: value for name, value in given.items() if value is not None
    }
    for name, value in given.items():
        kind, error, advice = _EXPECTED[name]
        if not isinstance(value, kind):
            wrapped = " around your network" if name == "population" and isinstance(value, nn.Module) else ""
            raise error(f"{name} is a {type(value).__name__}; {advice}{wrapped}")
    if not isinstance(rounds, int) or rounds < 1:
        raise SettingError(f"rounds is {rounds!r}; train for at least one round: give a whole number")
    if not isinstance(seed, Integral):
        raise SettingError(f"seed is {seed!r}; give a whole number, such as seed=0")
    refuse_text_as_numbers(population.loss, federation.classes)


def _refuse_penalty_without_affinity(method: Method, affinity: Affinity | None) -> None:
    """A penalty between clients that nothing relates would be left out without a word."""
    if method.uses_affinity and affinity is None:
        raise SettingError(
            "method has a penalty, by which clients that resemble each other pull at each other, but affinity is None; "
            "pass affinity=..., such as ppfl.affinity.from_labels(federation.label_counts(), federation.ids), or a "
            "method with penalty=0"
        )


# ---------------------------------------------------------------------- going on from a fit


def _method_to_continue(trained: Method, asked: Method | None) -> Method:
    """The method that goes on: the one that trained so far, or the same with other settings."""
    if asked is None:
        return trained
    return asked.with_local(lr=trained.local.step_size(0, 1)) if asked.local.lr == "auto" else asked


def _network_to_start_from(start: Fitted, asked: Method) -> Params:
    """The one network that a method trained for all clients, for another method to begin with."""
    network = common_network(start.method, start.problem, start.state.server)
    if network is None:
        raise SettingError(
            f"start was trained by {start.method.title}, whose clients have models of their own, and method is "
            f"{asked.title}; go on with the same method, or start from one with one network for all, such as FedAvg"
        )
    return network


def _refuse_other_start(start: Fitted, population: Population, federation: Federation, watch: Watch) -> None:
    """Refuse to go on with another population or other data."""
    if _parts(start.population) != _parts(population):
        raise ModelError("population is another one than start was trained with; pass start.population")
    refuse_other_data(start.spec, federation)
    if watch.output == "random":
        raise SettingError("output is 'random', which draws among all rounds of a run; go on with 'last' or 'best'")


def _parts(population: Population) -> tuple[object, ...]:
    """What two populations have in common if training can go on from one with the other."""
    shapes = {name: tuple(leaf.shape) for name, leaf in population.initial_network().items()}
    return population.k, population.mix.name, population.canonical_modules, shapes
