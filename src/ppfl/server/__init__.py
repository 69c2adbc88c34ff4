"""The server: the loop of rounds, what it measures on the way, and the transports that carry its requests to sites. It
holds no data of clients and none of their states."""

from .evaluation import Evaluation, Measured, Scores, evaluate
from .loop import (
    DivergedError,
    DivergedWarning,
    RefusedUpdateWarning,
    RoundReport,
    ServerState,
    begin,
    client_states,
    make_problem,
    train,
    warn_if_diverged,
)
from .measure import Measurement, Record, RoundEnd, Watch, measure, train_and_measure
from .newcomers import NewcomerScores, adapt_clients, part_newcomers, score_newcomers
from .output import Kept, OutputRule
from .step_size import choose_lr
from .torchrun import ALONE, Ranks, TorchRanks, TorchRun, is_first_process, launched_ranks
from .transports import InProcess, Transport

__all__ = [
    "ALONE",
    "DivergedError",
    "DivergedWarning",
    "Evaluation",
    "InProcess",
    "Kept",
    "Measured",
    "Measurement",
    "NewcomerScores",
    "OutputRule",
    "Ranks",
    "Record",
    "RefusedUpdateWarning",
    "RoundEnd",
    "RoundReport",
    "Scores",
    "ServerState",
    "TorchRanks",
    "TorchRun",
    "Transport",
    "Watch",
    "adapt_clients",
    "begin",
    "choose_lr",
    "client_states",
    "evaluate",
    "is_first_process",
    "launched_ranks",
    "make_problem",
    "measure",
    "part_newcomers",
    "score_newcomers",
    "train",
    "train_and_measure",
    "warn_if_diverged",
]
