"""The paper as pure functions: memberships on the simplex, affinities between clients, losses, populations of
canonical models and how they mix. Imports torch and nothing else of ours."""

from . import affinity, links, simplex
from .adapters import Lora, lora, with_adapters
from .losses import LOSSES, Loss, loss_by_name
from .mixing import MIXES
from .population import Population
from .trees import Params

__all__ = [
    "LOSSES",
    "MIXES",
    "Lora",
    "Loss",
    "Params",
    "Population",
    "affinity",
    "links",
    "lora",
    "loss_by_name",
    "simplex",
    "with_adapters",
]
