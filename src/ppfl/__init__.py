"""Population personalized federated learning: K canonical models shared by all clients, and for every client a
membership vector on the simplex that says how much of each it is."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exports import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and the command line must hear Ctrl-C in them."""
    exports = import_module(".exports", __name__)
    if name in globals():  # a folder of the package, imported just now
        return globals()[name]
    if name != "__all__" and name not in exports.__all__:
        raise AttributeError(f"module 'ppfl' has no attribute {name!r}")
    return getattr(exports, name)


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
