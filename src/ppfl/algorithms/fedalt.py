"""FedAlt (Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022): any part of the network
is personal, and the two parts are trained in turn.

v_i <- local SGD on f_i(u, .) from v_i;  then  u_i <- local SGD on f_i(., v_i) from u, with the new v_i;
u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i.
What leaves a client: its weighted change of the shared part u, in a sum. Its personal part v_i stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator

from ..core.population import Population
from ..core.shared import Shared
from .batches import Batch, LocalData
from .descent import LocalTraining, Met, descend_networks
from .partial import Names, PersonalPart


class FedAlt(PersonalPart):
    """FedAlt on a population with one canonical model."""

    name: ClassVar[str] = "fedalt"

    personal_epochs: Annotated[int, Field(ge=1)] | None = None  # neither: as much as on the shared part
    personal_steps: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_measure_of_personal_work(self) -> FedAlt:
        if self.personal_epochs is not None and self.personal_steps is not None:
            raise ValueError("personal_epochs and personal_steps are both set; keep one of them")
        return self

    def train(self, population: Population, networks: Shared, personal: Names, data: LocalData, lr: float) -> Met:
        return alternate(population, networks, personal, data, lr, self.personal_work(), self)

    def personal_work(self) -> PersonalWork:
        """The local run on the personal part."""
        if self.personal_epochs is None and self.personal_steps is None:
            return PersonalWork.like(self, self.local_epochs, self.local_steps)
        return PersonalWork.like(self, self.personal_epochs, self.personal_steps)


class PersonalWork(LocalTraining):
    """A run on the personal part, with batches of its own: the shared part then meets others."""

    @classmethod
    def like(cls, method: LocalTraining, epochs: int | None, steps: int | None) -> PersonalWork:
        """The same optimizer, for so long."""
        return cls(
            momentum=method.momentum,
            weight_decay=method.weight_decay,
            batch_size=method.batch_size,
            local_epochs=epochs,
            local_steps=steps,
        )

    def batches(self, data: LocalData) -> Iterable[Batch]:
        return data.steps(self.batch_size, self._epochs(), self.local_steps, purpose="personal")


def alternate(
    population: Population,
    networks: Shared,
    personal: Names,
    data: LocalData,
    lr: float,
    first: LocalTraining,
    then: LocalTraining,
) -> Met:
    """The personal part with the shared one fixed, then the shared part with the personal one fixed, in place."""
    shared = Names(networks.by_name()) - personal
    runs = [
        descend_networks(population, networks, data, settings, lr, only=names)
        for settings, names in ((first, personal), (then, shared))
        if names
    ]
    loss, samples = (torch.stack(both) for both in zip(*runs, strict=True))
    met = samples.sum(dim=0)
    return Met((loss * samples).sum(dim=0) / met, met)
