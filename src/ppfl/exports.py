"""The names that `import ppfl` offers."""

from .algorithms import (
    CFL,
    IFCA,
    PPFL,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAlt,
    FedAvg,
    FedAvgM,
    FedEM,
    FedPer,
    FedProx,
    FedRep,
    FedSim,
    FedYogi,
    FineTune,
    LGFedAvg,
    Local,
    PFedMe,
    Scaffold,
)
from .callbacks import EarlyStopping, TensorBoard
from .core import Lora, Population, affinity, lora, with_adapters
from .data import Federation
from .errors import PPFLError
from .fitted import Fitted, load
from .fitting import compare, fit
from .server import DivergedWarning, Watch
from .sites import export_onnx

__all__ = [
    "CFL",
    "IFCA",
    "PPFL",
    "Ditto",
    "DivergedWarning",
    "EarlyStopping",
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
    "Federation",
    "FineTune",
    "Fitted",
    "LGFedAvg",
    "Local",
    "Lora",
    "PFedMe",
    "PPFLError",
    "Population",
    "Scaffold",
    "TensorBoard",
    "Watch",
    "affinity",
    "compare",
    "export_onnx",
    "fit",
    "load",
    "lora",
    "with_adapters",
]
