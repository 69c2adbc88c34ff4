"""FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019): a shared representation, a head
of its own for every client, trained at once.

(u_i, v_i) <- local SGD on f_i from (u, v_i), with v the last layers;
u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i.
What leaves a client: its weighted change of the representation u, in a sum. Its head v_i stays.
"""

from typing import ClassVar

from .fedsim import FedSim


class FedPer(FedSim):
    """FedSim with the last layer personal; name more of them in `personal_part` for more personalization layers."""

    name: ClassVar[str] = "fedper"
