"""Every error a user can cause. The message says what was found, what was expected and what to do."""


class PPFLError(ValueError):
    """Bad input of any kind; the command line prints its one line and exits with 2."""


class DataError(PPFLError):
    """A federation, a data file or a partition that cannot be used."""


class AffinityError(PPFLError):
    """An affinity that does not fit the clients, or is not one."""


class ModelError(PPFLError):
    """A network, loss or way of mixing that cannot become a population."""


class SettingError(PPFLError):
    """A setting or experiment file with a wrong key or value."""


class RankError(PPFLError):
    """A process of a distributed run that is gone, so that the others cannot go on."""


class CheckpointError(PPFLError):
    """A run folder or checkpoint that is incomplete, damaged or of another experiment."""
