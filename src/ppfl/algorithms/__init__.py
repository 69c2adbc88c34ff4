"""One file a method, and the contract they all keep: `init, plan, work, merge, personal` as pure functions."""

from .centralized import Centralized
from .contract import Algorithm, Personal, Plan, Problem, Sum, Total, Upload, Work
from .ditto import Ditto
from .fedalt import FedAlt
from .fedavg import FedAvg
from .fedper import FedPer
from .fedrep import FedRep
from .fedsim import FedSim
from .finetune import FineTune
from .lg_fedavg import LGFedAvg
from .local import Local
from .pfedme import PFedMe
from .ppfl import PPFL

_METHODS = (Local, FedAvg, Centralized, FineTune, PFedMe, Ditto, LGFedAvg, FedPer, FedRep, FedAlt, FedSim, PPFL)
ALGORITHMS: dict[str, type[Algorithm]] = {method.name: method for method in _METHODS}

__all__ = [
    "ALGORITHMS",
    "PPFL",
    "Algorithm",
    "Centralized",
    "Ditto",
    "FedAlt",
    "FedAvg",
    "FedPer",
    "FedRep",
    "FedSim",
    "FineTune",
    "LGFedAvg",
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
