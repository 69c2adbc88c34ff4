"""A fitted population as one file (`io.codec`). Nothing is pickled. It holds:

about      what describes the population, its network, the method and the samples
network    the start values of the trained parameters
constants  frozen parameters and buffers, which may be infinite
state      of the server: canonical models, and memberships where clients show them
clients    the states of those that took part
ids, known_ids, history
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..algorithms.contract import Method, Problem, Roster, Rows
from ..core.affinity import nothing
from ..core.ids import ClientIds
from ..core.losses import Loss
from ..core.population import Population
from ..core.trees import tree_map
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, PPFLError
from ..io.codec import dump, load
from ..io.files import atomic_write, damaged
from ..networks.description import describe_network
from ..server import ServerState, Trained
from ..sites import ENGINES, SavedStates, Stacked, engine_by_name
from .fit_parts import (
    describe_adapters,
    describe_loss,
    describe_method,
    restore_loss,
    restore_method,
    restore_network,
)
from .states import check_values, pack_clients, pack_server, unpack_clients, unpack_server

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
        "engine": getattr(fit.engine, "name", Stacked.name),
    }
    content = {
        "about": about,
        "network": trained,
        "constants": constants,
        "state": pack_server(fit.state),
        "clients": pack_clients(fit.clients, len(fit.ids)) if fit.clients.rows.ids == fit.ids else fit.clients,
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
        check_values(path, parts["network"])
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
        state, clients = restore_states(path, rule, problem, parts["known_ids"], parts["state"], parts["clients"])
        return Trained(
            problem, rule, state, parts["known_ids"], clients, spec,
            engine_by_name(about["engine"] if about["engine"] in ENGINES else Stacked.name), parts["history"],
        )  # fmt: skip
    except PPFLError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"cannot be understood ({' '.join(str(error).split())})") from None


def restore_states(
    path: Path, method: Method, problem: Problem, ids: ClientIds, state: ServerState, clients: SavedStates
) -> tuple[ServerState, SavedStates]:
    """The states of the server and of clients among `ids` as a file has them, checked, on the problem's device."""
    state = unpack_server(path, state, method.init_server(problem))
    clients = unpack_clients(path, clients, method.init_client(problem.population), ids)
    server, values = tree_map(lambda leaf: leaf.to(problem.device), (state.server, clients.rows.values))
    return state._replace(server=server), clients._replace(rows=Rows(clients.rows.ids, values))
