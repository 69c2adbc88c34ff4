"""All that happens where the data are: a site answers requests with sums over its clients. Engines compute (`loop`, one
client at a time, the reference; `stacked`, many in one tensor operation), filters look at every upload."""

from .engines import ENGINES, Engine, Loop, Stacked, engine_by_name
from .evaluation import Metrics, PredictionMetric, as_metrics
from .filters import BoundedUploads, Filter, FiniteUploads, default_filters
from .messages import (
    Close,
    Describe,
    Evaluate,
    Keep,
    Refusal,
    Reply,
    Request,
    Restore,
    Save,
    SavedStates,
    Setup,
    Train,
    UseKept,
)
from .site import Site

__all__ = [
    "ENGINES",
    "BoundedUploads",
    "Close",
    "Describe",
    "Engine",
    "Evaluate",
    "Filter",
    "FiniteUploads",
    "Keep",
    "Loop",
    "Metrics",
    "PredictionMetric",
    "Refusal",
    "Reply",
    "Request",
    "Restore",
    "Save",
    "SavedStates",
    "Setup",
    "Site",
    "Stacked",
    "Train",
    "UseKept",
    "as_metrics",
    "default_filters",
    "engine_by_name",
]
