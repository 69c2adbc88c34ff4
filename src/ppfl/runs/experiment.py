"""An experiment: data, a network, a population, a method, and how long; everything a run depends on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ..algorithms import Method, MethodByName
from ..core.adapters import with_adapters
from ..core.affinity import Affinity
from ..core.losses import LOSSES
from ..core.mixing import MIXES
from ..core.parts import freeze
from ..core.population import Population
from ..core.registry import NamedCall
from ..core.settings import Count, NonNegative, Repeats, Seed, Settings
from ..data import DataByName, Federation, load_data
from ..data.preparation import PreparationSettings
from ..data.sample_spec import SampleSpec
from ..errors import AffinityError, SettingError
from ..io.files import FolderName
from ..networks import NETWORKS, build_network, choose_loss
from ..server import Watch
from ..sites import ENGINES, Engine, Stacked
from .affinities import AFFINITIES, AffinityByName

Share = Annotated[float, Field(ge=0, lt=1)]
_FAMILY_LOSSES = {"gaussian": "squared", "poisson": "poisson"}  # of a regressor


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


class StartSettings(Settings):
    """`[start]`: the finished run to begin from (start.py)."""

    run: str | None = None  # its folder, relative to the file
    method: str | None = None  # or, in a comparison, another method of it
    frozen: str | tuple[str, ...] = ()  # parts of the network that stay as they are there

    @model_validator(mode="after")
    def _names_one_run(self) -> StartSettings:
        if (self.run is None) == (self.method is None):
            raise ValueError("it names one run to begin from; set run = <a run folder>, or method = <of a comparison>")
        return self


class EstimatorSettings(Settings):
    """`[estimator]`: a population GLM, in the place of a network, a population and a method.

    The paper's rounds, as `PopulationRegressor` and `PopulationClassifier` run them for penalty > 0, in one process and
    over sites. Settings have the names that they have there; `rounds` is max_iter and `seeds` are random states.
    `ppfl.glm.estimator_from_run` makes the fitted estimator of a run.

    >>> EstimatorSettings(kind="classifier", k=2).as_experiment({})["population"]["canonical"]
    'varying'
    """

    kind: Literal["regressor", "classifier"]
    k: Annotated[int, Field(gt=0, le=10_000)] = 3
    family: Literal["gaussian", "poisson"] | None = None  # of a regressor; None: gaussian
    mix: Literal["weights", "predictions"] = "weights"
    penalty: NonNegative = 0.0
    shared: tuple[str, ...] = ()  # prepared columns that have the same coefficient for all clients
    tol: NonNegative = 1e-6

    @model_validator(mode="after")
    def _has_a_family(self) -> EstimatorSettings:
        if self.kind == "classifier" and self.family is not None:
            raise ValueError("a classifier takes its family from the classes; leave family out")
        if "intercept" in self.shared:
            raise ValueError("over sites the intercept varies between canonical models; leave it out of shared")
        return self

    @property
    def is_gaussian(self) -> bool:
        return self.kind == "regressor" and self.family in (None, "gaussian")

    def loss_name(self, spec: SampleSpec) -> str:
        """Of the family that fits the targets; SettingError where none does."""
        classes = spec.n_classes
        if (self.kind == "classifier") != (classes is not None):
            found = "numbers" if classes is None else f"{classes} classes"
            change = "classification" if self.kind == "classifier" else "regression"
            raise SettingError(
                f"[estimator] is a {self.kind} and the targets are {found}; change kind, or set task = {change!r} "
                f"under [data]"
            )
        if classes is None:
            return _FAMILY_LOSSES[self.family or "gaussian"]
        return "logistic" if classes == 2 else "cross_entropy"

    def as_experiment(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The other tables of the experiment. given: its tables so far, of which [preparation] and [watch] are kept."""
        kept = (given.get(table) or {} for table in ("preparation", "watch"))
        preparation, watch = (found if isinstance(found, Mapping) else found.model_dump() for found in kept)
        return {
            "preparation": {**preparation, "standardise": True, "standardise_target": self.is_gaussian,
                            "count_target": self.family == "poisson"},
            "model": {"name": "glm", "shared": self.shared},
            "population": {"k": self.k, "mix": self.mix, "canonical": "varying"},
            "method": {"name": "ppfl", "penalty": self.penalty},
            "affinity": {"name": "uniform" if self.penalty else "none"},
            "watch": {**watch, "objective": True},
        }  # fmt: skip


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
    watch: Watch = Watch()
    estimator: EstimatorSettings | None = None  # a population GLM, in the place of model, population and method
    start: StartSettings | None = None  # None: from the network's own start values

    @model_validator(mode="before")
    @classmethod
    def _fill_in_estimator(cls, given: Any) -> Any:
        """All that its [estimator] stands for."""
        if not isinstance(given, dict) or given.get("estimator") is None:
            return given
        found = given["estimator"]
        try:
            settings = found if isinstance(found, EstimatorSettings) else EstimatorSettings.model_validate(found)
        except ValidationError:  # the experiment says what is wrong with it, and nothing of the tables it fills in
            return {**EstimatorSettings(kind="classifier").as_experiment({}), **given}
        filled = settings.as_experiment(given)
        always = {name: filled[name] for name in ("preparation", "watch")}
        return {**filled, **given, **always}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Experiment:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} repeat; give each once")
        if isinstance(self.watch.metrics, dict) and (named := [*self.watch.metrics]):
            raise ValueError(
                f"the metric {named[0]!r} is a function, and an experiment is written to a file; name it: "
                f'metrics = ["module:{named[0]}"]'
            )
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
