"""One file a method, and the contract they all keep: `init, plan, work, merge, personal` as pure functions."""

from .centralized import Centralized
from .clustered import CFL
from .contract import Algorithm, Personal, Plan, Problem, Sum, Total, Upload, Work
from .ditto import Ditto
from .fedalt import FedAlt
from .fedavg import FedAvg
from .fedem import FedEM
from .fedper import FedPer
from .fedrep import FedRep
from .fedsim import FedSim
from .finetune import FineTune
from .ifca import IFCA
from .lg_fedavg import LGFedAvg
from .local import Local
from .pfedme import PFedMe
from .ppfl import PPFL

_BASELINES = (Local, FedAvg, Centralized, FineTune, PFedMe, Ditto, FedEM, IFCA, CFL)
_METHODS = (*_BASELINES, LGFedAvg, FedPer, FedRep, FedAlt, FedSim, PPFL)
ALGORITHMS: dict[str, type[Algorithm]] = {method.name: method for method in _METHODS}

__all__ = [
    "ALGORITHMS",
    "CFL",
    "IFCA",
    "PPFL",
    "Algorithm",
    "Centralized",
    "Ditto",
    "FedAlt",
    "FedAvg",
    "FedEM",
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
