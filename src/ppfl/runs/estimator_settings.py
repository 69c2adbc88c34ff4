"""`[estimator]` of an experiment file: a population GLM, in the place of a network, a population and a method.

It is what `PopulationRegressor` and `PopulationClassifier` do with solver = "federated", so that the same fit runs in
one process and over sites. `ppfl.glm.estimator_from_run` makes the fitted estimator of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from ..core.settings import NonNegative, Settings
from ..data.sample_spec import SampleSpec
from ..errors import SettingError

LOSSES = {"gaussian": "squared", "poisson": "poisson"}  # of the families of a regressor
_PLACES = ("model", "population", "method", "affinity")  # what it stands in the place of


class EstimatorSettings(Settings):
    """Settings of the estimators by the names they have there; `rounds` is max_iter and `seeds` are random states.

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
            return LOSSES[self.family or "gaussian"]
        return "logistic" if classes == 2 else "cross_entropy"

    def as_experiment(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The other tables of the experiment. given: its settings so far, of which [preparation] is kept."""
        preparation = given.get("preparation") or {}
        preparation = preparation if isinstance(preparation, Mapping) else preparation.model_dump()
        return {
            "preparation": {**preparation, "standardise": True, "standardise_target": self.is_gaussian,
                            "count_target": self.family == "poisson"},
            "model": {"name": "glm", "shared": self.shared},
            "population": {"k": self.k, "mix": self.mix, "canonical": "varying"},
            "method": {"name": "ppfl", "penalty": self.penalty},
            "affinity": {"name": "uniform" if self.penalty else "none"},
            "watch": {**(given.get("watch") or {}), "objective": True},
        }  # fmt: skip


def fill_in_estimator(given: Any) -> Any:
    """Settings of an experiment with all that its [estimator] stands for."""
    if not isinstance(given, dict) or given.get("estimator") is None:
        return given
    found = given["estimator"]
    try:
        settings = found if isinstance(found, EstimatorSettings) else EstimatorSettings.model_validate(found)
    except ValidationError:  # the experiment says what is wrong with it, and nothing of tables that it would fill in
        return {**EstimatorSettings(kind="classifier").as_experiment({}), **given}
    filled = settings.as_experiment(given)
    always = {name: filled[name] for name in ("preparation", "watch")}
    return {**filled, **given, **always}


def refuse_both(given: Mapping[str, Any]) -> None:
    """Refuse a file with [estimator] and what it stands in the place of."""
    if given.get("estimator") is not None and (both := [name for name in _PLACES if name in given]):
        raise SettingError(f"the file has [estimator] and [{both[0]}], and one stands for the other; keep one of them")
