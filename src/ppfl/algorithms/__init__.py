"""One file a method, and the contract they all keep: `init, plan, work, merge, personal` as pure functions."""

from .contract import Algorithm, Personal, Plan, Problem, Sum, Total, Upload, Work
from .fedalt import FedAlt
from .fedavg import FedAvg
from .fedper import FedPer
from .fedrep import FedRep
from .fedsim import FedSim
from .lg_fedavg import LGFedAvg
from .local import Local
from .partial import Partial
from .ppfl import PPFL

ALGORITHMS: dict[str, type[FedAvg] | type[Local] | type[Partial] | type[PPFL]] = {
    method.name: method for method in (Local, FedAvg, LGFedAvg, FedPer, FedRep, FedAlt, FedSim, PPFL)
}

__all__ = [
    "ALGORITHMS",
    "PPFL",
    "Algorithm",
    "FedAlt",
    "FedAvg",
    "FedPer",
    "FedRep",
    "FedSim",
    "LGFedAvg",
    "Local",
    "Personal",
    "Plan",
    "Problem",
    "Sum",
    "Total",
    "Upload",
    "Work",
]
