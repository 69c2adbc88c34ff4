"""One file per method, and the contract they all keep: a server's half and a client's half, as pure functions.
`local/` has what methods share on a client: batches, SGD, membership steps."""

from ..io.codec import message
from .clusters import CFL, IFCA
from .contract import METHODS, Method, MethodByName, Plan, Problem, Roster, Rows, Sum, Total, Upload, Work
from .fedavg import Averaging, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Local
from .fedem import FedEM
from .finetune import FineTune, Wrapper
from .local.sgd import SGD, LocalTraining, descend
from .own_models import Ditto, PFedMe
from .partial import FedAlt, FedPer, FedRep, FedSim, LGFedAvg
from .ppfl import PPFL
from .scaffold import Scaffold

_METHODS: tuple[type[Method], ...] = (
    Local, FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedProx, Scaffold, FineTune, PFedMe, Ditto,
    FedEM, IFCA, CFL, LGFedAvg, FedPer, FedRep, FedAlt, FedSim, PPFL,
)  # fmt: skip
for _method in _METHODS:
    METHODS.register(_method.name)(_method)

__all__ = [
    "CFL",
    "IFCA",
    "METHODS",
    "PPFL",
    "SGD",
    "Averaging",
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
    "LocalTraining",
    "Method",
    "MethodByName",
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
    "Wrapper",
    "descend",
    "message",
]
