"""The names that `import ppfl` offers."""

from .algorithms import PPFL, FedAvg, Local
from .core import Population, PPFLError, affinity
from .data import Federation
from .fitting import Fitted, fit
from .server import Watch

__all__ = [
    "PPFL",
    "FedAvg",
    "Federation",
    "Fitted",
    "Local",
    "PPFLError",
    "Population",
    "Watch",
    "affinity",
    "fit",
]
