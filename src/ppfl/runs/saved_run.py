"""The population that a finished run returned, from its folder alone: the data are not read."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import ValidationError

from ..algorithms.contract import Problem, Roster
from ..core.affinity import nothing
from ..core.registry import Imports
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError
from ..io.files import damaged, read_json
from ..server import ServerState, Trained
from ..sites import SavedStates
from .experiment import Experiment
from .folder import RunFolder
from .record import find_runs
from .saved_fit import restore_states


def load_finished_run(path: Path, device: torch.device, base: Path | None = None) -> Trained:
    """The run in this folder, or the only one in a folder of runs. Own modules are looked for in `base` first."""
    runs = find_runs(path)
    if len(runs) > 1:
        raise CheckpointError(f"{path} has {len(runs)} runs; give the folder of one of them, such as {runs[0]}")
    folder = RunFolder(runs[0])
    if not folder.finished:
        raise CheckpointError(f"the run in {folder.path} is not finished; finish it with ppfl run ... --resume")
    settings, clients = folder.read_experiment(), read_json(folder.clients_file)
    tensors, about = folder.read_result()
    metrics = folder.log.read_metrics(about["logs"], finished=True)
    try:
        experiment = Experiment.model_validate(settings, context=Imports(base))
        ids = tuple(clients["ids"])
        spec = SampleSpec.model_validate(clients["spec"])
        (seed,), samples = experiment.seeds, clients["samples"]
        population = experiment.build_population(spec, seed, base)
        if (start := folder.read_start()) is not None:
            population.start_from(start.values)
        problem = Problem(
            population, Roster(ids), nothing(ids), experiment.rounds, seed, float(sum(samples["train"])),
            tuple(sorted(samples)), device,
        )  # fmt: skip
        method = experiment.method
        restored, rows = restore_states(folder.result_file, method, problem, ids, tensors)
        state = ServerState(about["round"], 0, restored)
    except (KeyError, TypeError, ValidationError) as error:
        raise damaged(folder.path, f"cannot be understood ({' '.join(str(error).split())})") from None
    return Trained(problem, method, state, ids, SavedStates(rows), spec, experiment.build_engine(), metrics)
