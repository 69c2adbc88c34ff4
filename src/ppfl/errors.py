"""All errors that a user can cause. The message says what was found, what was expected and what to do."""


class PPFLError(ValueError):
    """Bad input of any kind; the command line prints the message in one line and exits with code 2.

    >>> from ppfl import Federation
    >>> try:
    ...     Federation.from_arrays([[0.5]], [0, 1], clients=["a"])
    ... except PPFLError as error:
    ...     print(error)
    x has 1 rows, y 2 and clients 1; they must pair row by row
    """


class DataError(PPFLError):
    """A federation, a data file or a partition that cannot be used.

    >>> from ppfl.data import digits_federation
    >>> digits_federation().client("nobody")
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no client 'nobody' among the 40 of digits; ids look like 'g0-c0'
    """


class AffinityError(PPFLError):
    """An affinity that is invalid or does not match the clients.

    >>> from ppfl import affinity
    >>> affinity.from_graph([("a", "b")], ids=["a", "c"])
    Traceback (most recent call last):
        ...
    ppfl.errors.AffinityError: affinity has no client 'b' among its 2; check the spelling of the edges
    """


class ModelError(PPFLError):
    """A network, loss or kind of mixing that cannot be used for a population.

    >>> import torch
    >>> from ppfl import Population
    >>> Population(torch.nn.Linear(2, 2), k=0)
    Traceback (most recent call last):
        ...
    ppfl.errors.ModelError: k is 0; a population has at least one canonical model: set k >= 1
    """


class SettingError(PPFLError):
    """A setting or experiment file with a wrong key or value.

    >>> from ppfl import Watch
    >>> Watch(every=0)
    Traceback (most recent call last):
        ...
    ppfl.errors.SettingError: Watch: every is 0; it should be greater than 0
    """


class RankError(PPFLError):
    """A process of a distributed run has ended, so the others cannot continue."""


class LostWorkerError(PPFLError):
    """A worker process that died before it had finished its task."""


class CheckpointError(PPFLError):
    """A run folder or checkpoint that is incomplete, damaged or from another experiment.

    >>> from ppfl.runs import load_run
    >>> load_run("no such folder")
    Traceback (most recent call last):
        ...
    ppfl.errors.CheckpointError: ...
    """


class WriteError(PPFLError):
    """A file that cannot be written; what was there before is unchanged.

    >>> from pathlib import Path
    >>> from ppfl.io.files import write_text
    >>> write_text(Path("no such folder/notes.txt"), "")
    Traceback (most recent call last):
        ...
    ppfl.errors.WriteError: no such folder/notes.txt cannot be written (No such file or directory); ...
    """
