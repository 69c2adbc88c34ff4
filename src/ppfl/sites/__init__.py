"""All that happens where the data are: a site answers requests with sums over its clients. Engines compute (`loop`, one
client at a time, the reference; `stacked`, many in one tensor operation), filters look at every upload."""

from .client_model import client_model
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
from .model_files import export_models, predict_table
from .personal_models import PersonalModels, export_onnx
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
    "PersonalModels",
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
    "client_model",
    "default_filters",
    "engine_by_name",
    "export_models",
    "export_onnx",
    "predict_table",
]
