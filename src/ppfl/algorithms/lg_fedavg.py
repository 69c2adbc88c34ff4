"""LG-FedAvg (Liang et al., Think Locally, Act Globally, 2020): a representation of its own for every client, a shared
head on top of it, trained at once.

(u_i, v_i) <- local SGD on f_i from (u, v_i), with v the first layers;
u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i.
What leaves a client: its weighted change of the head u, in a sum. Its representation v_i stays.
"""

from typing import ClassVar

from torch import nn

from .partial import Names, Part, Partial, parameters_of


class LGFedAvg(Partial):
    """FedSim with everything personal but the head. A network of one layer is all head: then it is FedAvg."""

    name: ClassVar[str] = "lg-fedavg"

    shared_part: Part = "output"

    def personal_parameters(self, net: nn.Module) -> Names:
        return Names(name for name, _ in net.named_parameters()) - parameters_of(net, self.shared_part, "shared_part")
