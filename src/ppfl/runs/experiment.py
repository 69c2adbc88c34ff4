"""An experiment: data, a network, a population, a method, and how long; everything a run depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from ..algorithms import Method, MethodByName
from ..core.adapters import with_adapters
from ..core.affinity import Affinity
from ..core.losses import LOSSES
from ..core.mixing import MIXES
from ..core.parts import freeze
from ..core.population import Population
from ..core.registry import NamedCall, PythonName
from ..core.settings import Count, NonNegative, Repeats, Seed, Settings
from ..data import DataByName, Federation, load_data
from ..data.preparation_settings import PreparationSettings
from ..data.sample_spec import SampleSpec
from ..errors import AffinityError
from ..io.files import FolderName
from ..networks import NETWORKS, build_network, choose_loss
from ..server import OutputRule, Watch
from ..sites import ENGINES, Engine, Stacked
from .affinities import AFFINITIES, AffinityByName
from .estimator_settings import EstimatorSettings, fill_in_estimator
from .metric_settings import load_metrics

Share = Annotated[float, Field(ge=0, lt=1)]


class _OneOf:
    """A name that must be in a registry."""

    def __init__(self, registry: dict[str, Any]) -> None:
        self.registry = registry

    def __call__(self, name: str) -> str:
        if name not in self.registry:
            raise ValueError(f"use one of {', '.join(map(repr, self.registry))}")
        return name


class PopulationSettings(Settings):
    """`[population]`: how many canonical models, of which part of the network, mixed how."""

    k: Annotated[int, Field(gt=0, le=10_000)] = 1
    mix: Annotated[str, AfterValidator(_OneOf(dict(MIXES)))] = "outputs"
    canonical: str | tuple[str, ...] = "all"
    loss: Annotated[str, AfterValidator(_OneOf(dict(LOSSES)))] | None = None  # None: by the kind of targets


class WatchSettings(Settings):
    """`[watch]`: what is measured on the way, and which state is returned."""

    every: Count = 1
    objective: bool = False
    stationarity: bool = False
    output: OutputRule = "last"
    smoothness: tuple[NonNegative, NonNegative] = (0.0, 0.0)
    report_clients: bool = True  # scores and memberships client by client; false: sums over clients alone
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the clients that are evaluated; below 1 sums alone
    metrics: tuple[PythonName, ...] = ()  # of predictions

    def build(self, base: Path | None = None) -> Watch:
        """As the server takes it; modules of metrics are looked for in `base` first."""
        return Watch(**{**self.model_dump(), "metrics": load_metrics(self.metrics, base)})


class StartSettings(Settings):
    """`[start]`: the finished run to begin from (start_from_run.py)."""

    run: str | None = None  # its folder, relative to the file
    method: str | None = None  # or, in a comparison, another method of it
    frozen: str | tuple[str, ...] = ()  # parts of the network that stay as they are there

    @model_validator(mode="after")
    def _names_one_run(self) -> StartSettings:
        if (self.run is None) == (self.method is None):
            raise ValueError("it names one run to begin from; set run = <a run folder>, or method = <of a comparison>")
        return self


class Experiment(Settings):
    """All settings of a run. `load_experiment` reads one from a TOML file."""

    name: FolderName
    rounds: Repeats
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0,)
    engine: Annotated[str, AfterValidator(_OneOf(dict(ENGINES)))] = "stacked"
    chunk: Count | None = None  # clients side by side, and ...
    threads: Count | None = None  # ... how many such chunks at a time; None: what is fastest here
    device: str = "cpu"
    states_on_disk: bool | None = None  # client states in a file; None: where they would take much memory
    # of the clients, kept out of training and scored in the end, before and after they adapt
    newcomers: Share = 0.0
    # of the clients asked in a round, lost in it: they got the model, and nothing of theirs comes back
    dropout: Share = 0.0
    data: DataByName
    preparation: PreparationSettings | None = None  # of a table; None: it has numbers alone, which stay as they are
    model: Annotated[NamedCall, NETWORKS.field()]
    population: PopulationSettings = PopulationSettings()
    method: Annotated[Method, MethodByName()]
    affinity: AffinityByName = AFFINITIES.make("auto")
    watch: WatchSettings = WatchSettings()
    estimator: EstimatorSettings | None = None  # a population GLM, in the place of model, population and method
    start: StartSettings | None = None  # None: from the network's own start values

    @model_validator(mode="before")
    @classmethod
    def _fill_in_estimator(cls, given: Any) -> Any:
        return fill_in_estimator(given)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Experiment:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} repeat; give each once")
        for name in ("chunk", "threads"):
            if getattr(self, name) is not None and self.engine != Stacked.name:
                raise ValueError(f"{name} is for engine 'stacked', the engine is {self.engine!r}; leave {name} out")
        return self

    def for_seed(self, seed: int) -> Experiment:
        """The same experiment with one seed."""
        return self.model_copy(update={"seeds": (seed,)})

    def build_data(self, base: Path | None = None) -> Federation:
        """The clients and their data, prepared; relative paths start at `base`."""
        return load_data(self.data, self.preparation, base)

    def build_affinity(self, federation: Federation, base: Path | None = None) -> Affinity | None:
        """Who resembles whom; a module with a function of one's own is looked for in `base` first."""
        found = self.affinity.call(base, federation=federation, method=self.method)
        if not isinstance(found, Affinity | None):
            raise AffinityError(
                f"[affinity]: {self.affinity.name} returned a {type(found).__name__}; it must return a "
                "ppfl.core.affinity.Affinity, or None"
            )
        return found

    def build_engine(self) -> Engine:
        """Where clients work."""
        return Stacked(self.chunk, self.threads) if self.engine == Stacked.name else ENGINES[self.engine]()

    def build_population(self, spec: SampleSpec, seed: int, base: Path | None = None) -> Population:
        """The population for such samples, its initial values drawn from the seed; modules are looked for in `base`
        first."""
        settings = self.population
        named = settings.loss if self.estimator is None else self.estimator.loss_name(spec)
        loss = choose_loss(named, spec)
        net = build_network(self.model, spec, seed, loss, copies=settings.k, base=base)
        if self.start is not None:
            freeze(net, self.start.frozen)
        if (adapters := self.model.setting("adapters")) is not None:
            net = with_adapters(net, adapters, seed)
        k, canonical, mix = settings.k, settings.canonical, settings.mix
        return Population(net, k=k, canonical=canonical, mix=mix, loss=loss)
