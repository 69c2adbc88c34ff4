"""Where work runs. An engine takes a plan and brings back sums and rows; it knows nothing of algorithms.
`loop` is one client at a time, the reference; `stacked` is many clients in one tensor operation."""

from .chunks import ENGINES, Engine, Loop, Outcome, Stacked
from .distributed import Distributed
from .evaluate import Evaluation, evaluate
from .fit import Fitted, Watch, engine_by_name, fit, follow
from .train import Report, State, begin, pose, train
from .tune import with_chosen_lr

__all__ = [
    "ENGINES",
    "Distributed",
    "Engine",
    "Evaluation",
    "Fitted",
    "Loop",
    "Outcome",
    "Report",
    "Stacked",
    "State",
    "Watch",
    "begin",
    "engine_by_name",
    "evaluate",
    "fit",
    "follow",
    "pose",
    "train",
    "with_chosen_lr",
]
