"""`[start]`: a run that begins with the network of a finished run, so that pre-training is done once.

    [start]
    run = "runs/pretrain"  # a run folder, or a folder of runs, of which the run with the same seed is taken

`frozen = "body"` names parts of the network that stay as they are in that run and are never sent; layers at its
beginning then run once per sample. In a comparison, `method = "FedAvg"` names another method of it, which is then run
first. The network becomes the start value of everything that is trained: the common part, all K canonical models, each
client's own model. A copy of it is kept in the folder of the new run, which does not need the other folder any more.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..algorithms.contract import common_network
from ..core.population import Population
from ..errors import CheckpointError, ModelError, SettingError
from ..io.codec import read_digest
from .experiment import Experiment
from .folder import RunFolder, StartNetwork
from .record import find_runs
from .saved_fit import load_finished_run


def load_start(experiment: Experiment, base: Path | None, method_folder: Path | None = None) -> StartNetwork | None:
    """The network that an experiment with one seed begins with; None where it has no `[start]`.

    `method_folder`: the runs of the method that `[start]` names, where it names a method.
    """
    settings, (seed,) = experiment.start, experiment.seeds
    if settings is None:
        return None
    if settings.run is not None:
        path = _run_with_seed((base or Path()) / settings.run, seed)
    elif method_folder is not None:
        path = _run_with_seed(method_folder, seed)
    else:
        raise SettingError(
            f"[start]: method is {settings.method!r}, a method of a comparison that ppfl compare runs first; for a "
            f"single run and for trials set run = <the folder of its run>"
        )
    saved = load_finished_run(path, torch.device("cpu"), base)
    network = common_network(saved.method, saved.problem, saved.state.server)
    if network is None:
        raise SettingError(
            f"[start]: {path} is a run of {saved.method.title}, which has no single network, as clients have models of "
            f"their own; give a run of a method with one network for all, such as fedavg"
        )
    about = {"folder": str(path), "seed": saved.problem.seed, "round": saved.state.round, "method": saved.method.name}
    return StartNetwork(network, about | {"sha256": read_digest(RunFolder(path).result_file)})


def start_population_from(population: Population, start: StartNetwork) -> None:
    """Make these the start values of a population; refuse those of another network."""
    try:
        population.start_from(start.values)
    except ModelError as error:
        raise ModelError(f"[start], run {start.about['folder']}: {error}") from None


def _run_with_seed(path: Path, seed: int) -> Path:
    """The run folder itself; of a folder of runs the one with this seed, or else its only one."""
    runs = find_runs(path)
    same_seed = path / f"seed-{seed}"
    if same_seed in runs or len(runs) == 1:
        return same_seed if same_seed in runs else runs[0]
    raise CheckpointError(
        f"[start]: {path} has {len(runs)} runs and none with seed {seed}; add that seed there, or give the folder of "
        f"one run, such as {runs[0]}"
    )
