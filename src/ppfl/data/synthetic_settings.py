"""`[data]` of an experiment file for synthetic data, which need no files."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ppfl.core.settings import Settings
from ppfl.data.federation import Federation
from ppfl.data.synthetic import logistic_population, synthetic_classification, synthetic_groups, synthetic_linear


class Synthetic(Settings):
    """The Synthetic data of the paper."""

    name: Literal["synthetic"] = "synthetic"
    n_clients: PositiveInt = 300
    dim: PositiveInt = 150
    sources: PositiveInt = 3
    alpha: PositiveFloat = 0.4
    noise: NonNegativeFloat = 0.1
    test_points: NonNegativeInt = 5000
    seed: NonNegativeInt = 0
    min_size: PositiveInt = 50
    max_size: PositiveInt = 1000

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_classification(**self.model_dump(exclude={"name"}))


class SyntheticGroups(Settings):
    """Clients in groups with orthogonal linear models."""

    name: Literal["synthetic_groups"] = "synthetic_groups"
    n_clients: PositiveInt = 12
    groups: PositiveInt = 3
    dim: PositiveInt = 8
    samples: PositiveInt = 40
    test_points: NonNegativeInt = 20
    noise: NonNegativeFloat = 0.05
    task: Literal["classification", "regression"] = "classification"
    seed: NonNegativeInt = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_groups(**self.model_dump(exclude={"name"}))


class SyntheticLinear(Settings):
    """A Gaussian linear population with mixed memberships."""

    name: Literal["synthetic_linear"] = "synthetic_linear"
    n_clients: PositiveInt = 50
    dim: PositiveInt = 5
    k: PositiveInt = 3
    alpha: PositiveFloat = 0.5
    samples: PositiveInt = 40
    test_points: NonNegativeInt = 20
    noise: NonNegativeFloat = 0.1
    seed: NonNegativeInt = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_linear(**self.model_dump(exclude={"name"}))


class LogisticPopulation(Settings):
    """Logistic regressions with mixed memberships, for many clients with few samples."""

    name: Literal["logistic_population"] = "logistic_population"
    n_clients: PositiveInt = 1000
    samples: PositiveInt = 10
    dim: PositiveInt = 20
    k: PositiveInt = 5
    alpha: PositiveFloat = 0.3
    scale: NonNegativeFloat = 2.0
    test_points: NonNegativeInt = 5
    seed: NonNegativeInt = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return logistic_population(**self.model_dump(exclude={"name"}))
