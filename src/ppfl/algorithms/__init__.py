"""One file a method, and the contract they all keep: `init, plan, work, merge, personal` as pure functions."""

from .centralized import Centralized
from .contract import Algorithm, Personal, Plan, Problem, Sum, Total, Upload, Work
from .ditto import Ditto
from .fedavg import FedAvg
from .finetune import FineTune
from .local import Local
from .pfedme import PFedMe
from .ppfl import PPFL

ALGORITHMS: dict[str, type[Algorithm]] = {
    method.name: method for method in (Local, FedAvg, PPFL, Centralized, FineTune, PFedMe, Ditto)
}

__all__ = [
    "ALGORITHMS",
    "PPFL",
    "Algorithm",
    "Centralized",
    "Ditto",
    "FedAvg",
    "FineTune",
    "Local",
    "PFedMe",
    "Personal",
    "Plan",
    "Problem",
    "Sum",
    "Total",
    "Upload",
    "Work",
]
