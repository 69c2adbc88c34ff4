"""One file a method, and the contract they all keep: `init, plan, work, merge, personal` as pure functions."""

from .clustered import CFL
from .contract import Algorithm, Personal, Plan, Problem, Sum, Total, Upload, Work
from .fedavg import FedAvg
from .fedem import FedEM
from .ifca import IFCA
from .local import Local
from .ppfl import PPFL

ALGORITHMS: dict[str, type[FedAvg] | type[Local] | type[PPFL] | type[IFCA] | type[FedEM] | type[CFL]] = {
    method.name: method for method in (Local, FedAvg, PPFL, IFCA, FedEM, CFL)
}

__all__ = [
    "ALGORITHMS",
    "CFL",
    "IFCA",
    "PPFL",
    "Algorithm",
    "FedAvg",
    "FedEM",
    "Local",
    "Personal",
    "Plan",
    "Problem",
    "Sum",
    "Total",
    "Upload",
    "Work",
]
