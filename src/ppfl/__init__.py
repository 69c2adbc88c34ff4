"""Population personalized federated learning: K canonical models shared by all clients, and for every client a
membership vector on the simplex that says how much of each it is."""

from .algorithms import PPFL, FedAvg, Local
from .callbacks import CSVLog, EarlyStopping, TensorBoard
from .core import Population, PPFLError, affinity
from .data import Federation
from .fitting import Fitted, fit
from .server import Watch

__version__ = "0.1.0"
__all__ = [
    "PPFL",
    "CSVLog",
    "EarlyStopping",
    "FedAvg",
    "Federation",
    "Fitted",
    "Local",
    "PPFLError",
    "Population",
    "TensorBoard",
    "Watch",
    "affinity",
    "fit",
]
