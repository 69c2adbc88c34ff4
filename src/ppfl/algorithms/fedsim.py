"""FedSim (Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022): any part of the network
is personal, and both parts are trained at once.

(u_i, v_i) <- local SGD on f_i from (u, v_i);  u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i.
What leaves a client: its weighted change of the shared part u, in a sum. Its personal part v_i stays.
"""

from typing import ClassVar

from .partial import PersonalPart


class FedSim(PersonalPart):
    """FedSim on a population with one canonical model. An adapter is a submodule like any other."""

    name: ClassVar[str] = "fedsim"
