"""Methods of a module beside an experiment file, and a process that never imported the module."""

import sys

from ppfl.algorithms import METHODS
from ppfl.core.registry import Imports
from ppfl.io.codec import TYPES, join, split
from ppfl.runs import Experiment

__all__ = ["join", "split"]


def experiment_beside(folder, settings):
    """An experiment whose modules are in this folder."""
    return Experiment.model_validate(settings, context=Imports(folder))


def forget(name, *messages):
    """Undo the import of the method "module:Class", and of messages in its module."""
    module, _, kind = name.partition(":")
    sys.modules.pop(module, None)
    METHODS._imported.pop(name, None)
    for known in (kind, *messages):
        TYPES.pop(known, None)
