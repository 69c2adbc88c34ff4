"""A fitted population as one file (`io.codec`). Nothing is pickled. It holds:

about      what describes the population, its network, the method and the samples
network    the start values of the trained parameters
constants  frozen parameters and buffers, which may be infinite
states     by name, `server`: canonical models, and memberships where clients show them; `clients`: one row for each
           client that took part; `at`: where these clients stand in known_ids
ids, known_ids, history
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.contract import Method, Problem, Roster, Rows
from ..core.affinity import nothing
from ..core.ids import ClientIds
from ..core.losses import Loss
from ..core.population import Population
from ..core.trees import named_leaves, tree_map
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, PPFLError
from ..io.codec import dump, load
from ..io.files import atomic_write, damaged
from ..networks.description import describe_network
from ..server import ServerState, Trained
from ..sites import ENGINES, SavedStates, Stacked, engine_by_name
from .checkpoint import AT, rows_at, rows_like, with_positions
from .fit_parts import (
    describe_adapters,
    describe_loss,
    describe_method,
    restore_loss,
    restore_method,
    restore_network,
)
from .storage import check_values, restore

KIND = "fitted population"


def save_fit(path: Path, fit: Trained) -> None:
    """Write a fit to a file; if writing fails, there is no half-written file."""
    problem, population = fit.problem, fit.problem.population
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file, such as {path / 'fitted.safetensors'}")
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent}; make it first, or choose another place")
    trained, net = population.initial_network(), population.architecture
    constants = {name: p for name, p in net.named_parameters() if name not in trained} | dict(net.named_buffers())
    about = {
        "population": {
            "k": population.k,
            "mix": population.mix.name,
            "canonical": "all" if population.canonical_modules == ("",) else list(population.canonical_modules),
            "loss": describe_loss(population.loss),
            "network": describe_network(net),
            "adapters": describe_adapters(net),
            "evaluation_mode": [name for name, module in net.named_modules() if not module.training],
        },
        "data": fit.spec.model_dump(mode="json"),
        "method": describe_method(fit.method),
        "problem": {"rounds": problem.rounds, "seed": problem.seed, "importance": problem.importance},
        "splits": list(problem.splits),
        "state": {"round": fit.state.round, "exchange": fit.state.exchange},
        "engine": getattr(fit.engine, "name", Stacked.name),
        "filters": fit.clients.filters,
    }
    content = {
        "about": about,
        "network": trained,
        "constants": constants,
        "states": named_leaves({"server": fit.state.server, **with_positions(fit.clients.rows, fit.ids)}),
        "ids": problem.roster.ids,
        "known_ids": fit.ids,
        "history": fit.history,
    }
    with atomic_write(path) as file:
        dump(content, file, KIND)


def load_fit(
    path: Path,
    net: nn.Module | None = None,
    loss: Loss | None = None,
    method: Method | type[Method] | None = None,
    device: torch.device | str = "cpu",
) -> Trained:
    """What `save_fit` wrote. `net`, `loss` and `method` are needed where they are the user's own code."""
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give a file that fitted.save wrote, or the folder of a run")
    parts = load(path, KIND)
    try:
        about, found = parts["about"], parts["about"]["population"]
        for part in ("network", "states"):
            check_values(path, parts[part])
        built = restore_network(path, found, net, parts)
        chosen = restore_loss(path, found["loss"], loss)
        spec = SampleSpec.model_validate(about["data"])
        k, canonical, mix = found["k"], found["canonical"], found["mix"]
        population = Population(built, k=k, canonical=canonical, mix=mix, loss=chosen)
        rule = restore_method(path, about["method"], method)
        numbers, place = about["problem"], torch.device(device)
        roster = Roster(parts["ids"])
        problem = Problem(
            population, roster, nothing(roster.ids), numbers["rounds"], numbers["seed"], numbers["importance"],
            tuple(about["splits"]), place,
        )  # fmt: skip
        state, rows = restore_states(path, rule, problem, parts["known_ids"], parts["states"])
        return Trained(
            problem, rule, ServerState(about["state"]["round"], about["state"]["exchange"], state),
            parts["known_ids"], SavedStates(rows, about["filters"]), spec,
            engine_by_name(about["engine"] if about["engine"] in ENGINES else Stacked.name), parts["history"],
        )  # fmt: skip
    except PPFLError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"cannot be understood ({' '.join(str(error).split())})") from None


def restore_states(
    path: Path,
    method: Method,
    problem: Problem,
    ids: ClientIds,
    tensors: Mapping[str, Tensor],
) -> tuple[Any, Rows]:
    """The states of the server and of clients among `ids` from their tensors, checked, on the problem's device."""
    server = restore(path, under(tensors, "server"), method.init_server(problem))
    template = rows_like(method.init_client(problem.population), len(tensors[AT]))
    rows = restore(
        path, {name: v for name, v in tensors.items() if name == AT or name.startswith("clients.")}, template
    )
    server, rows = tree_map(lambda leaf: leaf.to(problem.device), (server, rows))
    return server, rows_at(rows, ids)


def under(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors of one part, by their names within it."""
    return {name.removeprefix(f"{part}."): leaf for name, leaf in tensors.items() if name.startswith(f"{part}.")}
