"""One file per method, and the contract they all keep: a server's half and a client's half, as pure functions.
`local/` has what methods share on a client: batches, SGD, membership steps, the start."""

from ..io.codec import message
from .clustered import CFL
from .contract import Method, MethodDefaults, Plan, Problem, Roster, Rows, Sum, Total, Upload, Work
from .ditto import Ditto
from .fedavg import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from .fedem import FedEM
from .fedprox import FedProx
from .finetune import FineTune
from .ifca import IFCA
from .local_only import Local
from .partial import FedAlt, FedPer, FedRep, FedSim, LGFedAvg
from .pfedme import PFedMe
from .ppfl import PPFL
from .registry import METHODS
from .scaffold import Scaffold

_METHODS: tuple[type[Method], ...] = (
    Local, FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedProx, Scaffold, FineTune, PFedMe, Ditto,
    FedEM, IFCA, CFL, LGFedAvg, FedPer, FedRep, FedAlt, FedSim, PPFL,
)  # fmt: skip
for _method in _METHODS:
    METHODS.register(_method.name, _method)

__all__ = [
    "CFL",
    "IFCA",
    "METHODS",
    "PPFL",
    "Ditto",
    "FedAdagrad",
    "FedAdam",
    "FedAlt",
    "FedAvg",
    "FedAvgM",
    "FedEM",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSim",
    "FedYogi",
    "FineTune",
    "LGFedAvg",
    "Local",
    "Method",
    "MethodDefaults",
    "PFedMe",
    "Plan",
    "Problem",
    "Roster",
    "Rows",
    "Scaffold",
    "Sum",
    "Total",
    "Upload",
    "Work",
    "message",
]
