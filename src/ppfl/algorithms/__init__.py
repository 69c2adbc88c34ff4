"""One file a method, and the contract they all keep: `init, plan, work, merge, personal` as pure functions."""

from .contract import Algorithm, Personal, Plan, Problem, Sum, Total, Upload, Work
from .fedavg import FedAvg
from .local import Local
from .ppfl import PPFL

ALGORITHMS: dict[str, type[FedAvg] | type[Local] | type[PPFL]] = {
    method.name: method for method in (Local, FedAvg, PPFL)
}

__all__ = [
    "ALGORITHMS",
    "PPFL",
    "Algorithm",
    "FedAvg",
    "Local",
    "Personal",
    "Plan",
    "Problem",
    "Sum",
    "Total",
    "Upload",
    "Work",
]
