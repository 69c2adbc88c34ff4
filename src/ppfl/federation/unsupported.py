"""What an experiment may not ask of a federation."""

from __future__ import annotations

from ..errors import SettingError
from ..runs.experiment import Experiment


def refuse_unsupported(experiment: Experiment, *, secure: bool) -> None:
    """Refuse what a federation cannot do before anyone waits for sites."""
    if experiment.newcomers:
        raise SettingError(
            "newcomers are held out of all clients before a run, and a federation has no one place for that; leave "
            "newcomers out, and let a site come later instead"
        )
    if experiment.start is not None and experiment.start.frozen:
        raise SettingError(
            "[start] with frozen parts is not possible in a federation: what is frozen is never sent, and the sites do "
            "not have that run; leave frozen out"
        )
    if secure and experiment.watch.report_clients:
        raise SettingError("secure sums show no scores of single clients; set report_clients = false under [watch]")
    if secure and (shown := experiment.method.shows):
        raise SettingError(
            f"secure sums show totals alone, and {experiment.method.title} sends {', '.join(shown)} of each client; "
            f"for PPFL set share_memberships = false and penalty = 0, or use another method"
        )
