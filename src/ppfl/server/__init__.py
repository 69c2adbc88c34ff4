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
from .newcomers import NewcomerScores, adapt_clients, part_newcomers, score_newcomers
from .step_size import choose_lr
from .torchrun import ALONE, Ranks, TorchRanks, TorchRun, connect, is_first_process, launched_ranks
from .training import Checkpoint, Kept, Measurement, OutputRule, Record, RoundEnd, Trained, Training, Watch, measure
from .transports import InProcess, Transport

__all__ = [
    "ALONE",
    "Checkpoint",
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
    "Trained",
    "Training",
    "Transport",
    "Watch",
    "adapt_clients",
    "begin",
    "choose_lr",
    "client_states",
    "connect",
    "evaluate",
    "is_first_process",
    "launched_ranks",
    "make_problem",
    "measure",
    "part_newcomers",
    "score_newcomers",
    "train",
    "warn_if_diverged",
]
