"""FedRep (Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021): a shared
representation, a head of its own for every client, trained in turn.

v_i <- many epochs on the head with the representation u fixed;  then  u_i <- local SGD on the representation with the
new head fixed;  u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i.
What leaves a client: its weighted change of the representation u, in a sum. Its head v_i stays.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .descent import Met
from .fedalt import PersonalWork, alternate
from .partial import Names, PersonalPart


class FedRep(PersonalPart):
    """FedAlt with the last layer personal, and many passes over it for one over the representation."""

    name: ClassVar[str] = "fedrep"

    head_epochs: Annotated[int, Field(ge=1)] = 10

    def train(self, population: Population, networks: Shared, personal: Names, data: LocalData, lr: float) -> Met:
        first = PersonalWork.like(self, epochs=self.head_epochs, steps=None)
        return alternate(population, networks, personal, data, lr, first, then=self)
