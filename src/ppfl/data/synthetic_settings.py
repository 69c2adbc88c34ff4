"""`[data]` of an experiment file for synthetic data, which need no files."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ppfl.core.settings import Count, CountOrZero, NonNegative, Positive, Seed, Settings
from ppfl.data.federation import Federation
from ppfl.data.lazy_population import lazy_population
from ppfl.data.synthetic import logistic_population, synthetic_classification, synthetic_groups, synthetic_linear


class Synthetic(Settings):
    """The Synthetic data of the paper."""

    name: Literal["synthetic"] = "synthetic"
    n_clients: Count = 300
    dim: Count = 150
    sources: Count = 3
    alpha: Positive = 0.4
    noise: NonNegative = 0.1
    test_points: CountOrZero = 5000
    seed: Seed = 0
    min_size: Count = 50
    max_size: Count = 1000

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_classification(**self.model_dump(exclude={"name"}))


class SyntheticGroups(Settings):
    """Clients in groups with orthogonal linear models."""

    name: Literal["synthetic_groups"] = "synthetic_groups"
    n_clients: Count = 12
    groups: Count = 3
    dim: Count = 8
    samples: Count = 40
    test_points: CountOrZero = 20
    noise: NonNegative = 0.05
    task: Literal["classification", "regression"] = "classification"
    seed: Seed = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_groups(**self.model_dump(exclude={"name"}))


class SyntheticLinear(Settings):
    """A Gaussian linear population with mixed memberships."""

    name: Literal["synthetic_linear"] = "synthetic_linear"
    n_clients: Count = 50
    dim: Count = 5
    k: Count = 3
    alpha: Positive = 0.5
    samples: Count = 40
    test_points: CountOrZero = 20
    noise: NonNegative = 0.1
    seed: Seed = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_linear(**self.model_dump(exclude={"name"}))


class LogisticPopulation(Settings):
    """Logistic regressions with mixed memberships, for many clients with few samples."""

    name: Literal["logistic_population"] = "logistic_population"
    n_clients: Count = 1000
    samples: Count = 10
    dim: Count = 20
    k: Count = 5
    alpha: Positive = 0.3
    scale: NonNegative = 2.0
    test_points: CountOrZero = 5
    seed: Seed = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return logistic_population(**self.model_dump(exclude={"name"}))


class LazyPopulation(Settings):
    """Mixed linear classifiers whose samples are drawn when a client takes part, for millions of clients."""

    name: Literal["lazy_population"] = "lazy_population"
    n_clients: Count = 1000
    samples: Count = 10
    dim: Count = 20
    k: Count = 5
    classes: Annotated[int, Field(ge=2, le=100_000)] = 2
    alpha: Positive = 0.3
    scale: NonNegative = 2.0
    test_points: CountOrZero = 5
    seed: Seed = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return lazy_population(**self.model_dump(exclude={"name"}))
