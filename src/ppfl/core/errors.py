"""All errors that a user can cause. The message says what was found, what was expected and what to do."""


class PPFLError(ValueError):
    """Bad input of any kind; the command line prints the message in one line and exits with code 2."""


class DataError(PPFLError):
    """A federation, a data file or a partition that cannot be used."""


class AffinityError(PPFLError):
    """An affinity that is invalid or does not match the clients."""


class ModelError(PPFLError):
    """A network, loss or kind of mixing that cannot be used for a population."""


class SettingError(PPFLError):
    """A setting or experiment file with a wrong key or value."""


class RankError(PPFLError):
    """A process of a distributed run has ended, so the others cannot continue."""


class LostWorkerError(PPFLError):
    """A worker process that died before it had finished its task."""


class CheckpointError(PPFLError):
    """A run folder or checkpoint that is incomplete, damaged or from another experiment."""


class WriteError(PPFLError):
    """A file that cannot be written; what was there before is unchanged."""
