"""What a fitted population is good for: one client's model to take away, and clients that come later."""

from .client_model import client_model
from .onnx_export import export_onnx

__all__ = ["client_model", "export_onnx"]
